"""Feeds the replicas of the rollout: each takes trajectories from one queue when it has room."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue

from ratchet.infra.store.records import Weights
from ratchet.infra.workers.calls import Pending, ShardKey
from ratchet.infra.workers.ray_group import GroupLost
from ratchet.infra.workers.rollouts import Generated
from ratchet.infra.workers.worker import Worker
from ratchet.infra.workers.worker_groups import Replica

PACE_S = 0.005
"""Seconds between two calls that generate, on average over all replicas: each takes almost a millisecond of the
driver's core, and a replica may complete hundreds of trajectories per second."""
Prompt = tuple[ShardKey, tuple[str, ...]]
"""A shard, and the ids of the trajectories of one of its prompts."""
Generate = Callable[[Replica, Weights, Sequence[Prompt]], Sequence[Generated]]
"""A function that generates on a replica with these weights; see `Worker.generate`."""
Begin = Callable[[Replica], Pending[Sequence[tuple[str, ...]]]]
"""A function that opens a shard on a replica. The result is the trajectory ids of each prompt."""


@dataclass(frozen=True)
class Complete:
    key: ShardKey
    names: dict[int, list[str]]
    """For each replica on which the shard is open, the ids of the trajectories that it has completed."""


Reports = SimpleQueue[Complete | BaseException | None]
"""Messages to a stage: a complete shard, the error of a replica, or None if a replica reports without either."""


@dataclass
class _OpenShard:
    begin: Begin
    reports: Reports
    left: set[str]
    """Incomplete trajectories."""
    opened_on: set[int]
    """Replicas on which the shard is open."""
    replica_of: dict[str, int] = field(default_factory=dict)
    """The replica of each running or complete trajectory."""


