"""Faults of runs: kills, contests, sleep, a store that fails, damage, deletion, clocks that are set.

Each function injects one, and leaves a run that a plain resume can bring to its end.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlparse

import psutil

from ratchet.infra.runs.run import open_run
from ratchet.infra.store.object_store import ObjectStore
from tests.faults.proxy import Action, Rule, proxy
from tests.faults.test_clocks import stepping
from tests.processes import Child, Fault, Processes
from tests.torture.checks import history_of, named
from tests.torture.kinds import WORKSHOPS, Kind

WAIT_S = 900.0
OPERATIONS = 100
"""Approximate number of writes of a tiny run."""
MOMENTS = (
    ("create", '{"kind":"claim"'),
    ("create", '{"kind":"journal"'),
    ("create", '{"kind":"shard"'),
    ("create", '{"kind":"stage"'),
    ("create", '{"kind":"close"'),
    ("create", '{"kind":"snapshot"'),
    ("create", '{"kind":"expire"'),
    ("put", "trajectories/"),
    ("put", "manifests/"),
    ("put", "checkpoints/"),
    ("put", "index/"),
    ("put", "metrics/"),
    ("put", "log/tail"),
    ("put", "run.json"),
)
"""Operations at which something begins or ceases to exist."""
SAID = (0, 1, 2, 3)
"""Exit codes of commands that end by themselves: done, failed, a user's mistake, another driver."""


@dataclass
class Victim:
    """A run, and the processes that work on it."""

    kind: Kind
    folder: Path
    store: str
    random: random.Random
    setups: list[Callable[[], None]] = field(default_factory=list)
    kills: int = 0
    """Drivers that died where `killed` wanted it."""

    def __post_init__(self) -> None:
        self.processes = Processes(self.folder)

    @property
    def url(self) -> str:
        return f"{self.store}/run"

    @property
    def objects(self) -> ObjectStore:
        return ObjectStore(self.url)

    def start(self, *faults: Fault, take_over: bool = False) -> Child:
        """Starts a driver like a user."""
        command = self.kind.command(self.folder, self.store)
        more = ("--take-over",) if take_over and not self.kind.is_fit else ()
        return self.processes.cli(*command, *more, faults=faults, setup=self.setup)

    def cli(self, *arguments: object, faults: tuple[Fault, ...] = ()) -> Child:
        return self.processes.cli(*arguments, "--store", self.store, faults=faults, setup=self.setup)

    @property
    def setup(self) -> Callable[[], None]:
        return partial(_setup, str(self.folder), tuple(self.setups))

    @property
    def is_complete(self) -> bool:
        run = open_run(self.url)
        return run.is_fit or run.state.iteration == run.config.train.iterations

    def finish(self) -> None:
        """Drives the run to its end without further faults; raises if that fails."""
        expect(self.start(), 0)

    def somewhere(self, action: int = signal.SIGKILL) -> Fault:
        """Returns a kill at some moment in a driver's life: before or after a write, or after an optimizer step."""
        when = self.random.choice(["before", "after"])
        if self.random.random() < 0.5:
            operation, match = self.random.choice(MOMENTS)
            return Fault(operation, match, when, count=self.random.randint(1, 6), action=action)
        operation = self.random.choice(["put", "put", "create", "create", "step"])
        most = 12 if operation == "step" else OPERATIONS
        return Fault(operation, "", when, count=self.random.randint(1, most), action=action)

    def killed(self, fault: Fault | None = None) -> bool:
        """Starts a driver that dies of a fault, by default somewhere, if it gets there; returns True if it did."""
        died = expect(self.start(fault or self.somewhere()), 0, -signal.SIGKILL) != 0
        self.kills += died
        return died


def _setup(folder: str, setups: tuple[Callable[[], None], ...]) -> None:
    os.chdir(folder)  # by which what a driver starts is known, should it outlive the driver
    for setup in setups:
        setup()


def expect(child: Child, *codes: int) -> int:
    code = child.wait(WAIT_S)
    assert "Traceback" not in child.text, f"a traceback:\n{child.text}"
    assert code in codes, f"exit code {code}, not {' or '.join(map(str, codes))}:\n{child.text}"
    return code


def kills(victim: Victim) -> None:
    for _ in range(victim.random.randint(1, 3)):
        victim.killed()


def many_kills(victim: Victim) -> None:
    """Kills one driver after the other, until the run is complete or has had its share."""
    for _ in range(victim.random.randint(10, 20)):
        # mostly where a turn is stored: a driver that survives such a kill has all turns behind it
        stores_turn = Fault(
            "put", "calls/", victim.random.choice(["before", "after"]), count=victim.random.randint(1, 8)
        )
        if not victim.killed(stores_turn if victim.random.random() < 0.85 else None):
            return


def terminations(victim: Victim) -> None:
    for _ in range(victim.random.randint(1, 2)):
        child = victim.start(victim.somewhere(signal.SIGTERM))
        code = expect(child, 0, 1, -signal.SIGTERM)  # of which it learns once it has claimed the run
        assert code != 0 or "stopping: finishing" not in child.text or victim.is_complete, child.text


