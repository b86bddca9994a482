"""The log of a run, one property at a time: what reading costs, what is noticed, what is swept, who is alive."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd
import psutil
import pyarrow as pa
import pytest

from ratchet.infra.execution import heartbeat
from ratchet.infra.execution.stopping import Stopping
from ratchet.infra.runs.vacuum import foreign, unreached, vacuum
from ratchet.infra.store.clock import born
from ratchet.infra.store.log import TAIL, Corrupt, Deleted, Fenced, RunLog, slot_key
from ratchet.infra.store.manifest import Checkpoint, Fingerprint, Manifest
from ratchet.infra.store.object_store import ObjectStore, StoreUnavailable
from ratchet.infra.store.records import (
    PAGE,
    Claim,
    Expire,
    ObjectRef,
    RunState,
    ShardCommit,
    ShardRef,
    Skip,
    Snapshot,
    StageCommit,
    Weights,
)
from ratchet.infra.store.run_store import CLOSE, RunStore
from ratchet.rlhf.errors import UserError
from tests.faulty_store import Clock, Fault, Memory, Simulated


def claimed(objects: ObjectStore, *, claims: int = 1) -> RunStore:
    store = RunStore(objects)
    for _ in range(claims):
        store.log.claim(Claim(config={}, code="", packages={}, threads=1, host="here", initial={"actor": weights(0)}))
    return store


def weights(version: int) -> Weights:
    return Weights(version=version, digest=f"digest {version}")


def skip_iteration(store: RunStore) -> None:
    """An iteration of one cheap record, and its close."""
    iteration = store.state.iteration
    store.commit(Skip(iteration=iteration, stage="update", role="actor", weights=weights(iteration + 1), reason=""))
    store.close({"loss": float(iteration)})


def write_shard(store: RunStore, shard: int, *, stage: str = "generate", attempt: int = 0, rows: int = 3) -> ShardRef:
    iteration = store.state.iteration
    ids = [f"it{iteration:06d}-p{shard:05d}-s{row:02d}" for row in range(rows)]
    table = pa.table({"trajectory_id": ids, "term": [store.log.term] * rows})
    return store.write_shard(iteration, stage, attempt, shard, table)


def as_shard(store: RunStore, shard: int, data: ShardRef, stage: str = "generate") -> ShardCommit:
    return ShardCommit(
        iteration=store.state.iteration,
        stage=stage,
        shard=shard,
        term=store.log.term,
        data=data,
        seconds=0.0,
    )


def as_stage(
    store: RunStore, *data: ShardRef, stage: str = "generate", metrics: dict[str, float] | None = None
) -> StageCommit:
    iteration, fingerprint = store.state.iteration, Fingerprint(parts={})
    manifest = Manifest(
        iteration=iteration,
        stage=stage,
        term=store.log.term,
        attempt=0,
        fingerprint=fingerprint,
        config={},
        shards=data,
        metrics=metrics or {},
    )
    reference = store.write_manifest(manifest)
    return StageCommit(iteration=iteration, stage=stage, manifest=reference, fingerprint=fingerprint.digest)


def a_run(objects: ObjectStore) -> RunStore:
    """Two iterations and a half, with real files."""
    store = claimed(objects)
    for _ in range(3):
        data = [write_shard(store, shard) for shard in range(2)]
        store.commit(as_shard(store, 0, data[0]))
        store.commit(as_shard(store, 1, data[1]), as_stage(store, *data))
        if store.state.iteration < 2:
            skip_iteration(store)
    return store


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def objects(memory: Memory) -> ObjectStore:
    return ObjectStore("sim://run", memory, clock=Clock())


@pytest.fixture(scope="module")
def long_run() -> dict[str, bytes]:
    """The objects of a run of 1000 closed iterations."""
    memory = Memory()
    store = claimed(ObjectStore("", memory))
    for _ in range(1000):
        skip_iteration(store)
    return memory.objects


# Reading costs little.


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("closing", [False, True])
def test_the_end_is_found_without_the_hint(length: int, closing: bool, memory: Memory, objects: ObjectStore) -> None:
    store = RunStore(objects)
    while store.state.slot + 1 < length:
        if closing and store.state.stages:
            store.close({})
        elif closing and store.state.term and store.state.slot + 2 < length:
            store.commit(as_stage(store))
        else:
            store.log.claim(Claim(config={}, code="", packages={}, threads=1, host="", initial={}))
    memory.objects.pop(TAIL, None)
    memory.requests.clear()
    log = RunLog(objects)
    assert log._gallop() == (length - 1 if length else None)
    assert memory.requests["get"] <= 2 + 2 * max(length, 1).bit_length()
    assert log.read() == store.state
    assert store.state.slot == length - 1
    assert set(memory.requests) == {"get"}


def test_history_is_found_in_two_reads(long_run: dict[str, bytes]) -> None:
    memory = Memory(long_run)
    store = RunStore(ObjectStore("", memory))
    store.log.read()
    assert store.state.iteration == 1000
    for iteration in [*range(3 * PAGE + 3), *range(1000 - PAGE, 1000)]:
        memory.requests.clear()
        state = store.iteration_state(iteration)
        assert memory.requests.total() == memory.requests["get"] <= 2
        assert state.iteration == iteration
        assert state.stages["update"].weights == weights(iteration + 1)
        assert state.starting == {"actor": weights(iteration)}
        assert state.metrics is not None
        assert store.read_shard(state.metrics).to_pylist() == [{"iteration": iteration, "loss": float(iteration)}]
    assert store.iteration_state(1000) is store.state
    assert not store.iteration_state(1001).stages


def test_resuming_costs_the_same_however_long_the_run(long_run: dict[str, bytes]) -> None:
    def cost(iterations: int) -> dict[str, int]:
        memory = Memory()
        store = claimed(ObjectStore("", memory))
        for _ in range(iterations):
            skip_iteration(store)
        return resume(memory)

    def resume(memory: Memory) -> dict[str, int]:
        memory.requests.clear()
        store = claimed(ObjectStore("", memory))
        store.sweep(["generate", "score"])
        assert store.state.term == 2
        return dict(memory.requests)

    short, long = cost(10), resume(Memory(dict(long_run)))
    assert long == short
    assert set(long) <= {"get", "create", "delete", "list"}
    assert sum(long.values()) < 25


def test_resuming_without_the_hint_costs_a_few_reads(long_run: dict[str, bytes]) -> None:
    memory = Memory({key: data for key, data in long_run.items() if key != TAIL})
    store = RunStore(ObjectStore("", memory))
    assert store.log.read().iteration == 1000
    assert set(memory.requests) == {"get"}
    assert memory.requests.total() <= 30


def test_a_snapshot_that_is_lost_can_still_be_retired(objects: ObjectStore) -> None:
    store = claimed(objects)
    lost = ObjectRef(key="checkpoints/actor/000001.1-0/manifest.json", sha256="0" * 64)
    store.commit(Snapshot(version=1, roles={"actor": lost}))
    store.commit_snapshot([Expire(version=1)])
    assert store.state.snapshots == {}


def test_an_index_stays_small(long_run: dict[str, bytes]) -> None:
    assert max(len(data) for key, data in long_run.items() if key.startswith("index/000999.")) < 20_000


@pytest.mark.parametrize("hint", [b"", b"{", b"\xff", b"[]", b'{"key": "index/9.json", "sha256": "0"}'])
def test_a_damaged_hint_is_no_loss(hint: bytes, memory: Memory, objects: ObjectStore) -> None:
    state = a_run(objects).state
    memory.objects[TAIL] = hint
    assert RunLog(objects).read() == state


def test_a_hint_that_cannot_be_written_fails_nothing(memory: Memory, objects: ObjectStore) -> None:
    class NoHint(Memory):
        def put(self, key: str, data: bytes) -> None:
            if key == TAIL:
                raise TimeoutError
            super().put(key, data)

    store = a_run(ObjectStore("", NoHint(memory.objects), clock=Clock()))
    assert store.state.iteration == 2
    assert RunLog(objects).read() == store.state


# An append is answered, or in doubt, and never both.


def on_a_store_that_fails(*faults: Fault | None, stages: bool = False) -> tuple[RunStore, Simulated]:
    """A driver whose next requests go as `faults` say; it tries each only once."""
    backend = Simulated(Clock(), lambda: None)
    store = claimed(ObjectStore("", backend, deadline_s=0.0, clock=backend.clock))
    if stages:
        store.commit(as_stage(store))
    script = iter(faults)
    backend.next_fault = lambda kind: next(script, None)
    backend.requests.clear()
    return store, backend


def test_an_answer_that_was_lost_is_looked_up_at_once() -> None:
    store, backend = on_a_store_that_fails(Fault("applied", "timeout"))
    store.commit(as_shard(store, 0, ShardRef(key="", rows=0, bytes=0, sha256="")))
    assert dict(backend.requests) == {"create": 1, "get": 2}, (
        "the slot, and the first record, which tells that the run is there"
    )
    assert store.state.slot == 1


@pytest.mark.parametrize("effect", ["none", "applied", "late"])
def test_an_append_in_doubt_is_brought_to_an_end(effect: Any) -> None:
    store, backend = on_a_store_that_fails(Fault(effect, "timeout", delay_s=3.0), Fault("none", "500"))
    data = [ShardRef(key=f"shard {shard}", rows=0, bytes=0, sha256="") for shard in range(2)]
    with pytest.raises(StoreUnavailable):
        store.commit(as_shard(store, 0, data[0]))
    # Whoever tries again looks first whether it is there, and finds it.
    assert set(store.committed_shards("generate")) == {0}
    store.commit(as_shard(store, 1, data[1]))
    backend.clock.sleep(100.0)
    assert RunLog(ObjectStore("", Memory(backend.objects))).read() == store.state
    assert store.state.slot == 2


@pytest.mark.parametrize("effect", ["none", "applied"])
def test_a_close_in_doubt_is_not_closed_again(effect: Any) -> None:
    """The second try must neither touch what the first one may have committed, nor close the next iteration."""
    store, backend = on_a_store_that_fails(None, None, Fault(effect, "timeout"), Fault("none", "500"), stages=True)
    with pytest.raises(StoreUnavailable):
        store.close({"loss": 1.0})
    with pytest.raises(AssertionError, match="iteration 1 has not begun"):
        store.close({"loss": 2.0})
    state = RunStore(ObjectStore("", Memory(backend.objects))).log.read()
    assert state.iteration == 1
    metrics = store.iteration_state(0).metrics
    assert metrics is not None
    assert store.read_shard(metrics)["loss"].to_pylist() == [1.0]


def test_a_close_that_failed_before_its_record_is_tried_under_other_names() -> None:
    none = (None, None, None)  # of listing and deleting what the first try left, and of new metrics
    faults = (Fault("applied"), *none, Fault("late", delay_s=100.0))
    store, backend = on_a_store_that_fails(*faults, stages=True)
    with pytest.raises(StoreUnavailable):
        store.close({"loss": 1.0})  # its metrics are there
    with pytest.raises(StoreUnavailable):
        store.close({"loss": 2.0})  # its metrics are there, and its index is on its way
    store.close({"loss": 3.0})
    backend.clock.sleep(1000.0)
    backend.land()
    metrics = store.iteration_state(0).metrics
    assert metrics is not None
    assert store.read_shard(metrics)["loss"].to_pylist() == [3.0]
    written = [key for key in backend.objects if key.startswith("metrics/")]
    assert written == [metrics.key], "one row an iteration, in the folder, too"


# An older driver is fenced.


def test_an_older_driver_is_fenced(objects: ObjectStore) -> None:
    older = claimed(objects)
    newer = claimed(objects)
    assert (older.log.term, newer.log.term) == (1, 2)
    for _ in range(2):
        with pytest.raises(Fenced, match=r"term 2, on here.*term 1") as stopped:
            older.commit(as_stage(older))
    assert stopped.value.exit_code == 3
    newer.commit(as_stage(newer))
    assert newer.state.slot == 2


def test_a_claim_that_is_overtaken_takes_the_next_term() -> None:
    backend = Simulated(Clock(), lambda: others.append(claimed(ObjectStore("", Memory(backend.objects)))))
    others: list[RunStore] = []
    backend.next_fault = lambda kind: Fault("overtaken") if kind == "create" and len(others) < 3 else None
    store = claimed(ObjectStore("", backend, clock=backend.clock))
    assert [other.log.term for other in others] == [1, 2, 3]
    assert store.log.term == 4
    with pytest.raises(Fenced):
        others[-1].commit(as_stage(others[-1]))


@pytest.mark.parametrize("away", [False, True])
def test_a_fenced_driver_takes_its_late_files_along(away: bool, memory: Memory) -> None:
    class Away(Memory):
        def delete(self, keys: list[str]) -> None:
            if away:
                raise TimeoutError
            super().delete(keys)

    objects = ObjectStore("", Away(memory.objects), clock=Clock())
    older = claimed(objects)
    kept = write_shard(older, 0)
    older.commit(as_shard(older, 0, kept))
    claimed(objects)
    late = write_shard(older, 1)
    with pytest.raises(Fenced):
        older.commit(as_shard(older, 1, late))
    assert kept.key in memory.objects
    assert (late.key in memory.objects) == away


def test_claims_at_the_same_moment_follow_each_other(objects: ObjectStore) -> None:
    together, terms = threading.Barrier(6), []

    def claim() -> None:
        together.wait()
        terms.append(claimed(objects).log.term)

    threads = [threading.Thread(target=claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(terms) == [1, 2, 3, 4, 5, 6]
    assert RunLog(objects).read().slot == 5


# What is damaged is noticed, and named.


def test_damaged_and_missing_objects_are_named(memory: Memory, objects: ObjectStore) -> None:
    store = a_run(objects)
    shard = store.committed_shards("generate")[0].data
    stage = store.committed_stage(2, "generate")
    closed = store.iteration_state(1)
    assert isinstance(stage, StageCommit)
    assert closed.index is not None
    reads = {
        shard.key: lambda: store.read_shard(shard),
        stage.manifest.key: lambda: RunStore(objects).manifest(stage),
        closed.index.key: lambda: store.iteration_state(0),
    }
    for key, read in reads.items():
        read()
        whole = memory.objects.pop(key)
        with pytest.raises(Corrupt, match=f"sim://run/{key} is gone"):
            read()
        memory.objects[key] = whole[:-1] + bytes([whole[-1] ^ 1])
        with pytest.raises(Corrupt, match=f"sim://run/{key} is damaged"):
            read()
        memory.objects[key] = whole


@pytest.mark.parametrize("slot", [2, 4])
@pytest.mark.parametrize("change", [b'"threads":2', b'"threads": 1'])
def test_a_record_that_was_tampered_with_is_noticed(
    change: bytes, slot: int, memory: Memory, objects: ObjectStore
) -> None:
    """By its own digest: the newest has no other after it that would tell."""
    claimed(objects, claims=5)
    key = slot_key(slot)
    assert b'"threads":1' in memory.objects[key]
    memory.objects[key] = memory.objects[key].replace(b'"threads":1', change)
    with pytest.raises(Corrupt, match=rf"{key} is damaged: restore it from a backup"):
        RunLog(objects).read()


@pytest.mark.parametrize("bit", range(8))
def test_no_bit_of_a_record_can_change_unnoticed(bit: int, memory: Memory, objects: ObjectStore) -> None:
    claimed(objects)
    key = slot_key(0)
    whole = memory.objects[key]
    for at in range(len(whole)):
        memory.objects[key] = whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]
        with pytest.raises((Corrupt, UserError)):
            RunLog(objects).read()


@pytest.mark.parametrize("lost", range(1, 13))
def test_a_lost_record_is_not_taken_for_the_end(lost: int, memory: Memory, objects: ObjectStore) -> None:
    """A driver would otherwise fill the hole, and delete what is committed after it."""
    claimed(objects, claims=14)
    for slot in range(lost, min(lost + 3, 13)):
        del memory.objects[slot_key(slot)]
    before = dict(memory.objects)
    with pytest.raises(Corrupt, match=rf"{slot_key(lost)} is gone, though log/\d+.json is there: restore it"):
        claimed(objects)
    assert memory.objects == before, "nothing was written, and nothing was deleted"


def test_an_end_that_the_hint_contradicts_is_not_taken_for_the_end(memory: Memory, objects: ObjectStore) -> None:
    a_run(objects)
    newest = max(key for key in memory.objects if key.startswith("log/0"))
    hinted = RunState.model_validate_json(memory.objects[json.loads(memory.objects[TAIL])["key"]]).slot
    for slot in range(hinted, int(newest[4:-5]) + 1):
        del memory.objects[slot_key(slot)]
    memory.objects = {key: data for key, data in memory.objects.items() if key != TAIL} | {TAIL: memory.objects[TAIL]}
    log = RunLog(objects)
    log._state = RunState()  # as if the index had not been there when the log was read
    log._catch_up()
    with pytest.raises(Corrupt, match=rf"{slot_key(hinted)} is gone, though index/"):
        log.check_end()


def test_a_lost_record_that_closed_an_iteration_is_missed(memory: Memory, objects: ObjectStore) -> None:
    """Nothing is after it but the hint, which was written when it was there; what it retired is deleted by now."""
    store = claimed(objects)
    skip_iteration(store)
    del memory.objects[slot_key(store.state.slot)]
    before = dict(memory.objects)
    with pytest.raises(Corrupt, match=rf"{slot_key(store.state.slot)} is gone, though index/000000"):
        claimed(objects)
    assert memory.objects == before


def test_others_who_append_meanwhile_are_no_hole(memory: Memory, objects: ObjectStore) -> None:
    store = claimed(objects)
    reader = RunLog(objects)
    assert reader.read().slot == 0
    claimed(objects, claims=3)
    reader.check_end()
    assert reader.state.slot == 3
    assert store.log.read().slot == 3


def test_a_record_of_another_run_does_not_fit_in(memory: Memory, objects: ObjectStore) -> None:
    claimed(objects, claims=3)
    other = Memory()
    claimed(ObjectStore("", other), claims=3)
    memory.objects[slot_key(1)] = other.objects[slot_key(1)]
    with pytest.raises(Corrupt, match="log record 1 does not follow"):
        RunLog(objects).read()


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"schema_version": 1}'])
def test_a_record_that_cannot_be_read_is_named(data: bytes, memory: Memory, objects: ObjectStore) -> None:
    claimed(objects, claims=3)
    memory.objects[slot_key(1)] = data
    with pytest.raises((Corrupt, UserError), match=r"log(/| record )0*1(\.json|) is (damaged|of schema version None)"):
        RunLog(objects).read()


def test_a_newer_release_is_told_in_one_line(memory: Memory, objects: ObjectStore) -> None:
    store = a_run(objects)
    stage = store.committed_stage(2, "generate")
    assert isinstance(stage, StageCommit)

    tree = json.loads(memory.objects[stage.manifest.key]) | {"schema_version": 99, "invented": "later"}
    newer = json.dumps(tree).encode()
    reference = store._write(stage.manifest.key, newer)
    with pytest.raises(UserError) as told:
        RunStore(objects).manifest(stage.model_copy(update={"manifest": reference}))
    assert str(told.value).startswith(f"{stage.manifest.key} is of schema version 99")
    assert "\n" not in str(told.value)

    last = slot_key(store.state.slot)
    tree = json.loads(memory.objects[last]) | {"schema_version": 99, "commits": [{"kind": "invented"}]}
    memory.objects[last] = json.dumps(tree).encode()
    with pytest.raises(UserError) as told:
        RunLog(objects).read()
    assert str(told.value).startswith(f"log record {store.state.slot} is of schema version 99, and this release reads")
    assert "\n" not in str(told.value)


def test_numbers_that_are_none_survive(objects: ObjectStore) -> None:
    """A metric may be NaN, such as an explained variance of equal returns; JSON has no word for it."""
    store = claimed(objects)
    nan, inf = float("nan"), float("inf")
    stage = as_stage(store, metrics={"nan": nan, "inf": inf})
    store.commit(stage.model_copy(update={"controllers": {"beta": nan, "limit": -inf}}))
    store.close({"nan": nan})
    read = RunStore(objects)
    assert str(read.log.read().controllers) == "{'beta': nan, 'limit': -inf}"
    assert str(read.iteration_state(0).controllers) == "{'beta': nan, 'limit': -inf}"
    assert str(read.manifest(stage).metrics) == "{'nan': nan, 'inf': inf}"


# The sweep.


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*.parquet")}


TRIES = 12
"""Of a driver at a stage: however many, they are swept."""


def test_the_sweep_deletes_orphans_and_nothing_else(tmp_path: Path) -> None:
    """What pandas reads in the folder, as it stands, is each committed row once."""
    objects = ObjectStore(f"file://{tmp_path}/run")
    first = a_run(objects)  # all of iteration 2's generate is committed
    write_shard(first, 0, stage="score", attempt=0)
    second = claimed(objects)  # was killed after each kind of write
    data = write_shard(second, 0, stage="score", attempt=1)
    second.commit(as_shard(second, 0, data, "score"))
    for attempt in range(TRIES):
        write_shard(second, 1, stage="score", attempt=attempt)
    metrics = Path(tmp_path / "run/metrics/iteration=000002.2-1.parquet")
    metrics.write_bytes((tmp_path / "run/metrics/iteration=000001.1-0.parquet").read_bytes())
    third = claimed(objects)
    own = write_shard(third, 1, stage="score")
    before = files(tmp_path)
    assert len(pd.read_parquet(tmp_path / "run/trajectories/score")) == (3 + TRIES) * 3

    third.sweep(name for name in ("generate", "score"))

    committed = {shard.data.key for shards in third.state.shards.values() for shard in shards.values()}
    gone = {path.removeprefix("run/") for path in before - files(tmp_path)}
    assert gone == {
        "trajectories/score/iteration=000002/1-0-part-00000.parquet",
        *(f"trajectories/score/iteration=000002/2-{attempt}-part-00001.parquet" for attempt in range(TRIES)),
        "metrics/iteration=000002.2-1.parquet",
    }
    assert not gone & committed
    third.commit(as_shard(third, 1, own, "score"), as_stage(third, data, own, stage="score"))
    skip_iteration(third)

    for stage, iterations in (("generate", 3), ("score", 1)):
        frame = pd.read_parquet(tmp_path / "run/trajectories" / stage)
        assert len(frame) == frame["trajectory_id"].nunique() == iterations * 2 * 3
        expected = frame["trajectory_id"].str[2:8].astype(int)
        assert (frame["iteration"].astype(int) == expected).all()
    assert sorted(pd.read_parquet(tmp_path / "run/metrics")["iteration"]) == [0, 1, 2]


def test_a_second_try_deletes_what_the_first_left(tmp_path: Path) -> None:
    store = claimed(ObjectStore(f"file://{tmp_path}/run"))
    assert store.begin_attempt(0, "generate") == 0
    data = write_shard(store, 0)
    store.commit(as_shard(store, 0, data))
    write_shard(store, 1, attempt=0)  # and the store did not answer
    assert store.begin_attempt(0, "generate") == 1
    assert files(tmp_path / "run") == {data.key}
    assert store.begin_attempt(0, CLOSE) == 0


def test_vacuum_deletes_only_what_ratchet_wrote(tmp_path: Path) -> None:
    """Neither what others put into the folder, nor what a link there leads to."""
    store = a_run(ObjectStore(f"file://{tmp_path}/run"))
    state = store.state
    folder = store.checkpoint_folder("actor", weights(1))
    names = (
        "model-00001.safetensors",
        "model.safetensors.index.json",
        "adapter_config.json",
        "optimizer-00001.safetensors",
    )
    left = [
        write_shard(store, 7).key,
        store.write_journal(2, "generate", 0, pa.table({"a": [1]})).key,
        store.write_manifest(store.manifests(2)["generate"].model_copy(update={"stage": "score"})).key,
        *(file.key for file in store.write_checkpoint_files(folder, dict.fromkeys(names, b"1")).values()),
        store.write_checkpoint_manifest(folder, Checkpoint(role="actor", weights=weights(1), files={})).key,
    ]
    for iteration in ("metrics/iteration=000000.1-0.parquet", "index/000000.1-0.json"):
        left.append(iteration.replace(".1-0", ".1-7"))
        shutil.copy(tmp_path / "run" / iteration, tmp_path / "run" / left[-1])
    store.write_calls(1, "generate", 1, pa.table({"a": [1]}))  # of a closed iteration
    left += store.objects.list("journals/iteration=000001/calls/")
    for name in ("sub/b.txt", "trajectories/score/iteration=000000/1-0-part-00000.parquet"):
        (tmp_path / "victim" / name).parent.mkdir(parents=True)
        (tmp_path / "victim" / name).write_text("precious")
    (tmp_path / "run" / "x").symlink_to("../victim")
    (tmp_path / "run" / "trajectories" / "score").symlink_to("../../victim/trajectories/score")
    before = sorted((tmp_path / "victim").rglob("*"))
    others = [
        "README.md",
        "trajectories/generate/iteration=000000/notes.parquet",
        f"{folder}/notes.json",
        "checkpoints/best/model.safetensors",
        "metrics/plot.png",
        "data/train-0-0.parquet",
        "index/000000.1-7.json.bak",
        "backup/metrics/iteration=000000.1-7.parquet",
    ]
    for name in others:
        store.objects.put(name, b"mine")
    assert foreign(store) == sorted(others)
    assert unreached(store) == sorted(left)
    assert vacuum(store) == sorted(left)
    assert unreached(store) == []
    assert foreign(store) == sorted(others)
    assert sorted((tmp_path / "victim").rglob("*")) == before
    assert RunStore(store.objects).log.read().recent == state.recent
    assert not set(left) & set(store.objects.list(""))


# The heartbeat.


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def beat(process: psutil.Process | None = None, **changes: Any) -> heartbeat.Beat:
    process = process or psutil.Process()
    fields = {"term": 1, "host": socket.gethostname(), "boot": heartbeat.boot_id(), "pid": process.pid}
    return heartbeat.Beat(**({**fields, "born": born(process), "count": 1} | changes))


def put(objects: ObjectStore, beat: heartbeat.Beat) -> heartbeat.Beat:
    objects.put(heartbeat.KEY, beat.model_dump_json().encode())
    return beat


@pytest.mark.parametrize("step_s", [-300.0, 300.0])
def test_a_clock_that_is_set_makes_nobody_seem_dead(
    step_s: float, objects: ObjectStore, sleeper: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel knows when a process started as time since the machine did; the rest follows from the clock."""
    alive, started = put(objects, beat(sleeper)), sleeper.create_time()
    boot_time = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + step_s)
    assert psutil.Process(sleeper.pid).create_time() - started == pytest.approx(step_s, abs=2.0)
    assert heartbeat.is_alive(objects) == alive
    put(objects, beat(sleeper, born=alive.born + step_s))
    assert heartbeat.is_alive(objects) is None


