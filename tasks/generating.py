"""Generates the shards of a stage: the replicas of the rollout take trajectories from one queue."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic

from infra.execution.driver import Driver
from infra.store.records import Journal, Weights
from infra.store.run_store import JOURNAL
from infra.workers.calls import C, Rows, RowsCall, S, ShardKey
from infra.workers.groups import Replica
from infra.workers.ray_group import GroupLost
from infra.workers.rollouts import Generated
from infra.workers.worker import WAIT_S, Worker
from tasks.calling import on_worker

Prompt = tuple[ShardKey, tuple[str, ...]]
"""A shard, and the ids of the trajectories of one of its prompts."""


@dataclass(frozen=True)
class Complete(Generic[C, S]):
    """A shard whose trajectories are complete, and the replicas that have them."""

    request: RowsCall[C, S]
    names: dict[int, list[str]]
    """Trajectory ids by replica."""


class Feed(Generic[C, S]):
    """The trajectories of a stage: those that wait, and those that the replicas generate. Thread-safe."""

    def __init__(self, replica_count: int, limit: int | None) -> None:
        """
        Args:
            replica_count: number of replicas.
            limit: largest number of trajectories that a replica generates at the same time; None: a replica generates
                one shard at a time, whose trajectories are a batch of the engine.
        """
        self.requests: dict[ShardKey, RowsCall[C, S]] = {}
        """The open shards."""
        self.complete: SimpleQueue[Complete[C, S] | BaseException | None] = SimpleQueue()
        """Shards as they become complete; the error of a replica; None: a replica reports without one of them."""
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: deque[Prompt] = deque()
        self._left: dict[ShardKey, set[str]] = {}
        self._names: dict[ShardKey, dict[int, list[str]]] = {}
        self._in_flight = [0] * replica_count
        self._has_ended = False

    @property
    def has_room(self) -> bool:
        """Whether to open another shard, so that no replica waits for trajectories."""
        with self._changed:
            if self._limit is None:
                return len(self.requests) < len(self._in_flight)
            waiting = sum(len(names) for _, names in self._queue)
            return not self._queue or waiting + sum(self._in_flight) < self._limit * len(self._in_flight)

    def open(self, request: RowsCall[C, S], prompts: Sequence[tuple[str, ...]]) -> None:
        """Add a shard, with the trajectory ids of each prompt."""
        with self._changed:
            self.requests[request.key] = request
            self._left[request.key] = {name for names in prompts for name in names}
            self._names[request.key] = defaultdict(list)
            self._queue += ((request.key, names) for names in prompts)
            self._changed.notify_all()

    def take(self, replica: int) -> list[Prompt] | None:
        """Wait until there is work.

        Args:
            replica: number of the replica.

        Returns:
            The trajectories to submit now, not more than the replica's share of those that wait; empty if it only has
            to generate what it has. None: the stage has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._queue or self._in_flight[replica])
            if self._has_ended:
                return None
            taken: list[Prompt] = []
            if self._limit is None:
                batch = self._queue[0][0] if self._queue and not self._in_flight[replica] else None
                while self._queue and self._queue[0][0] == batch:
                    taken.append(self._queue.popleft())
            else:
                share = -(-len(self._queue) // len(self._in_flight))
                room = self._limit - self._in_flight[replica]
                while len(taken) < share and room > 0:
                    taken.append(self._queue.popleft())
                    room -= len(taken[-1][1])
            self._in_flight[replica] += sum(len(names) for _, names in taken)
            return taken

    def put(self, replica: int, generated: Sequence[Generated]) -> None:
        """Note which trajectories a replica has completed."""
        with self._changed:
            self._in_flight[replica] -= len(generated)
            for key, name in generated:
                self._left[key].discard(name)
                self._names[key][replica].append(name)
                if not self._left[key]:
                    del self._left[key]
                    self.complete.put(Complete(self.requests.pop(key), dict(self._names.pop(key))))
        self.complete.put(None)

    def end(self) -> None:
        """Let the replicas stop."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


class Generation(Generic[C, S]):
    """The generation of a stage's shards on the replicas of the rollout; a context manager."""

    def __init__(self, driver: Driver, iteration: int, stage: str, weights: Weights | None) -> None:
        """
        Args:
            driver: Driver of the run.
            iteration: Iteration of the stage.
            stage: Name of the stage.
            weights: The weights to generate with; None: the newest that the rollout has received.
        """
        self.driver, self.iteration, self.stage, self.weights = driver, iteration, stage, weights
        self.replicas: Sequence[Replica] = driver.groups.of("rollout").replicas()
        self.in_batches = driver.config.rollout.engine == "hf"
        limit = None if self.in_batches else driver.config.rollout.max_in_flight
        self.feed: Feed[C, S] = Feed(len(self.replicas), limit)
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"replica {number}", daemon=True)
            for number in range(len(self.replicas))
        ]
        self._journaled = time.monotonic()

    def __enter__(self) -> Generation[C, S]:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.feed.end()
        for thread in self._threads:
            thread.join()
        with suppress(GroupLost):
            for replica in self.replicas:
                replica.call(Worker.drop, tuple(self.feed.requests))

    def open(self, request: RowsCall[C, S]) -> None:
        """Open a shard."""
        self.feed.open(request, self.replicas[0].call(Worker.begin, request))

    def next_complete(self) -> Iterator[tuple[int, Rows[S]]]:
        """Wait until a replica reports; yields the shards that are complete, written and not committed."""
        complete = self.feed.complete.get()
        if isinstance(complete, BaseException):
            raise complete
        if complete is None:
            return
        request = complete.request
        writer = max(complete.names, key=lambda replica: len(complete.names[replica]))
        others = [
            self.replicas[number].handed(Worker.take, request.key, tuple(names))
            for number, names in complete.names.items()
            if number != writer
        ]
        yield request.call.shard, self.replicas[writer].call(Worker.finish, request, others)
        for number in complete.names.keys() - {writer}:
            self.replicas[number].call(Worker.drop, (request.key,))

    def journal(self) -> None:
        """Commit what the open shards have so far, if it is time to."""
        seconds = None if self.in_batches else self.driver.config.rollout.journal_s  # a batch starts again as a whole
        if seconds is None or time.monotonic() - self._journaled < seconds:
            return
        store = self.driver.store
        parts = []
        for replica in self.replicas:
            number = store.begin_attempt(self.iteration, JOURNAL)
            parts.append(replica.call(Worker.journal, self.iteration, self.stage, number))
        written = tuple(part for part in parts if part is not None)
        if written:
            store.replace_journal(Journal(iteration=self.iteration, stage=self.stage, parts=written))
        self._journaled = time.monotonic()

    def _serve(self, number: int) -> None:
        """Generate on one replica, in a thread of its own."""
        replica, begun = self.replicas[number], Counter[ShardKey]()
        try:
            while (prompts := self.feed.take(number)) is not None:
                for key in dict.fromkeys(key for key, _ in prompts):
                    if not begun[key] and number:
                        replica.call(Worker.begin, self.feed.requests[key])
                    begun[key] += 1
                with self.driver.rollout.turn.shared():
                    weights = self.driver.rollout.loaded or self.weights
                    assert weights is not None
                    generate = partial(replica.call, Worker.generate, weights, prompts, WAIT_S)
                    generated = on_worker(self.driver, "rollout", weights, generate)
                self.feed.put(number, generated)
        except BaseException as error:
            self.feed.complete.put(error)