def kills_of_children(victim: Victim) -> None:
    """Kills what the driver has started: reward processes, engines, workers on Ray."""
    child = victim.start()
    for _ in range(victim.random.randint(1, 2)):
        time.sleep(victim.random.uniform(0.2, 4.0))
        with suppress(psutil.Error):
            own = psutil.Process(child.process.pid).children(recursive=True)
            workers = _ray_workers() if victim.kind.on_ray else []
            if own + workers:
                victim.random.choice(own + workers).kill()
    expect(child, 0, 1)


def _ray_workers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if "ray::Process" in str(process.cmdline()) else []
    return found


def contests(victim: Victim) -> None:
    """Starts several drivers at once, each told to take over; exactly one can win in the end, and none does harm."""
    if victim.random.random() < 0.5:
        victim.killed()
    drivers = []
    for _ in range(victim.random.randint(2, 3)):
        drivers.append(victim.start(take_over=True))
        time.sleep(victim.random.choice([0.0, 0.0, victim.random.uniform(0, 3)]))
    codes = [expect(driver, 0, 3) for driver in drivers]
    assert 0 in codes or victim.kind.is_fit, f"nobody came through: {codes}"


def take_overs(victim: Victim) -> None:
    """Suspends a driver while another takes over, and wakes it at once, or when all is done."""
    first = victim.start(victim.somewhere(signal.SIGSTOP))
    _until_it_sleeps(first)
    if victim.kind.is_fit and _sleeps(first):  # fits are not taken over on the machine of a live driver
        first.signal(signal.SIGCONT)
    second = victim.start(take_over=True)
    if victim.random.random() < 0.5:
        time.sleep(victim.random.uniform(0, 3))
        with suppress(ProcessLookupError):
            first.signal(signal.SIGCONT)
    expect(second, 0, 3)
    with suppress(ProcessLookupError):
        first.signal(signal.SIGCONT)
    expect(first, 0, 3)


def _until_it_sleeps(child: Child) -> None:
    deadline = time.monotonic() + WAIT_S
    while child.process.is_alive() and not _sleeps(child):
        if time.monotonic() > deadline:
            child.wait(0)  # which shows the stacks of its threads
        time.sleep(0.05)


def _sleeps(child: Child) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED
    return False


def clocks(victim: Victim) -> None:
    victim.setups.append(stepping)
    victim.killed()


