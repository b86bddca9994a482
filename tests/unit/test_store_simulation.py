"""Several drivers and rollout workers, one log, and a store whose answers cannot be relied on: nothing acknowledged is
ever lost, nothing happens twice, and one driver at a time decides.

Every driver decides from its state what to do next, as the tasks do, and tries again after `StoreUnavailable`. A
driver that is killed is a new claim later. Each request may fail before or after it takes effect, take effect much
later, or be overtaken by another driver's claim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ratchet.infra.store.log import TAIL, Fenced, Late
from ratchet.infra.store.manifest import Checkpoint, Fingerprint, Manifest
from ratchet.infra.store.object_store import ObjectStore, StoreUnavailable
from ratchet.infra.store.records import (
    Claim,
    Commit,
    Finalize,
    Lease,
    ObjectRef,
    Record,
    RunState,
    ShardCommit,
    ShardRef,
    Skip,
    Snapshot,
    StageCommit,
    Weights,
    sha256_of,
)
from ratchet.infra.store.run_store import RunStore
from tests.faulty_store import Clock, Fault, Killed, Memory, Simulated

SHARDS = 2

FAULTS = [
    *(Fault("none", answer) for answer in ("500", "409", "timeout", "kill")),
    *(Fault("applied", answer) for answer in ("503", "reset", "own 412", "kill")),
    *(Fault("late", "timeout", delay_s) for delay_s in (2.0, 3.0, 8.0, 100.0)),
    Fault("late", "kill", 5.0),
    *[Fault("overtaken")] * 3,
]
FAULT_IN = {
    "calm": st.none(),
    "breeze": st.sampled_from([*[None] * 4 * len(FAULTS), *FAULTS]),
    "gale": st.sampled_from([*[None] * len(FAULTS), *FAULTS]),
}
"""What befalls a request."""
weathers = st.sampled_from(["calm", "breeze", "gale"])


TRIES = 8
"""Of a driver at a stage, before its process ends."""


class Watched(RunStore):
    """A driver's store that notes what was tried, and what was acknowledged."""

    def __init__(self, objects: ObjectStore, name: str) -> None:
        super().__init__(objects)
        self.name = name
        self.tried: list[str] = []
        self.acknowledged: list[str] = []

    def commit(self, *commits: Commit) -> None:
        self.tried.append(_text(commits))
        super().commit(*commits)
        self.acknowledged.append(_text(commits))

    def claim(self) -> None:
        weights = {"actor": Weights(version=0, digest="first")}
        self.log.claim(Claim(config={}, code=self.name, packages={}, threads=1, host="h", initial=weights))
        self.sweep(["generate"])