@pytest.mark.parametrize("data", [b"", b"{", b'{"term": 1}', b"\x00\xff"])
def test_a_beat_that_cannot_be_read_is_none(data: bytes, objects: ObjectStore) -> None:
    objects.put(heartbeat.KEY, data)
    assert heartbeat.is_alive(objects) is None


def test_a_process_of_this_host_is_looked_at(objects: ObjectStore, sleeper: psutil.Process) -> None:
    assert heartbeat.is_alive(objects) is None
    alive = put(objects, beat(sleeper))
    assert heartbeat.is_alive(objects) == alive
    put(objects, beat(sleeper, born=born(sleeper) - 60))
    assert heartbeat.is_alive(objects) is None, "another process has its number now"
    put(objects, beat(sleeper, stopped=True))
    assert heartbeat.is_alive(objects) is None
    put(objects, alive)
    sleeper.kill()
    while sleeper.is_running() and sleeper.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert heartbeat.is_alive(objects) is None, "killed, though nobody has waited for it"


class Meanwhile(Clock):
    """Something happens while one sleeps."""

    happens: Any = staticmethod(lambda: None)

    def sleep(self, seconds: float, /) -> None:
        super().sleep(seconds)
        self.happens()


@pytest.mark.parametrize("elsewhere", [{"host": "elsewhere"}, {"boot": "before"}])
def test_another_host_is_watched(
    elsewhere: dict[str, str], objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "time", clock := Meanwhile())
    put(objects, beat(**elsewhere))
    said: list[str] = []
    assert heartbeat.is_alive(objects, said.append) is None, "it stays still"
    assert clock.now >= 2.5 * heartbeat.INTERVAL_S
    assert len(said) == 1
    assert "watching" in said[0]

    watched_until = clock.now
    assert heartbeat.is_alive(objects, said.append) is None, "it has been watched"
    assert (clock.now, len(said)) == (watched_until, 1)

    changes: list[tuple[dict[str, Any], bool]] = [
        ({"count": 99}, True),
        ({"term": 2}, True),
        ({"stopped": True}, False),
    ]
    for count, (change, alive) in enumerate(changes, 2):
        still: dict[str, Any] = {**elsewhere, "count": count}  # not the beat that has been watched
        put(objects, beat(**still))
        clock.happens = partial(put, objects, beat(**(still | change)))
        assert (heartbeat.is_alive(objects) is not None) == alive