class Feed:
    """The trajectories of all stages that generate, queued or in flight. Thread-safe."""

    def __init__(self, replica_count: int, limit: int | None) -> None:
        """Makes an empty queue.

        Args:
            limit: largest number of trajectories that a replica generates at the same time; None: a replica generates
                one shard at a time, whose trajectories are a batch of the engine.
        """
        self.error: BaseException | None = None
        """The error that ended the replicas."""
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: deque[Prompt] = deque()
        self._shards: dict[ShardKey, _OpenShard] = {}
        self._listening: Counter[Reports] = Counter()
        """Number of open shards of each stage."""
        self._in_flight = [0] * replica_count
        self._shard_size = sys.maxsize
        """Trajectories of the shard that was opened last."""
        self._has_ended = False

    @property
    def room(self) -> int:
        """Number of shards to open now, so that no replica waits for trajectories: at most one for each replica."""
        with self._changed:
            replicas = len(self._in_flight)
            if self._limit is None:
                return max(replicas - len(self._shards), 0)
            waiting = sum(len(names) for _, names in self._queue)
            free = self._limit * replicas - waiting - sum(self._in_flight)
            least = 0 if self._queue else 1
            return min(max(-(-free // self._shard_size), least), replicas)

    @property
    def in_flight(self) -> int:
        """Number of trajectories that replicas generate."""
        with self._changed:
            return sum(self._in_flight)

    def open(
        self,
        key: ShardKey,
        prompts: Sequence[tuple[str, ...]],
        begin: Begin,
        reports: Reports,
        replica: int,
    ) -> None:
        """Adds a shard, with the trajectory ids of each of its prompts. `begin` has opened it on one `replica`."""
        with self._changed:
            if self.error is not None:
                raise self.error
            if not prompts:  # such as the greedy answers to what dynamic sampling has not kept
                reports.put(Complete(key, {replica: []}))
                return
            left = {name for names in prompts for name in names}
            self._shards[key] = _OpenShard(begin, reports, left, {replica})
            self._shard_size = len(left)
            self._listening[reports] += 1
            self._queue += ((key, names) for names in prompts)
            self._changed.notify_all()

    def wait(self, replica: int) -> bool:
        """Waits until there is work for a replica. Returns False once nothing will come any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._queue or self._in_flight[replica])
            return not self._has_ended

    def take(self, replica: int) -> tuple[list[Prompt], list[Begin]]:
        """Takes work for a replica.

        Returns:
            The trajectories to submit now: at most the replica's share of the queue, none if it only has to continue.
            And functions that open those of their shards that are not yet open on the replica.
        """
        with self._changed:
            taken: list[Prompt] = []
            if self._limit is None:
                batch = self._queue[0][0] if self._queue and not self._in_flight[replica] else None
                while self._queue and self._queue[0][0] == batch:
                    taken.append(self._queue.popleft())
            else:
                # the first replica to ask must not take the whole queue
                share = -(-len(self._queue) // len(self._in_flight))
                running = self._in_flight[replica]
                # a prompt that has more trajectories than the limit runs alone
                while len(taken) < share and (running + len(self._queue[0][1]) <= self._limit or not running):
                    taken.append(self._queue.popleft())
                    running += len(taken[-1][1])
            for key, names in taken:
                self._shards[key].replica_of |= dict.fromkeys(names, replica)
                self._in_flight[replica] += len(names)
            shards = [self._shards[key] for key in dict.fromkeys(key for key, _ in taken)]
            unopened = [shard for shard in shards if replica not in shard.opened_on]
            for shard in unopened:
                shard.opened_on.add(replica)
            return taken, [shard.begin for shard in unopened]

    def put(self, replica: int, generated: Iterable[Generated]) -> None:
        """Records the trajectories that a replica has completed, and reports complete shards."""
        with self._changed:
            for key, name in generated:
                shard = self._shards.get(key)
                if shard is None or name not in shard.left:  # it was dropped
                    continue
                self._in_flight[replica] -= 1
                shard.left.discard(name)
                if not shard.left:
                    names: dict[int, list[str]] = {number: [] for number in sorted(shard.opened_on)}
                    for finished, number in shard.replica_of.items():
                        names[number].append(finished)
                    self._forget(key)
                    shard.reports.put(Complete(key, names))
            for reports in self._listening:
                reports.put(None)

    def drop(self, keys: Iterable[ShardKey]) -> None:
        """Forgets shards."""
        with self._changed:
            dropped = {key: self._forget(key) for key in keys if key in self._shards}
            self._queue = deque(prompt for prompt in self._queue if prompt[0] not in dropped)
            for shard in dropped.values():
                for name in shard.left & shard.replica_of.keys():
                    self._in_flight[shard.replica_of[name]] -= 1

    def _forget(self, key: ShardKey) -> _OpenShard:
        shard = self._shards.pop(key)
        self._listening[shard.reports] -= 1
        if not self._listening[shard.reports]:
            del self._listening[shard.reports]
        return shard

    def fail(self, error: BaseException) -> None:
        """Reports a replica's error to all stages, and ends."""
        with self._changed:
            self.error = self.error or error
            for shard in self._shards.values():
                shard.reports.put(error)
        self.end()

    def end(self) -> None:
        """Tells the replicas to stop."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


class Replicas:
    """The replicas of the rollout, each with a thread that waits for it."""

    def __init__(self, replicas: Sequence[Replica], limit: int | None, generate: Generate) -> None:
        """Starts the threads; see `Feed` for `limit`."""
        self._replicas, self._generate = replicas, generate
        self.feed = Feed(len(replicas), limit)
        self._weights: Weights | None = None
        self._numbers = count()
        """Numbers of the shards, by which they are opened on one replica after the other."""
        self._opening = [threading.Lock() for _ in replicas]
        """Locks by replica, each held while it opens the shards of the prompts that it has taken."""
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"replica {number}", daemon=True)
            for number in range(len(replicas))
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, number: int) -> Replica:
        return self._replicas[number]

    def open(self, begins: Mapping[ShardKey, Begin], weights: Weights, reports: Reports) -> None:
        """Generates shards. They are opened on different replicas at the same time, because each may have to wait until
        its replica has generated something."""
        self._weights = weights
        numbers = [next(self._numbers) % len(self._replicas) for _ in begins]
        opening = [begin(self._replicas[number]) for number, begin in zip(numbers, begins.values(), strict=True)]
        for number, (key, begin), opened in zip(numbers, begins.items(), opening, strict=True):
            self.feed.open(key, opened.result(), begin, reports, number)

    def drop(self, keys: Sequence[ShardKey]) -> None:
        """Forgets shards, and cancels their incomplete trajectories on all replicas at once, while they generate."""
        self.feed.drop(keys)
        dropping: list[Pending[None]] = []
        for replica, opening in zip(self._replicas, self._opening, strict=True):
            with opening, suppress(GroupLost):  # otherwise a shard might be opened after it was dropped
                dropping.append(replica.submit(Worker.drop, tuple(keys)))
        for dropped in dropping:
            with suppress(GroupLost):
                dropped.result()

    def close(self) -> None:
        """Ends the threads."""
        self.feed.end()
        for thread in self._threads:
            thread.join()

    def _serve(self, number: int) -> None:
        """Generates on one replica, in a thread of its own."""
        replica = self._replicas[number]
        try:
            while self.feed.wait(number):
                with self._opening[number]:
                    prompts, begins = self.feed.take(number)
                    for opened in [begin(replica) for begin in begins]:
                        opened.result()
                assert self._weights is not None
                began = time.monotonic()
                self.feed.put(number, self._generate(replica, self._weights, prompts))
                # what is complete meanwhile comes together
                time.sleep(max(began + PACE_S * len(self._replicas) - time.monotonic(), 0.0))
        except BaseException as error:
            self.feed.fail(error)