def store_faults(victim: Victim) -> None:
    """Fails 4 to 20 % of the requests to S3, in every possible way."""
    port = urlparse(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    actions: tuple[Action, ...] = ("503", "409", "dropped before", "dropped after", "slow")
    share = victim.random.uniform(0.04, 0.2) / len(actions)
    rules = [Rule("PUT" if action == "409" else ".*", "", action, times=10**9, share=share) for action in actions]
    with proxy(port, *rules) as url:
        victim.setups.append(partial(_endpoint, url))
        victim.killed()
        expect(victim.start(), 0, 1)
        victim.setups.clear()


def prefect_faults(victim: Victim) -> None:
    """Fails a tenth to nine tenths of the requests to Prefect's server.

    They fail from the first one, or once the run is under way, when the driver is also told to stop.
    """
    port = urlparse(os.environ["PREFECT_API_URL"]).port
    assert port is not None
    actions: tuple[Action, ...] = ("503", "dropped before", "dropped after", "garbled")
    share = victim.random.choice([0.1, 0.4, 0.9]) / len(actions)
    rules = [Rule(".*", "", action, times=10**9, share=share) for action in actions]
    with proxy(port, *rules) as url:
        victim.setups.append(partial(_prefect, f"{url}/api"))
        if victim.random.random() < 0.5:
            terminations(victim)
        expect(victim.start(), 0)
        victim.setups.clear()


def _prefect(url: str) -> None:
    """Sets Prefect's settings directly, which it has read by now."""
    from prefect.context import SettingsContext, get_settings_context
    from prefect.settings import PREFECT_API_URL

    now = get_settings_context()
    settings = now.settings.copy_with_update(updates={PREFECT_API_URL: url})
    SettingsContext(profile=now.profile, settings=settings).__enter__()


def _endpoint(url: str) -> None:
    os.environ["AWS_ENDPOINT_URL"] = url


def bit_flips(victim: Victim) -> None:
    _damage(victim, _flip)


def losses(victim: Victim) -> None:
    _damage(victim, lambda data, number: None)


def _flip(data: bytes, number: int) -> bytes | None:
    changed = bytearray(data)
    if changed:
        changed[number // 8 % len(data)] ^= 1 << number % 8
    return bytes(changed)


def _damage(victim: Victim, damage: Callable[[bytes, int], bytes | None]) -> None:
    """Damages one object of a run, begun or done.

    Every command reports it or does not need it; nothing that is committed is deleted; and restored, the run is sound.
    """
    victim.killed()
    objects = victim.objects
    keys = [key for key in objects.list("") if not key.startswith((".", "log/heartbeat", "report.html"))]
    if not keys:
        return
    key = victim.random.choice(keys)
    data = objects.get(key)
    history = history_of(victim.url, victim.folder)
    newest, committed = f"log/{history.state.slot:012d}.json", named(history)
    needed = key != newest and (key.startswith("log/0") or key in committed)
    changed = damage(data, victim.random.getrandbits(40))
    if changed == data:
        return
    if changed is None:
        objects.delete([key])
    else:
        objects.put(key, changed)
    verified = victim.cli("verify", "run")
    expect(verified, 0, 1, 2)
    for command in (("status", "run"), ("vacuum", "run", "--dry-run"), ("explain", "run", 1)):
        expect(victim.cli(*command), *SAID)
    said = verified.text
    assert key in said or not needed, f"verify does not see that {key} is not what it was:\n{said}"
    code = expect(victim.start(), *SAID)
    if code == 0 and not victim.kind.is_fit:
        expect(victim.cli("report", "run", "-o", victim.folder / "page.html"), *SAID)
    # what no record names is swept; and in the place of the newest record, if it was lost, there may be another
    if (key in committed or key.startswith("log/0")) and objects.get_if_there(key) == changed:
        objects.put(key, data)
    gone = {name for name in committed - set(objects.list("")) - {key} if not name.startswith("checkpoints/")}
    assert code == 0 or not gone, f"deleted by a driver that refused to go on: {sorted(gone)[:5]}"


def commands(victim: Victim) -> None:
    """Kills every other command somewhere, while a driver works or after it died."""
    victim.killed()
    driver = victim.start(victim.somewhere()) if victim.random.random() < 0.3 else None
    for _ in range(3):
        arguments = victim.random.choice(_commands(victim))
        if "--store" in arguments:
            child = victim.processes.cli(*arguments, faults=(_early(victim),), setup=victim.setup)
        else:
            child = victim.cli(*arguments, faults=(_early(victim),))
        if victim.random.random() < 0.5:
            time.sleep(victim.random.uniform(0, 2.5))
            with suppress(ProcessLookupError):
                child.signal(signal.SIGKILL)
        expect(child, *SAID, -signal.SIGKILL)
    if driver is not None:
        expect(driver, 0, 3, -signal.SIGKILL)


def _early(victim: Victim) -> Fault:
    return Fault(victim.random.choice(["put", "create"]), "", "after", count=victim.random.randint(1, 6))


def _commands(victim: Victim) -> list[tuple[object, ...]]:
    page, export = victim.folder / "page.html", victim.folder / "exported"
    shared: list[tuple[object, ...]] = [
        ("status", "run"),
        ("verify", "run", "--repair"),
        ("vacuum", "run"),
        ("vacuum", "run", "--take-over"),
        ("stop", "run"),
    ]
    if victim.kind.is_fit:
        return shared
    return [
        *shared,
        ("fork", "run", "--at", "1", "--run", "child"),
        ("rescore", "run", "--run", "scored", "--reward", "tests.rewards:digits"),
        ("report", "run", "-o", page),
        ("export", "run", export),
        ("reproduce", "run", "--iteration", 0),
        ("show", "run"),
        ("query", "run", "select count(*) from trajectories"),
        ("explain", "run", 1),
    ]


def deletions(victim: Victim) -> None:
    """Deletes the folder while a driver is at work; afterwards the run is started again."""
    child = victim.start(victim.somewhere(signal.SIGSTOP))
    _until_it_sleeps(child)
    asleep = _sleeps(child)
    if victim.kind.on_s3:
        victim.objects.delete(victim.objects.list(""))
    else:
        shutil.rmtree(victim.store.removeprefix("file://") + "/run", ignore_errors=True)
    if asleep:
        child.signal(signal.SIGCONT)
    code = expect(child, 0, 1, 2)  # 2: while it tried whether the store keeps writers apart, which it then did not
    left = victim.objects.list("")
    # one that had yet to claim begins the run, and one that had done all is done
    whole = code == 0 and "was deleted" not in child.text and bool(left) and victim.is_complete
    assert whole or not left, f"left over: {left[:5]}\n{child.text}"


FAULTS: dict[str, Callable[[Victim], None]] = {
    "driver killed": kills,
    "many drivers killed": many_kills,
    "SIGTERM": terminations,
    "child or worker killed": kills_of_children,
    "contest": contests,
    "SIGSTOP, take-over": take_overs,
    "clock set": clocks,
    "faulty S3": store_faults,
    "faulty Prefect": prefect_faults,
    "bit flipped": bit_flips,
    "object lost": losses,
    "command killed": commands,
    "folder deleted": deletions,
}

DAMAGES = ("bit flipped", "object lost")


def suits(fault: str, kind: Kind) -> bool:
    if fault == "faulty S3":
        return kind.on_s3
    if fault == "many drivers killed":
        return kind.name == WORKSHOPS
    if kind.on_ray:
        return fault in ("driver killed", "child or worker killed", "SIGTERM", "contest")
    return True