class Watched(Stopping):
    """Notes that it was asked, and ends no process."""

    def __init__(self) -> None:
        super().__init__("it")
        self.asked = threading.Event()

    def request(self, signum: int | None = None, _: FrameType | None = None) -> None:
        self.asked.set()


def test_a_driver_whose_run_is_deleted_is_stopped_and_leaves_nothing(
    memory: Memory, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a shard takes long: nobody waits for its commit."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)
    stopping, store = Watched(), claimed(objects)
    beating = heartbeat.Heartbeat(store.log, stopping)
    memory.objects.clear()
    write_shard(store, 0)
    try:
        assert stopping.asked.wait(60)
        beating._thread.join(60)
        with pytest.raises(Deleted, match="was deleted while this driver was at work: the driver stops"):
            raise stopping._why
    finally:
        beating.close()
    assert memory.objects == {}


def test_a_damaged_first_record_is_no_other_run(memory: Memory, objects: ObjectStore) -> None:
    """A live driver continues, and readers of the whole log get an error."""
    store = claimed(objects)
    memory.objects[slot_key(0)] = memory.objects[slot_key(0)][:-9]
    store.commit(as_stage(store))
    assert slot_key(1) in memory.objects
    memory.objects[slot_key(0)] = first_of_another_run()
    with pytest.raises(Deleted):
        store.commit(as_stage(store))
    assert slot_key(2) not in memory.objects


def first_of_another_run() -> bytes:
    other = Memory()
    claimed(ObjectStore("", other))
    return other.objects[slot_key(0)]


class Away(Memory):
    """A store that can go away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = threading.Event()

    def _request(self, kind: str, operation: Any) -> Any:
        if self.away.is_set():
            raise TimeoutError
        return super()._request(kind, operation)


def test_what_ended_a_driver_is_told_where_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Away()
    log = claimed(ObjectStore("", backend, clock=Clock())).log

    def drive() -> None:
        with heartbeat.beating(log, Watched()):
            backend.away.set()
            raise UserError("a wrong reward")

    with pytest.raises(UserError, match="a wrong reward"):
        drive()


def test_what_a_driver_has_committed_is_not_guessed() -> None:
    """While the outcome of an append is unknown, no beat says how the run stands."""
    backend = Away()
    store = claimed(ObjectStore("", backend, clock=Clock()))
    (before, at), commit = store.log.last_read(), as_stage(store)
    backend.away.set()
    with pytest.raises(StoreUnavailable):
        store.commit(commit)
    with pytest.raises(StoreUnavailable, match=r"it is unknown whether the log of .* has another record"):
        store.log.last_read()
    backend.away.clear()
    slot = store.state.slot
    after, later = store.log.last_read()
    assert (before.slot, after.slot) == (slot - 1, slot)
    assert later > at


def test_a_driver_beats_stops_when_asked_and_says_goodbye(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)
    stopping = Watched()
    beating = heartbeat.Heartbeat(claimed(objects, claims=3).log, stopping)
    try:
        alive = heartbeat.is_alive(objects)
        assert alive is not None
        assert alive.term == 3
        deadline = time.monotonic() + 60
        while heartbeat.read(objects).count < alive.count + 2:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        objects.put(heartbeat.stop_key(2), b"")
        assert not stopping.asked.wait(0.1), "somebody else was asked"
        objects.put(heartbeat.stop_key(3), b"")
        assert stopping.asked.wait(60)
    finally:
        beating._closed.set()
        beating._thread.join(60)  # `close` waits no longer than an interval, which is short here
        beating.close()
    assert heartbeat.read(objects).stopped  # type: ignore[union-attr]
    assert heartbeat.is_alive(objects) is None
    assert objects.get_if_there(heartbeat.stop_key(3)) is None
    assert objects.get_if_there(heartbeat.stop_key(2)) is not None


def test_an_older_driver_leaves_the_beat_to_the_newer(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)
    older = heartbeat.Heartbeat(claimed(objects).log, Watched())
    newer = put(objects, beat(term=2, count=7))
    deadline = time.monotonic() + 60
    while older._thread.is_alive():  # it may have been about to beat: a newer driver beats again, too
        assert time.monotonic() < deadline
        newer = put(objects, beat(term=2, count=newer.count + 1))
        older._thread.join(0.05)
    older.close()
    assert heartbeat.read(objects) == newer


def test_a_store_that_is_away_does_not_stop_the_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)
    backend = Away()
    objects = ObjectStore("", backend, clock=Clock())
    beating = heartbeat.Heartbeat(claimed(objects).log, Watched())
    backend.away.set()
    time.sleep(0.1)
    assert beating._thread.is_alive()
    backend.away.clear()
    count = heartbeat.read(objects).count  # type: ignore[union-attr]
    deadline = time.monotonic() + 60
    while heartbeat.read(objects).count == count:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    backend.away.set()
    beating.close()  # an error here would hide the one that ended the driver
