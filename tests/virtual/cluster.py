"""A cluster in virtual time: the real driver generates iterations on replicas and an object store that only take time;
see docs/decisions/047-a-cluster-in-virtual-time.md.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa

from ratchet.infra.execution import driver as driver_module
from ratchet.infra.execution import executors, neighbours, read_write_lock, replicas
from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.store import log, run_store
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Claim, ShardRef, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.calls import ComputedShard, RowsCall, ShardKey
from ratchet.infra.workers.ray_group import BESIDE, GroupLost
from ratchet.infra.workers.rollouts import Generated
from ratchet.rlhf.config import RunConfig, parse_config
from ratchet.tasks import generation_runner, leases, recording, rollout_worker, shard_runner
from ratchet.tasks.shard_runner import run_rows
from ratchet.tasks.stages.generate import GENERATE, GenerateSummary
from tests.faulty_store import Memory
from tests.virtual.time import Condition, Future, Lock, Queue, VirtualTime

T = TypeVar("T")

IN_VIRTUAL_TIME = (
    driver_module,
    executors,
    neighbours,
    read_write_lock,
    replicas,
    log,
    run_store,
    generation_runner,
    leases,
    rollout_worker,
    shard_runner,
)
"""The modules of the driver and of rollout workers that wait, or look at a clock."""
GENERATES = replace(GENERATE, outside=(), draws=None, replays=None)
"""The stage, without what it needs beside a config."""


@dataclass(frozen=True)
class Speeds:
    """Seconds that things take, unless they say otherwise."""

    tokens_per_s: float = 25_600.0
    """Of a replica; its trajectories share them."""
    tokens_per_s_alone: float = 150.0
    """Of a trajectory at most."""
    call: float = 0.0005
    """A call to a replica, and again its answer."""
    driver: float = 0.0008
    """Of the one core that runs the driver's Python: what Ray takes of it for a call and its answer (measured)."""
    begin: float = 0.001
    """Making a prompt."""
    take: float = 0.0002
    """Sending a trajectory to another replica."""
    write: float = 0.002
    """Making a trajectory's row."""
    journal: float = 0.4e-6
    """Writing a token to a journal, or giving it to a trajectory that goes on."""
    read: float = 0.06e-6
    """Reading a token of a journal."""
    restart: float = 120.0
    """New processes in the place of lost ones, until they hold the weights."""
    rest: float = 60.0
    """The rest of an iteration, in which nothing is generated."""
    recording: float = 0.33
    """What Prefect takes of an iteration, in the driver's process and in its server (benchmarks.md, "An iteration")."""
    request: float = 0.03
    """A request to the store."""
    reads_per_s: int = 5500
    """Requests that the store answers in a second; S3 promises so many for a prefix, and a run may have only one."""
    writes_per_s: int = 3500
    """The same for writes."""


