"""Rollout workers in virtual time: real ones generate beside the driver of a `Cluster`, are killed and replaced."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.execution.heartbeat import INTERVAL_S, KEY, Beat
from ratchet.infra.execution.neighbours import WorkerLife
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Lease, ObjectRef, Published, Record, ShardCommit, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.config import RunConfig
from ratchet.tasks import rollout_worker, shard_runner
from ratchet.tasks.shard_runner import run_rows
from tests.virtual.cluster import GENERATES, Cluster, Process, Replica, Work
from tests.virtual.time import Group, Lock

PUBLISH_S = 5.0
"""Seconds in which the driver writes the actor's weights."""


class Machine:
    """A rollout worker's process and its engine. To both it is the cluster."""

    def __init__(self, cluster: Cluster, config: RunConfig) -> None:
        self.time, self.speeds, self.work, self.journals = cluster.time, cluster.speeds, cluster.work, cluster.journals
        self.store = RunStore(ObjectStore("memory", cluster.bucket, clock=cluster.time))
        self.core = Lock(self.time)
        self.calls = Counter[str]()
        self.kept = 0
        self.life = WorkerLife(self.store.objects)
        self._config = config

    def process(self, _: int) -> Process:
        return self._process

    def join(self) -> Driver:
        """Joins the newest driver, as a rollout worker with an engine."""
        self._process = Process(cast("Cluster", self), 0)
        self.store.join(self.life.name)
        worker = Driver(self._config, self.store)
        group = SimpleNamespace(replicas=lambda: [Replica(cast("Cluster", self), 0)])
        worker.groups = cast("Any", SimpleNamespace(of=lambda role: group))
        return worker

    def run(self) -> None:
        """Generates until it is killed."""
        worker = self.join()
        with self.life.beating(self.store.log, worker.stopping):
            rollout_worker._generate_all(worker, self.life)


@dataclass(frozen=True)
class Hour:
    """What a driver and its rollout workers did in some time."""

    tokens_per_s: float
    """Of committed shards."""
    alive: float
    """Share of the seconds of all processes that generate, the driver among them, in which they were alive."""
    kills: int
    iterations: int
    """Number of closed iterations."""
    by_workers: float
    """Share of the shards that rollout workers committed."""
    leases: int
    """Records that lease shards."""
    collisions: int
    """Requests to create a record in a slot that another process had taken."""
    records: int
    seconds: float
    requests: Counter[str]
    """Requests to the store, by kind."""
    most_per_s: dict[tuple[str, str], int]
    """See `Bucket.most_per_s`."""


class Fleet:
    """Rollout workers of a cluster whose driver has one replica."""

    def __init__(self, work: Work, workers: int) -> None:
        self.cluster = Cluster(replace(work, replicas=1))
        self.time, self.workers = self.cluster.time, workers
        self.kills = 0
        self.alive_s = 0.0
        self._running: dict[int, tuple[Group, float]] = {}
        """The worker in each place, and when it began."""

    @contextmanager
    def driver(self) -> Iterator[Driver]:
        """Yields the driver, which beats and publishes the actor's weights; starts all workers."""
        with self.alone() as driver:
            for place in range(self.workers):
                self._begin(place, driver.config)
            yield driver

    @contextmanager
    def alone(self) -> Iterator[Driver]:
        """Yields the driver, without any worker."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout_worker, "GENERATE", GENERATES)
            patch.setattr(shard_runner, "publish", self._publish)
            with self.cluster.driver(rollout__workers=True, train__iterations=10_000) as driver:
                beats = Group()
                self.time.start(partial(self._beat, driver), group=beats)
                try:
                    yield driver
                finally:
                    for place in list(self._running):
                        self._end(place)
                    self.time.kill(beats)
                    self.time.sleep(1.0)  # they unwind

    def kill_half_every(self, seconds: float, config: RunConfig) -> None:
        """Kills a random half of the workers every so many seconds; others take their places after `Speeds.restart`."""
        rng = np.random.default_rng(self.cluster.work.seed)

        def kill() -> None:
            while True:
                self.time.sleep(seconds - self.time.now % seconds)
                for place in rng.choice(self.workers, self.workers // 2, replace=False).tolist():
                    if place in self._running:
                        self._end(place)
                        self.kills += 1
                        self.time.start(partial(self._begin_later, place, config))

        self.time.start(kill)

    def generated_for(self, driver: Driver, seconds: float) -> Hour:
        """Generates and closes iterations for so many seconds from the beginning."""
        stored: dict[str, bytes] = {}
        alive: list[float] = []

        def note() -> None:
            self.time.sleep(seconds)
            stored.update(self.cluster.bucket.objects)
            for _, first in self._running.values():
                self.alive_s += self.time.now - first
            alive.append(self.alive_s)

        self.time.start(note)
        while self.time.now < seconds:
            run_rows(driver, GENERATES, driver.state.iteration, {}, StageHandle("generate"))
            self.time.sleep(self.cluster.speeds.rest + self.cluster.speeds.recording)
            driver.store.close({"loss": 0.0})
        records = records_of(stored)
        shards = [
            (record.worker, commit)
            for record in records
            for commit in record.commits
            if isinstance(commit, ShardCommit)
        ]
        bucket = self.cluster.bucket
        slots = sum(key.startswith("log/0") for key in bucket.objects)
        return Hour(
            tokens_per_s=sum(cast("int", shard.outputs["tokens"]) for _, shard in shards) / seconds,
            alive=(alive[0] + seconds) / ((self.workers + 1) * seconds),
            kills=self.kills,
            iterations=driver.state.iteration,
            by_workers=sum(worker is not None for worker, _ in shards) / len(shards),
            leases=sum(isinstance(commit, Lease) for record in records for commit in record.commits),
            collisions=bucket.requests["create"] - slots,
            records=slots,
            seconds=self.time.now,
            requests=Counter(bucket.requests),
            most_per_s=bucket.most_per_s(),
        )

    def _begin(self, place: int, config: RunConfig) -> None:
        machine, group = Machine(self.cluster, config), Group()
        self._running[place] = group, self.time.now
        self.time.start(machine.run, "driver", group)

    def _begin_later(self, place: int, config: RunConfig) -> None:
        self.time.sleep(self.cluster.speeds.restart)
        self._begin(place, config)

    def _end(self, place: int) -> None:
        group, began = self._running.pop(place)
        self.alive_s += self.time.now - began
        self.time.kill(group)

    def _beat(self, driver: Driver) -> None:
        beat = Beat(term=driver.term, host=socket.gethostname(), boot="", pid=0, born=0.0, count=0)
        while True:
            driver.store.objects.put(KEY, beat.model_dump_json().encode())
            beat = beat.model_copy(update={"count": beat.count + 1})
            self.time.sleep(INTERVAL_S)

    def _publish(self, driver: Driver, weights: Weights) -> None:
        if weights != driver.state.initial["actor"] and driver.store.actor_weights(weights) is None:
            self.time.sleep(PUBLISH_S)
            driver.store.commit(Published(weights=weights, checkpoint=ObjectRef(key="weights", sha256="")))


def records_of(objects: dict[str, bytes]) -> list[Record]:
    return [Record.model_validate_json(data) for key, data in sorted(objects.items()) if key.startswith("log/0")]