class Drivers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.backend = Simulated(self.clock, self.overtake)
        self.stores: list[Watched] = []
        self.running: list[Watched] = []
        self.nonces = itertools.count()
        self.reader = RunStore(ObjectStore("", Memory(self.backend.objects)))
        # What the log said whenever it was looked at:
        self.log: list[bytes] = []
        self.states = [RunState()]
        """After so many records."""
        self.closed: list[RunState] = []
        """Before the close of each iteration."""
        self.claims: dict[int, str] = {}
        self.commits: list[str] = []
        self.done: set[tuple[int, str, int | None]] = set()
        self.objects: dict[str, bytes] = {}
        """Everything that a record commits."""

    # What happens.

    def start(self, deadline_s: float) -> Watched:
        objects = ObjectStore("", self.backend, deadline_s=deadline_s, clock=self.clock)
        store = Watched(objects, f"driver {next(self.nonces)}")
        self.stores.append(store)
        self.running.append(store)
        return store

    @rule(
        who=st.sampled_from([0, 0, 0, 1, 2, None]),
        deadline_s=st.sampled_from([0.0, 2.0, 6.0]),
        steps=st.integers(1, 8),
        weather=weathers,
        data=st.data(),
    )
    def work(self, who: int | None, deadline_s: float, steps: int, weather: str, data: st.DataObject) -> None:
        """A driver, most likely the newest, or else a new one, does what is due, and tries again what failed."""
        driving = [store for store in self.running if store.log.worker is None]
        fresh = who is None or not driving
        store = self.start(deadline_s) if fresh else driving[-1 - (who or 0) % len(driving)]
        with self.under(weather, data):
            for _ in range(steps):
                if store in self.running:
                    self.perform(store, self.claim if store.log.term == 0 else self.next_stage)

    @precondition(lambda self: self.log)
    @rule(
        who=st.sampled_from([0, 0, 1, None]),
        deadline_s=st.sampled_from([0.0, 2.0, 6.0]),
        steps=st.integers(1, 4),
        weather=weathers,
        data=st.data(),
    )
    def help(self, who: int | None, deadline_s: float, steps: int, weather: str, data: st.DataObject) -> None:
        """A rollout worker, new or not, generates what is not committed."""
        helping = [store for store in self.running if store.log.worker is not None]
        fresh = who is None or not helping
        store = self.start(deadline_s) if fresh else helping[-1 - (who or 0) % len(helping)]
        with self.under(weather, data):
            for _ in range(steps):
                if store in self.running:
                    self.perform(store, self.join if store.log.term == 0 else self.generate_one)

    def join(self, store: Watched) -> None:
        store.join(store.name)

    def generate_one(self, store: Watched) -> None:
        """Leases a shard, and generates it, as `shared` does. A worker that is fenced joins the newest driver."""
        try:
            state = store.log.read()
            store.log.check_claim()
        except Fenced:
            store.join(store.name)
            return
        iteration, done = state.iteration, store.committed_shards("generate")
        left = [number for number in range(SHARDS) if number not in done]
        if "generate" in state.stages or not left:
            return
        try:
            store.commit(Lease(iteration=iteration, stage="generate", shards=(left[-1],), worker=store.log.worker))
        except Late:
            return
        attempt = store.begin_attempt(iteration, "generate")
        shard = self.shard(store, iteration, attempt, left[-1])
        try:
            store.commit(shard)
        except Late:
            store.objects.delete([shard.data.key])

    @contextmanager
    def under(self, weather: str, data: st.DataObject) -> Iterator[None]:
        """Appends are what fails most."""
        self.backend.next_fault = lambda kind: data.draw(FAULT_IN["gale" if kind == "create" else weather])
        try:
            yield
        finally:
            self.backend.next_fault = lambda kind: None

    @precondition(lambda self: self.backend.late)
    @rule()
    def time_passes(self) -> None:
        self.clock.sleep(1000.0)
        self.backend.land()

    @precondition(lambda self: self.log)
    @rule(how=st.sampled_from(["lost", "garbage", "cut", "elsewhere", "digest", "no index", "older"]))
    def damage_the_hint(self, how: str) -> None:
        newest, older = self.states[-1].index, self.states[len(self.log) // 2].index
        first = "log/000000000000.json"
        hints = {
            "garbage": b"\xff\x00",
            "cut": newest and newest.model_dump_json().encode()[:20],
            "elsewhere": newest and _hint("index/999999.9-9.json", newest.sha256),
            "digest": newest and _hint(newest.key, "0" * 64),
            "no index": _hint(first, sha256_of(self.backend.objects[first])),
            "older": older and _hint(older.key, older.sha256),
        }
        self.backend.objects.pop(TAIL, None)
        if how != "lost":
            self.backend.objects[TAIL] = hints[how] or b""

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Someone who reads for the first time, with failures on the way: the right answer, or none."""
        reader = RunStore(ObjectStore("", self.backend, deadline_s=2.0, clock=self.clock))
        with self.under("gale", data), suppress(StoreUnavailable, Killed):
            state = reader.log.read()
            self.look()
            assert state == self.states[-1]

    # What drivers do, as tasks do it.

    def claim(self, store: Watched) -> None:
        store.claim()
        self.look()
        assert self.claims[store.log.term] == store.name, "two drivers hold one term"
        written = {key for key in self.backend.objects if f"iteration={store.state.iteration:06d}/" in key}
        kept = {shard.data.key for shard in store.committed_shards("generate").values()}
        left = {key for key in written - kept if key.startswith("trajectories/")}
        assert all(int(key.split("/")[-1].split("-")[0]) >= store.log.term for key in left), "not swept"

    def next_stage(self, store: Watched) -> None:
        done = set(store.state.stages)
        due = "close" if "update" in done else "update" if "generate" in done else "generate"
        if store._attempts.get((store.state.iteration, due), -1) + 1 == TRIES:
            self.running.remove(store)  # its process has ended
        else:
            getattr(self, due)(store)

    def generate(self, store: Watched) -> None:
        iteration = store.state.iteration
        attempt = store.begin_attempt(iteration, "generate")
        shards = dict(store.committed_shards("generate"))
        for number in range(SHARDS):
            if number in shards:
                continue
            shards[number] = self.shard(store, iteration, attempt, number)
            if number < SHARDS - 1:
                store.commit(shards[number])
        # The last shard and its stage are one record; a stage all of whose shards are there is one alone.
        latest = [shards[SHARDS - 1]] if SHARDS - 1 not in store.committed_shards("generate") else []
        data = tuple(shard.data for _, shard in sorted(shards.items()))
        store.commit(*latest, self.stage(store, iteration, "generate", attempt, data))

    def shard(self, store: Watched, iteration: int, attempt: int, number: int) -> ShardCommit:
        table = pa.table({"trajectory_id": [f"it{iteration}-s{number}"], "nonce": [next(self.nonces)]})
        return ShardCommit(
            iteration=iteration,
            stage="generate",
            shard=number,
            term=store.log.term,
            data=store.write_shard(iteration, "generate", attempt, number, table),
            seconds=0.1,
        )

    def update(self, store: Watched) -> None:
        iteration = store.state.iteration
        before = store.state.weights["actor"]
        weights = Weights(version=before.version + 1, digest=f"{next(self.nonces)}")
        if iteration % 3 == 2:
            skip = Skip(iteration=iteration, stage="update", role="actor", weights=weights, reason="warm-up")
            store.commit(skip)
            return
        attempt = store.begin_attempt(iteration, "update")
        stage = self.stage(store, iteration, "update", attempt, ())
        store.commit(stage.model_copy(update={"role": "actor", "weights": weights}))

    def close(self, store: Watched) -> None:
        version = store.state.iteration + 1
        weights = store.state.weights["actor"]
        folder = store.checkpoint_folder("actor", weights)
        files = store.write_checkpoint_files(folder, {"model.safetensors": f"{version}".encode()})
        checkpoint = store.write_checkpoint_manifest(folder, Checkpoint(role="actor", weights=weights, files=files))
        store.close({"loss": float(next(self.nonces))}, Snapshot(version=version, roles={"actor": checkpoint}))

    def stage(self, store: Watched, iteration: int, name: str, attempt: int, data: tuple[ShardRef, ...]) -> StageCommit:
        fingerprint = Fingerprint(parts={"nonce": next(self.nonces)})
        manifest = Manifest(
            iteration=iteration,
            stage=name,
            term=store.log.term,
            attempt=attempt,
            fingerprint=fingerprint,
            config={},
            shards=data,
        )
        return StageCommit(
            iteration=iteration,
            stage=name,
            manifest=store.write_manifest(manifest),
            fingerprint=fingerprint.digest,
            cursor=8 * (iteration + 1) if name == "generate" else None,
        )

    def perform(self, store: Watched, action: Callable[[Watched], None]) -> None:
        self.look()
        behind = 0 < store.log.term < max(self.claims, default=0)
        tried, failed = len(store.tried), self.backend.failed
        try:
            action(store)
        except StoreUnavailable:
            assert self.backend.failed > failed, "the store answered every time"
        except Fenced:
            self.look()
            assert store.log.term < max(self.claims), "nobody has taken the run over"
        except Late:  # a driver that leases nothing meets what a worker has committed, and tries again
            self.look()
            assert store.log.worker is None
            assert any(record.worker is not None for record in map(Record.model_validate_json, self.log))
        except Killed:
            self.running.remove(store)
        else:
            assert not (behind and len(store.tried) > tried) or store.log.term == max(self.claims), (
                "a driver went on after another's claim"
            )
            self.look()
            assert store.state == self.states[store.state.slot + 1]

    def overtake(self) -> None:
        """Another driver claims in the middle of a request of this one, or a rollout worker commits a shard."""
        number = next(self.nonces)
        store = Watched(ObjectStore("", Memory(self.backend.objects)), f"process {number}")
        if number % 2 and "log/000000000000.json" in self.backend.objects:
            store.join(store.name)
            self.generate_one(store)
        else:
            store.claim()
        store.objects.backend = self.backend
        store.objects.clock, store.objects.deadline_s = self.clock, 0.0
        self.stores.append(store)
        self.running.append(store)

    # What must be true.

    def look(self) -> None:
        """Follow the log from slot 0, by every record."""
        keys = sorted(key for key in self.backend.objects if key.startswith("log/0"))
        assert keys == [f"log/{slot:012d}.json" for slot in range(len(keys))], "the log has a gap"
        log = [self.backend.objects[key] for key in keys]
        assert log[: len(self.log)] == self.log, "the log was rewritten"
        for data in log[len(self.log) :]:
            self.follow(Record.model_validate_json(data), data)
        self.log = log

    def follow(self, record: Record, data: bytes) -> None:
        before, after = self.states[-1], self.states[-1].model_copy(deep=True)
        if any(isinstance(commit, Claim) for commit in record.commits):
            assert record.term == before.term + 1
            self.claims[record.term] = record.commits[0].code
        else:
            assert record.term == before.term, "a record of an older term follows a newer claim"
            if not isinstance(record.commits[0], Lease):  # the same shards may be leased again
                self.commits.append(_text(record.commits))
        after.apply(record, sha256_of(data))
        for commit in record.commits:
            if isinstance(commit, ShardCommit | StageCommit | Skip | Finalize):
                assert commit.iteration == before.iteration
                thing = (commit.iteration, getattr(commit, "stage", "close"), getattr(commit, "shard", None))
                assert thing not in self.done, f"{thing} is committed twice"
                self.done.add(thing)
            if isinstance(commit, Finalize):
                index = RunState.model_validate_json(self.backend.objects[commit.index.key])
                assert index.metric_values.keys() == {"loss"}
                update = {"metrics": commit.metrics, "metric_values": index.metric_values}
                self.closed.append(before.model_copy(update=update))
                assert [shard.iteration for shard in before.shards["generate"].values()] == [commit.iteration] * SHARDS
            for ref in _refs(commit):
                data = self.backend.objects[ref.key]
                assert sha256_of(data) == ref.sha256
                self.objects[ref.key] = data
        self.states.append(after)

    @invariant()
    def holds(self) -> None:
        self.look()
        for key, data in self.objects.items():
            assert self.backend.objects.get(key) == data, f"{key} is committed, and was changed or deleted"
        tried = {text for store in self.stores for text in store.tried}
        acknowledged = {text for store in self.stores for text in store.acknowledged if '"kind":"lease"' not in text}
        assert len(set(self.commits)) == len(self.commits), "an append is there twice"
        assert set(self.commits) <= tried, "an append is there in part"
        assert acknowledged <= set(self.commits), "an acknowledged commit is lost"

    @invariant()
    def is_read(self) -> None:
        """By somebody new, and by somebody who has read before."""
        fresh = RunStore(ObjectStore("", Memory(self.backend.objects)))
        assert fresh.log.read() == self.states[-1]
        assert self.reader.log.read() == self.states[-1]
        for iteration, state in enumerate(self.closed):
            assert fresh.iteration_state(iteration) == state


def _text(commits: tuple[Commit, ...]) -> str:
    return "\n".join(commit.model_dump_json() for commit in commits)


def _hint(key: str, sha256: str) -> bytes:
    return ObjectRef(key=key, sha256=sha256).model_dump_json().encode()


def _refs(commit: Commit) -> list[ObjectRef | ShardRef]:
    match commit:
        case ShardCommit():
            return [commit.data]
        case StageCommit():
            return [commit.manifest]
        case Snapshot():
            return list(commit.roles.values())
        case Finalize():
            return [commit.index, commit.metrics]
        case _:
            return []


def test_drivers_on_a_store_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.infra.store.records.PAGE", 3)
    monkeypatch.setattr("ratchet.infra.store.run_store.PAGE", 3)
    run_state_machine_as_test(
        Drivers,
        settings=settings(
            max_examples=150,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