@dataclass(frozen=True)
class Work:
    """The trajectories of iterations."""

    replicas: int
    prompts: int
    n: int = 8
    prompts_per_shard: int = 16
    max_in_flight: int = 512
    median: float = 1000.0
    """Tokens of a trajectory, of a log-normal distribution."""
    sigma: float = 1.0
    longest: int = 8192
    journal_s: float | None = 30.0
    seed: int = 0

    @property
    def shards(self) -> int:
        return -(-self.prompts // self.prompts_per_shard)

    def tokens(self, iteration: int, shard: int) -> list[int]:
        """Returns the tokens of each trajectory of a shard."""
        count = min(self.prompts_per_shard, self.prompts - shard * self.prompts_per_shard) * self.n
        drawn = np.random.default_rng([self.seed, iteration, shard]).lognormal(np.log(self.median), self.sigma, count)
        return np.clip(drawn, 1, self.longest).astype(int).tolist()  # type: ignore[no-any-return]

    def all_tokens(self, iteration: int = 0) -> list[int]:
        return [tokens for shard in range(self.shards) for tokens in self.tokens(iteration, shard)]

    def ideal(self, speeds: Speeds, iteration: int = 0) -> float:
        """Returns the seconds of all tokens on busy replicas, and then of the longest trajectory alone: the tail of a
        good schedule, which begins trajectories without knowing how long they become."""
        return sum(self._least(speeds, iteration))

    def least(self, speeds: Speeds, iteration: int = 0) -> float:
        """Returns the seconds that no schedule stays below."""
        return max(self._least(speeds, iteration))

    def _least(self, speeds: Speeds, iteration: int) -> tuple[float, float]:
        tokens = self.all_tokens(iteration)
        return sum(tokens) / (self.replicas * speeds.tokens_per_s), max(tokens) / speeds.tokens_per_s_alone


class Bucket(Memory):
    """S3: requests take time, and those beyond so many in a second are refused. Each operation is one request
    (tests/contract/test_objects.py), but deleting counts each object, because S3 does."""

    def __init__(self, time: VirtualTime, speeds: Speeds) -> None:
        super().__init__()
        self.time, self.speeds = time, speeds
        self.by_second = Counter[tuple[str, str, int]]()
        """Requests by folder (`all`: the whole run), `reads` or `writes`, and second."""
        self.written = Counter[str]()
        """Bytes by folder."""
        self.refused = 0

    def create(self, key: str, data: bytes) -> None:
        self._arrives("writes", [key])
        super().create(key, data)
        self.written[folder_of(key)] += len(data)

    def put(self, key: str, data: bytes) -> None:
        self._arrives("writes", [key])
        super().put(key, data)
        self.written[folder_of(key)] += len(data)

    def get(self, key: str) -> bytes:
        self._arrives("reads", [key])
        return super().get(key)

    def list(self, prefix: str) -> list[str]:
        self._arrives("reads", [prefix])
        return super().list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._arrives("writes", keys)
        super().delete([*keys])

    def _arrives(self, kind: str, keys: Sequence[str]) -> None:
        limit = self.speeds.reads_per_s if kind == "reads" else self.speeds.writes_per_s
        second = int(self.time.now)
        is_refused = self.by_second["all", kind, second] >= limit
        if not is_refused:
            self.by_second["all", kind, second] += len(keys)
            for key in keys:
                self.by_second[folder_of(key), kind, second] += 1
        self.time.sleep(self.speeds.request)
        if is_refused:
            self.refused += 1
            raise OSError(errno.EBUSY, "503 SlowDown")

    def most_per_s(self) -> dict[tuple[str, str], int]:
        """Returns the most requests in a second, by folder and kind."""
        most = Counter[tuple[str, str]]()
        for (folder, kind, _), requests in self.by_second.items():
            most[folder, kind] = max(most[folder, kind], requests)
        return dict(most)


def folder_of(key: str) -> str:
    """Returns the folder of a run, such as `trajectories/generate`."""
    first, _, rest = key.partition("/")
    return f"{first}/{rest.partition('/')[0]}" if first == "trajectories" else first


class Engine:
    """Trajectories that share an engine, all at the same speed."""

    def __init__(self, time: VirtualTime, speeds: Speeds) -> None:
        self.time, self.speeds = time, speeds
        self.complete: list[Generated] = []
        self._drawn, self._at = 0.0, time.now
        """The tokens that a trajectory has drawn that runs since the beginning, and the time when it had them."""
        self._ends: dict[Generated, tuple[float, int]] = {}
        """For each running trajectory, what `_drawn` will be when it is complete, and its tokens."""
        self._next: list[tuple[float, Generated]] = []
        self.tokens = 0.0
        """Drawn for all trajectories."""
        self.busy = 0.0
        """Share of the tokens that it could have drawn until it was given its last trajectory."""

    @property
    def _speed(self) -> float:
        return min(self.speeds.tokens_per_s_alone, self.speeds.tokens_per_s / max(len(self._ends), 1))

    def add(self, name: Generated, tokens: int, done: int) -> None:
        self.go_on()
        self._ends[name] = self._drawn + tokens - done, tokens
        heapq.heappush(self._next, (self._drawn + tokens - done, name))
        self.busy = self.tokens / (self.speeds.tokens_per_s * max(self.time.now, 1.0))

    def cancel(self, name: Generated) -> None:
        self.go_on()
        self._ends.pop(name, None)

    def drawn(self) -> dict[Generated, int]:
        """Returns the tokens that each running trajectory has so far."""
        self.go_on()
        return {name: int(tokens - (end - self._drawn)) for name, (end, tokens) in self._ends.items()}

    def seconds_to_next(self) -> float | None:
        """Returns the seconds until a trajectory is complete; None if none is running."""
        while self._next and self._ends.get(self._next[0][1], (None,))[0] != self._next[0][0]:
            heapq.heappop(self._next)  # it was cancelled
        return (self._next[0][0] - self._drawn) / self._speed if self._next else None

    def go_on(self) -> None:
        """Draws tokens until now."""
        while (seconds := self.seconds_to_next()) is not None and self._at + seconds <= self.time.now + 1e-9:
            self._draw(seconds)
            self._drawn, name = heapq.heappop(self._next)
            del self._ends[name]
            self.complete.append(name)
        self._draw(max(self.time.now - self._at, 0.0))

    def _draw(self, seconds: float) -> None:
        self._drawn += seconds * self._speed
        self.tokens += seconds * self._speed * len(self._ends)
        self._at += seconds


@dataclass
class Open:
    """A shard that is open in a process."""

    prompts: tuple[tuple[str, ...], ...]
    tokens: dict[str, int]
    journaled: Mapping[str, int]
    started: set[str] = field(default_factory=set)


class Process:
    """What `RayWorker` and its `Worker` are to the driver: queues of calls, each of which answers one at a time."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.time, self.number = cluster, cluster.time, number
        self.engine = Engine(cluster.time, cluster.speeds)
        self.open: dict[ShardKey, Open] = {}
        self.has_ended = False
        self.unanswered: set[Future[Any]] = set()
        self._journal: tuple[tuple[ShardRef, ...], dict[str, int]] = ((), {})
        self._changed = Condition(self.time)
        self._changes = 0
        self._queues = {
            name: Queue[tuple[Callable[[], Any], Future[Any]] | None](self.time) for name in ("do", "beside")
        }
        for queue in self._queues.values():
            self.time.start(partial(self._serve, queue))

    def submit(self, method: Callable[..., T], *arguments: Any) -> Future[T]:
        answer = Future[T](self.time)
        self.cluster.calls[method.__name__] += 1
        self.unanswered.add(answer)
        queue = self._queues["beside" if method in BESIDE else "do"]
        queue.put((lambda: getattr(self, method.__name__)(*arguments), answer))
        return answer

    def end(self, error: BaseException) -> None:
        self.has_ended = True
        for queue in self._queues.values():
            queue.put(None)
        for answer in list(self.unanswered):
            answer.set(error=error)

    def _serve(self, queue: Queue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
        while (asked := queue.get()) is not None and not self.has_ended:
            call, answer = asked
            self.time.sleep(self.cluster.speeds.call)
            try:
                result = call()
                self.time.sleep(self.cluster.speeds.call)
                answer.set(result)
            except Exception as error:
                answer.set(error=error)
            self.unanswered.discard(answer)

    # The methods of `Worker`.

    def begin(self, request: RowsCall[Any, Any]) -> tuple[tuple[str, ...], ...]:
        work, (stage, iteration, shard) = self.cluster.work, request.key
        if request.key not in self.open:
            tokens = work.tokens(iteration, shard)
            names = [f"{stage}-{iteration}-{shard}-{place}" for place in range(len(tokens))]
            prompts = tuple(tuple(names[first : first + work.n]) for first in range(0, len(names), work.n))
            self.time.sleep(self.cluster.speeds.begin * len(prompts))
            all_journaled = self._journaled(request.call.journal)
            journaled = {name: all_journaled[name] for name in names if name in all_journaled}
            self.time.sleep(self.cluster.speeds.journal * sum(journaled.values()))
            self.open[request.key] = Open(prompts, dict(zip(names, tokens, strict=True)), journaled)
        return self.open[request.key].prompts

    def _journaled(self, parts: tuple[ShardRef, ...]) -> dict[str, int]:
        """Returns the tokens of trajectories in a journal. As in `CallInputs`, the last one is kept."""
        if self._journal[0] != parts:
            journaled: dict[str, int] = {}
            for part in parts:
                if self.cluster.store.objects.get_if_there(part.key) is not None:  # else there is a newer one
                    journaled |= self.cluster.journals[part.key]
            self.time.sleep(self.cluster.speeds.read * sum(journaled.values()))
            self._journal = parts, journaled
        return self._journal[1]

    def generate(
        self, weights: Weights, submitted: Sequence[tuple[ShardKey, Sequence[str]]], wait_s: float
    ) -> list[Generated]:
        deadline = self.time.now + wait_s
        for key, names in submitted:
            shard = self.open.get(key)
            for name in names if shard is not None else ():
                assert name not in shard.started
                shard.started.add(name)
                done = min(shard.journaled.get(name, 0), shard.tokens[name])
                self.cluster.kept += done
                self.engine.add((key, name), shard.tokens[name], done)
        while True:
            self.engine.go_on()
            if self.engine.complete or self.time.now >= deadline:
                generated, self.engine.complete = self.engine.complete, []
                return [(key, name) for key, name in generated if key in self.open]
            self._rest(min(self.engine.seconds_to_next() or wait_s, deadline - self.time.now))

    def _rest(self, seconds: float) -> None:
        """Waits so long, or until trajectories are cancelled and the others get faster."""
        with self._changed:
            changes = self._changes
            self._changed.wait_for(lambda: self._changes != changes, seconds)

    def take(self, key: ShardKey, names: Sequence[str]) -> Sequence[str]:
        assert set(names) <= self.open[key].started
        self._close(key)
        self.time.sleep(self.cluster.speeds.take * len(names))
        return names

    def finish(
        self, request: RowsCall[Any, Any], others: Sequence[Future[Sequence[str]]] = ()
    ) -> ComputedShard[GenerateSummary]:
        began, call = self.time.now, request.call
        elsewhere = [name for pending in others for name in pending.result()]
        shard = self.open[request.key]
        assert shard.started | set(elsewhere) == shard.tokens.keys(), "a trajectory is missing"
        self._close(request.key)
        self.time.sleep(self.cluster.speeds.write * len(shard.tokens))
        table = pa.table({"trajectory_id": list(shard.tokens), "tokens": list(shard.tokens.values())})
        ref = self.cluster.store.write_shard(call.iteration, call.stage, call.attempt, call.shard, table)
        return ComputedShard(ref, GenerateSummary(tokens=sum(shard.tokens.values())), self.time.now - began)

    def journal(self, iteration: int, stage: str, number: int) -> ShardRef | None:
        running = self.engine.drawn()
        has = {
            name: running.get((key, name), shard.tokens[name])
            for key, shard in self.open.items()
            if key[:2] == (stage, iteration)
            for name in shard.started
        }
        if not has:
            return None
        self.time.sleep(self.cluster.speeds.journal * sum(has.values()))
        table = pa.table({"trajectory_id": list(has), "tokens": list(has.values())})
        ref = self.cluster.store.write_journal(iteration, stage, number, table)
        self.cluster.journals[ref.key] = has
        return ref

    def drop(self, keys: Sequence[ShardKey]) -> None:
        for key in keys:
            self._close(key)

    def _close(self, key: ShardKey) -> None:
        if (shard := self.open.pop(key, None)) is not None:
            for name in shard.started:
                self.engine.cancel((key, name))
            with self._changed:
                self._changes += 1
                self._changed.notify_all()


@dataclass(frozen=True)
class Replica:
    """A replica as the driver sees it."""

    cluster: Cluster
    number: int

    def call(self, method: Callable[..., T], *arguments: Any) -> T:
        return self.submit(method, *arguments).result()

    def submit(self, method: Callable[..., T], *arguments: Any) -> Future[T]:
        with self.cluster.core:
            self.cluster.time.sleep(self.cluster.speeds.driver)
        return self.cluster.process(self.number).submit(method, *arguments)

    handed = submit

    def generate(
        self, weights: Weights, submitted: Sequence[tuple[ShardKey, Sequence[str]]], wait_s: float
    ) -> list[Generated]:
        return self.call(Process.generate, weights, submitted, wait_s)


@dataclass(frozen=True)
class Iteration:
    """What generating an iteration took."""

    seconds: float
    ideal: float
    least: float
    """See `Work.least`."""
    cpu_s: float
    """CPU seconds of the driver's code."""
    calls: Counter[str]
    """Calls to replicas, by method."""
    requests: Counter[str]
    """Requests to the store, by kind."""
    most_per_s: Mapping[tuple[str, str], int]
    """See `Bucket.most_per_s`."""
    redrawn: float
    """Tokens that were drawn again, because their replicas were lost."""
    left_open: int
    """Shards that replicas still hold."""
    least_busy: float
    """Of all replicas, the smallest share of the tokens that it could have drawn until its last trajectory began."""
    core: float
    """The share of a core that the driver takes: its code, and Ray's for its calls."""
    written: Counter[str] = field(default_factory=Counter)
    """Bytes written into the store until the iteration was closed, by folder."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.ideal


class Cluster:
    """A driver, its replicas and its store. Losing one replica ends all of them, as in `RayGroup`."""

    def __init__(self, work: Work, speeds: Speeds = Speeds()) -> None:
        self.work, self.speeds = work, speeds
        self.time = VirtualTime()
        self.bucket = Bucket(self.time, speeds)
        self.core = Lock(self.time)
        """Of the driver."""
        self.journals: dict[str, dict[str, int]] = {}
        """Tokens by trajectory, by journal."""
        self.kept = 0
        """Tokens that were not drawn again after a loss."""
        self.calls = Counter[str]()
        self.losses = 0
        self._lost_tokens = 0.0
        """Drawn by replicas that were lost."""
        self.notes: list[str] = []
        self._processes: list[Process] = []
        self._starting = Lock(self.time)

    @contextmanager
    def driver(self, **changes: object) -> Iterator[Driver]:
        """Yields a driver; `changes` are dotted keys of its config with ``__`` for dots."""
        randomness = random.getstate()
        random.seed(self.work.seed)  # the store's backoff is random
        with self.time.in_modules(IN_VIRTUAL_TIME):
            self.store = RunStore(ObjectStore("memory", self.bucket, clock=self.time))
            values = {key.replace("__", "."): value for key, value in changes.items()}
            config = config_of(self.work).with_values(values)
            weights = {"actor": Weights(version=0, digest="first")}
            claim = Claim(
                config=config.model_dump(mode="json"), code="", packages={}, threads=1, host="", initial=weights
            )
            self.store.log.claim(claim)
            driver = Driver(config, self.store)
            group = SimpleNamespace(replicas=lambda: [Replica(self, number) for number in range(self.work.replicas)])
            driver.groups = cast("Any", SimpleNamespace(of=lambda role: group))
            self._start()
            try:
                yield driver
            finally:
                if driver.rollout.replicas is not None:
                    driver.rollout.replicas.close()
                self.lose()
                random.setstate(randomness)

    def _start(self) -> None:
        self._processes = [Process(self, number) for number in range(self.work.replicas)]

    def process(self, number: int) -> Process:
        with self._starting:
            if not self._processes:
                self.time.sleep(self.speeds.restart)
                self._start()
            return self._processes[number]

    def lose(self) -> None:
        """A process dies, and with it its group."""
        self._lost_tokens += sum(process.engine.tokens for process in self._processes)
        self.losses += 1
        ended, self._processes = self._processes, []
        for process in ended:
            process.end(GroupLost("a process died"))

    def lose_at(self, at: float) -> None:
        def lose() -> None:
            self.time.sleep(at)
            self.lose()

        self.time.start(lose)

    def lose_every(self, seconds: float) -> None:
        """A process dies once in every so many seconds, at a moment that depends on the seed."""
        rng = np.random.default_rng(self.work.seed)

        def lose() -> None:
            for number in itertools.count():
                self.time.sleep((number + rng.random()) * seconds - self.time.now)
                self.lose()

        self.time.start(lose)

    def iterations(self, driver: Driver, count: int) -> list[Iteration]:
        """Generates and closes iterations."""
        done = []
        for _ in range(count):
            before = Counter(self.bucket.written)
            iteration, _ = self.generated(driver)
            self.time.sleep(self.speeds.rest + self.speeds.recording)
            driver.store.close({"loss": 0.0})
            done.append(replace(iteration, written=self.bucket.written - before))
        return done

    @property
    def drawn(self) -> float:
        """Tokens that all engines have drawn."""
        for process in self._processes:
            process.engine.go_on()
        return self._lost_tokens + sum(process.engine.tokens for process in self._processes)

    def generated(self, driver: Driver) -> tuple[Iteration, Manifest]:
        """Generates the open iteration; tries again after a loss, as the stage's task does."""
        number = driver.state.iteration
        began, cpu, drawn = self.time.now, self.time.cpu_s["driver"], self.drawn
        for counted in (self.bucket.requests, self.bucket.by_second, self.calls):
            counted.clear()
        for wait_s in (*recording.WAITS_S, None):
            try:
                manifest, _ = run_rows(driver, GENERATES, number, {}, StageHandle("generate"))
                break
            except GroupLost:
                if wait_s is None:
                    raise
                self.time.sleep(wait_s)
        seconds, cpu_s = self.time.now - began, self.time.cpu_s["driver"] - cpu
        iteration = Iteration(
            seconds=seconds,
            ideal=self.work.ideal(self.speeds, number),
            least=self.work.least(self.speeds, number),
            cpu_s=cpu_s,
            core=(cpu_s + self.speeds.driver * self.calls.total()) / seconds,
            calls=Counter(self.calls),
            requests=Counter(self.bucket.requests),
            most_per_s=self.bucket.most_per_s(),
            redrawn=self.drawn - drawn - sum(self.work.all_tokens(number)),
            left_open=sum(len(process.open) for process in self._processes),
            least_busy=min(process.engine.busy for process in self._processes),
        )
        return iteration, manifest


def config_of(work: Work) -> RunConfig:
    return parse_config(
        {
            "run": {"name": "virtual", "store": "memory://"},
            "model": {"path": "model"},
            "data": {"train": ["prompts.jsonl"], "prompts_per_iteration": work.prompts},
            "rollout": {
                "engine": "vllm",
                "n": work.n,
                "max_response_tokens": work.longest,
                "prompts_per_shard": work.prompts_per_shard,
                "max_in_flight": work.max_in_flight,
                "journal_s": work.journal_s,
            },
            "reward": {"function": "length"},
            "algorithm": {"advantage": {"type": "reinforce_plus_plus"}, "kl": {"in_reward": None}},
            "critic": None,
            "actor": {"mini_batch_trajectories": work.prompts * work.n},
            "pools": {"train": {}, "answers": {"workers": work.replicas}},
            "placement": {"actor": "train", "rollout": "answers"},
        },
        "virtual",
    )
