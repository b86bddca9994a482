"""Generates the shards of a stage on the replicas of the rollout, which all generating stages share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Generic

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.replicas import Complete, Prompt, Replicas, Reports
from ratchet.infra.store.log import Late
from ratchet.infra.store.records import Journal, ShardRef, Weights
from ratchet.infra.store.run_store import JOURNAL
from ratchet.infra.workers.calls import C, Call, ComputedShard, Pending, RowsCall, S, ShardKey
from ratchet.infra.workers.rollouts import Generated
from ratchet.infra.workers.worker import WAIT_S, Worker
from ratchet.infra.workers.worker_groups import Replica
from ratchet.tasks.worker_calls import on_worker


class GenerationRunner(Generic[C, S]):
    """A context manager that generates the shards of a stage."""

    def __init__(self, driver: Driver, iteration: int, stage: str) -> None:
        self.driver, self.iteration, self.stage = driver, iteration, stage
        self.replicas = _replicas(driver)
        self.requests: dict[ShardKey, RowsCall[C, S]] = {}
        self._reports: Reports = SimpleQueue()
        self._journaled = time.monotonic()
        self.outdated: frozenset[ShardRef] = frozenset()
        """Files of journals that were generated otherwise; no shard continues from them."""
        self._own_parts: frozenset[ShardRef] = frozenset()
        """The files of the newest journal."""

    def __enter__(self) -> GenerationRunner[C, S]:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self.requests:
            return
        if isinstance(error, Exception) and self.replicas.feed.error is None:
            self._journal()  # the next driver continues from here
        self.replicas.drop(tuple(self.requests))

    @property
    def room(self) -> int:
        """Number of shards to open now."""
        return self.replicas.feed.room

    @property
    def in_flight(self) -> int:
        """Number of trajectories that the replicas generate, of all stages."""
        return self.replicas.feed.in_flight

    def open(self, requests: Sequence[RowsCall[C, S]]) -> None:
        if left_out := self.outdated | self._own_parts:  # its own journal has only shards that were opened before
            requests = [replace(request, call=_without(left_out, request.call)) for request in requests]
        self.requests |= {request.key: request for request in requests}
        begins = {request.key: partial(_begin, request) for request in requests}
        weights = requests[-1].call.weights
        assert weights is not None, "the rollout has weights"
        self.replicas.open(begins, weights, self._reports)

    def drop(self, keys: Sequence[ShardKey]) -> None:
        """Forgets shards that another process has committed."""
        if keys:
            for key in keys:
                del self.requests[key]
            self.replicas.drop(tuple(keys))

    def next_complete(self) -> dict[int, ComputedShard[S]]:
        """Waits until a replica reports; returns the shards that are complete and written, but not committed."""
        reports = [self._reports.get()]
        while not self._reports.empty():
            reports.append(self._reports.get())
        for report in reports:
            if isinstance(report, BaseException):
                raise report
        # but for those that were dropped after they were complete
        complete = [report for report in reports if isinstance(report, Complete) and report.key in self.requests]
        # all are asked before waiting for any, so that the replicas write at the same time
        writing = {report.key[2]: self._write(report) for report in complete}
        return {shard: rows.result() for shard, rows in writing.items()}

    def _write(self, complete: Complete) -> Pending[ComputedShard[S]]:
        """Lets the replica that has most of a shard's trajectories write it, and the others hand it theirs."""
        key, names = complete.key, complete.names
        most = max(map(len, names.values()))
        writers = [replica for replica in names if len(names[replica]) == most]
        writer = writers[key[2] % len(writers)]  # otherwise a few replicas would write nearly all shards
        others = [
            self.replicas[number].handed(Worker.take, key, tuple(ids))
            for number, ids in names.items()
            if number != writer
        ]
        return self.replicas[writer].submit(Worker.finish, self.requests.pop(key), others)

    def journal(self) -> None:
        """Commits the tokens of the open shards so far, if `rollout.journal_s` has passed."""
        seconds = self.driver.config.rollout.journal_s
        if seconds is not None and time.monotonic() - self._journaled >= seconds:
            self._journal()

    def _journal(self) -> None:
        if self.driver.config.rollout.engine.in_batches or self.driver.config.rollout.journal_s is None:
            return  # a batch starts again as a whole
        store = self.driver.store
        first = store.begin_attempt(self.iteration, JOURNAL) * len(self.replicas)
        pending = [
            replica.submit(Worker.journal, self.iteration, self.stage, number)
            for number, replica in enumerate(self.replicas, first)
        ]
        parts = tuple(part for answer in pending if (part := answer.result()) is not None)
        if parts:
            journal = Journal(
                iteration=self.iteration, stage=self.stage, term=self.driver.term, worker=store.log.worker, parts=parts
            )
            try:
                store.replace_journal(journal)
                self._own_parts = frozenset(parts)
            except Late:  # the stage is over
                store.delete_journals([journal])
        self._journaled = time.monotonic()


def _without(parts: frozenset[ShardRef], call: Call[C]) -> Call[C]:
    return replace(call, journal=tuple(part for part in call.journal if part not in parts))


def _begin(request: RowsCall[C, S], replica: Replica) -> Pending[tuple[tuple[str, ...], ...]]:
    return replica.submit(Worker.begin, request)


def _replicas(driver: Driver) -> Replicas:
    """Returns the replicas of the rollout. They start when first needed, and again after an error."""
    with driver.rollout.starting:
        replicas = driver.rollout.replicas
        if replicas is None or replicas.feed.error is not None:
            config = driver.config.rollout
            limit = None if config.engine.in_batches else config.max_in_flight
            replicas = Replicas(driver.groups.of("rollout").replicas(), limit, partial(_generate, driver))
            driver.rollout.replicas = replicas
        return replicas


def _generate(driver: Driver, replica: Replica, weights: Weights, prompts: Sequence[Prompt]) -> Sequence[Generated]:
    with driver.rollout.weights_lock.reading():
        # read under the lock: `loaded` changes with the weights
        weights = driver.rollout.loaded or weights
        return on_worker(driver, {"rollout": weights}, partial(replica.generate, weights, prompts, WAIT_S))
