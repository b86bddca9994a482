"""`make torture`: faults at random, on every kind of run, for a given time; a table of what was done and what held.

    python -m tests.torture --minutes 15 --seed 0        # another seed: other faults
    python -m tests.torture --seed 0 --only 17           # one scenario again

Each scenario draws a kind of run and a fault from (seed, number), does it, brings the run to its end, and compares: the
same weights and rows to the bit as a run that was left alone (but for async), each committed once, an unbroken chain,
no file that the log does not name, no process left over.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests import ceph
from tests.prefect_server import prefect_api
from tests.s3_server import moto_server, s3_at
from tests.torture.checks import Result, check, check_files, leftovers, result_of
from tests.torture.faults import DAMAGES, FAULTS, Victim, expect, suits
from tests.torture.kinds import CHANGES, FITS, Kind, kinds, workspace

PARALLEL = 2
DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_API_REQUEST_TIMEOUT": "200",  # a slow machine records its runs, too
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "900",
}


@dataclass(frozen=True)
class Outcome:
    number: int
    kind: str
    fault: str
    seconds: float
    failure: str | None
    kills: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, help="the number of one scenario")
    parser.add_argument("--ray", action="store_true", help="runs with worker groups on Ray, too")
    parser.add_argument("--ceph", action="store_true", help="runs on S3 are on Ceph's gateway, not on moto (make ceph)")
    parser.add_argument(
        "--kind", action="append", default=[], help="this kind of run alone, such as 'on S3'; may be repeated"
    )
    parser.add_argument(
        "--fault", action="append", default=[], choices=FAULTS, help="this fault alone; may be repeated"
    )
    parser.add_argument("--keep", type=Path, help="where folders of scenarios that failed are kept")
    arguments = parser.parse_args()
    unknown = sorted({*arguments.kind} - {*CHANGES, *FITS})
    if unknown:
        parser.error(f"no kind of run is called {unknown[0]!r}: there are {', '.join([*CHANGES, *FITS])}")
    if "on Ray" in arguments.kind and not arguments.ray:
        parser.error("runs on Ray need --ray")
    if arguments.ray and find_spec("ray") is None:
        parser.error("Ray is not installed")
    if arguments.ceph and (reason := ceph.missing()):
        parser.error(reason)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    torture = Torture(arguments)
    failed = torture.run()
    sys.exit(1 if failed or not torture.outcomes else 0)


class Torture:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.ray = arguments.ray
        self.outcomes: list[Outcome] = []
        self.lock, self.on_ray = threading.Lock(), threading.Lock()
        self.started = time.monotonic()

    def run(self) -> list[Outcome]:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torture-")))
            os.environ["PREFECT_API_URL"] = stack.enter_context(prefect_api(self.folder))
            os.environ["PREFECT_HOME"] = str(self.folder / "clients")
            server = ceph.ceph_server(self.folder / "ceph") if self.arguments.ceph else moto_server()
            self.bucket = stack.enter_context(s3_at(stack.enter_context(server)))
            if self.ray:
                stack.enter_context(_ray_cluster())
            shared = self.folder / "workspace"
            shared.mkdir()
            self.kinds = kinds(workspace(shared), self.ray, self.arguments.kind)
            with ThreadPoolExecutor(PARALLEL) as threads:
                results = threads.map(self._alone, self.kinds)
                self.expected = {kind.name: result for kind, result in zip(self.kinds, results, strict=True)}
                print(f"{len(self.expected)} runs left alone: {time.monotonic() - self.started:.0f} s", flush=True)
                self.started = time.monotonic()
                numbers = iter(range(10**9)) if self.arguments.only is None else iter([self.arguments.only])
                for thread in [threads.submit(self._scenarios, numbers) for _ in range(PARALLEL)]:
                    thread.result()
        return self._tell()

    def _alone(self, kind: Kind) -> Result:
        victim = self._victim(kind, -1, random.Random(0))
        with self.on_ray if kind.on_ray else nullcontext():
            victim.finish()
            self._end_workers(victim)
        return result_of(kind, victim.url, victim.folder)

    def _scenarios(self, numbers: Iterator[int]) -> None:
        while time.monotonic() - self.started < 60 * self.arguments.minutes:
            with self.lock:
                number = next(numbers, None)
            if number is None:
                return
            outcome = self._scenario(number)
            with self.lock:
                self.outcomes.append(outcome)
            held = "held" if outcome.failure is None else f"FAILED\n{outcome.failure}"
            print(f"{number:4d}  {outcome.kind}: {outcome.fault}, {outcome.seconds:.0f} s: {held}", flush=True)

    def _scenario(self, number: int) -> Outcome:
        draw = random.Random(f"{self.arguments.seed} {number}")
        kind = draw.choice(self.kinds)
        fault = draw.choice([name for name in self.arguments.fault or FAULTS if suits(name, kind)])
        began, failure = time.monotonic(), None
        with self.on_ray if kind.on_ray else nullcontext():
            victim = self._victim(kind, number, draw)
            held = partial(self._check, victim, is_damaged=fault in DAMAGES)
            try:
                FAULTS[fault](victim)
                victim.setups.clear()
                victim.finish()
                held()
                assert expect(victim.cli("verify", "run"), 0) == 0
                expect(victim.cli("vacuum", "run"), 0)
                check_files(victim.url, victim.folder, len(victim.processes.children))
                held()
            except Exception:
                failure = traceback.format_exc()
            finally:
                victim.processes.close()
                self._end_workers(victim)
            left = _after_a_while(lambda: leftovers(victim.folder))
            if left and failure is None:
                failure = f"processes left over: {[process.cmdline() for process in left]}"
            for process in left:
                process.kill()
        if failure is None:
            shutil.rmtree(victim.folder)
        elif self.arguments.keep is not None:
            shutil.copytree(victim.folder, self.arguments.keep / f"{number}", dirs_exist_ok=True)
        return Outcome(number, kind.name, fault, time.monotonic() - began, failure, victim.kills)

    def _check(self, victim: Victim, *, is_damaged: bool) -> None:
        drivers = len(victim.processes.children)
        check(
            victim.kind,
            victim.url,
            victim.folder,
            self.expected[victim.kind.name],
            drivers=drivers,
            is_damaged=is_damaged,
        )

    def _victim(self, kind: Kind, number: int, draw: random.Random) -> Victim:
        folder = self.folder / (f"{number}" if number >= 0 else f"alone {kind.name}")
        folder.mkdir()
        store = f"{self.bucket}/{folder.name.replace(' ', '-')}" if kind.on_s3 else f"file://{folder}/runs"
        return Victim(kind, folder, store, draw)

    def _end_workers(self, victim: Victim) -> None:
        if victim.kind.on_ray:
            victim.cli("stop", "run").wait(300)

    def _tell(self) -> list[Outcome]:
        done = sorted(self.outcomes, key=lambda outcome: outcome.number)
        failed = [outcome for outcome in done if outcome.failure is not None]
        faults = sorted({outcome.fault for outcome in done})
        table = Counter((outcome.kind, outcome.fault) for outcome in done)
        bad = Counter((outcome.kind, outcome.fault) for outcome in failed)
        minutes = (time.monotonic() - self.started) / 60
        kills = sum(outcome.kills for outcome in done)
        print(
            f"\nseed {self.arguments.seed}: {len(done)} scenarios in {minutes:.0f} minutes, {kills} drivers killed, "
            f"{len(failed)} failed\n"
        )
        print(f"| run | {' | '.join(faults)} |\n|---|{'---|' * len(faults)}")
        for kind in sorted({outcome.kind for outcome in done}):
            cells = [_cell(table[kind, fault], bad[kind, fault]) for fault in faults]
            print(f"| {kind} | {' | '.join(cells)} |")
        for outcome in failed:
            print(f"\n{outcome.number}: {outcome.kind}, {outcome.fault}\n{outcome.failure}")
        return failed


def _cell(done: int, failed: int) -> str:
    return f"{done - failed} of {done}" if failed else f"{done}" if done else ""


def _after_a_while(left: Callable[[], list[psutil.Process]], seconds: float = 300.0) -> list[psutil.Process]:
    """Returns the processes that are still there after so many seconds; returns as soon as none is."""
    deadline = time.monotonic() + seconds
    while (processes := left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return processes


@contextmanager
def _ray_cluster() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    # by default, 15: the scenarios on this machine would starve its workers
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (as Ray spells it)
    options = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    cluster.add_node(**options)
    os.environ["RAY_ADDRESS"] = cluster.address
    yield
    cluster.shutdown()


if __name__ == "__main__":
    main()
