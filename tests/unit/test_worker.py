"""A worker applies an update once, or says that it cannot know; and it computes shards alone or together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.store.log import Fenced, RunLog
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import ShardRef, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.calls import Call, Context, RowsCall, ShardOutput, ShardSummary, UpdateCall
from ratchet.infra.workers.held_weights import WrongPolicyVersion
from ratchet.infra.workers.role_engines import Engines
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.errors import NotFinite
from ratchet.rlhf.schema import Column
from ratchet.rlhf.stage_config import StageConfig
from ratchet.tasks.shard_runner import ShardJob
from ratchet.tasks.stages.old_log_probs import OLD_LOG_PROBS, OldLogProbsConfig, old_log_probs
from ratchet.tasks.stages.score import SCORE
from tests import tiny

BEFORE = Weights(version=3, digest="3 steps")
AFTER = Weights(version=4, digest="4 steps")


class Counting:
    """An engine whose state is how many steps it has taken."""

    def __init__(self) -> None:
        self.steps = 3

    def digest(self) -> str:
        return f"{self.steps} steps"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Worker:
    monkeypatch.setattr(Engines, "_build", lambda self, role: Counting())
    worker = Worker(tiny.config(tmp_path), RunStore(ObjectStore(f"file://{tmp_path}")))
    worker.mark_as_version("actor", BEFORE)
    return worker


Update = Callable[[Context[StageConfig]], dict[str, float]]


def call(term: int = 1, weights: Weights = BEFORE) -> Call[StageConfig]:
    return Call(term, "update_actor", 3, StageConfig(), role="actor", weights=weights)


def step(context: Context[StageConfig]) -> dict[str, float]:
    context.trainer.steps += 1  # type: ignore[attr-defined]
    return {}


def nothing(context: Context[StageConfig]) -> ShardOutput[ShardSummary]:
    return ShardOutput(context.batch, ShardSummary())


def test_an_update_is_applied_once(worker: Worker) -> None:
    first = worker.update(UpdateCall(call(), step))
    assert first.weights == AFTER
    assert worker.update(UpdateCall(call(), step)) is first
    assert worker.engines.model("actor").steps == 4
    assert worker.has_weights("actor", AFTER)


def test_a_worker_that_failed_in_the_middle_asks_to_be_restored(worker: Worker) -> None:
    def fails(context: Context[StageConfig]) -> dict[str, float]:
        step(context)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        worker.update(UpdateCall(call(), fails))
    with pytest.raises(WrongPolicyVersion, match="actor"):
        worker.update(UpdateCall(call(), step))
    with pytest.raises(WrongPolicyVersion, match="actor"):
        worker.rows([RowsCall(call(), nothing, ())])
    with pytest.raises(AssertionError, match="no state to save"):
        worker.begin_save("actor")


def test_a_worker_with_other_weights_asks_to_be_restored(worker: Worker) -> None:
    with pytest.raises(WrongPolicyVersion, match="actor"):
        worker.update(UpdateCall(call(weights=Weights(version=3, digest="others")), step))
    assert worker.engines.model("actor").steps == 3


def test_a_worker_serves_no_older_driver(worker: Worker) -> None:
    worker.update(UpdateCall(call(term=2), step))
    with pytest.raises(Fenced, match="term 2"):
        worker.update(UpdateCall(call(term=1, weights=AFTER), step))


def test_what_shares_the_actors_tensors_is_built_anew_with_it(tmp_path: Path) -> None:
    from ratchet.rlhf.rollout.hf_engine import HFRollout
    from ratchet.rlhf.train.model_engine import WithoutAdapters

    tiny.workspace(tmp_path)
    config = tiny.config(tmp_path, model__lora={"r": 2})
    worker = Worker(config, RunStore(ObjectStore(f"file://{tmp_path}")))
    for _ in range(2):
        worker.load("actor", BEFORE, None)
        actor, reference = worker.engines.model("actor"), worker.engines.inference("reference")
        assert isinstance(reference, WithoutAdapters)
        assert reference.actor is actor
        rollout = worker.engines.rollout()
        assert isinstance(rollout, HFRollout)
        assert rollout.model is actor.model


def test_models_that_share_a_device_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever computes is on the device, and besides it nothing that gives way."""
    from ratchet.rlhf.rollout.hf_engine import HFRollout
    from ratchet.rlhf.train.model_engine import ModelEngine

    there: dict[int, tuple[bool, bool]] = {}

    def place(self: object, *, model: bool, optimizer: bool) -> None:
        there[id(self)] = (model, optimizer)

    monkeypatch.setattr(ModelEngine, "place", place)
    monkeypatch.setattr(HFRollout, "place", place)
    tiny.workspace(tmp_path)
    turns = {"actor__offload_when_idle": True, "critic__offload_when_idle": True}
    for changes, roles in (
        ({}, {"rollout": "actor", "actor": "actor", "reference": "reference", "critic": "critic"}),
        ({"actor__engine": "fsdp"}, {"rollout": "rollout", "actor": "actor", "critic": "critic"}),
        ({"model__lora": {"r": 2}}, {"rollout": "actor", "actor": "actor", "reference": "actor", "critic": "critic"}),
    ):
        there.clear()
        worker = Worker(tiny.config(tmp_path, **turns, **changes), RunStore(ObjectStore(f"file://{tmp_path}")))
        engines = worker.engines
        for _ in range(2):
            for role, owner in roles.items():
                for learns in (False, True) if role == owner != "rollout" else (False,):
                    if role == "rollout":
                        engines.rollout()
                    elif learns:
                        engines.model(role, learns=True)
                    else:
                        engines.inference(role)
                    on = {number for number, (model, _) in there.items() if model}
                    assert [optimizer for model, optimizer in there.values() if model] == [learns]
                    own = engines.rollout() if owner == "rollout" else engines.model(owner)
                    assert on == {id(own)}, (role, changes)


def test_a_worker_of_a_deleted_run_waits_for_what_it_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a file could appear after the driver has deleted what was written."""
    asked, written = Event(), Event()

    def write(self: RunStore, folder: str, files: object) -> dict[str, object]:
        asked.wait()
        written.set()
        return {}

    def is_deleted(self: RunLog, slot: int = 2) -> bool:
        asked.set()
        return True

    monkeypatch.setattr(RunStore, "write_checkpoint_files", write)
    monkeypatch.setattr(RunLog, "is_deleted", is_deleted)
    tiny.workspace(tmp_path)
    worker = Worker(tiny.config(tmp_path), RunStore(ObjectStore(f"file://{tmp_path}/runs")), ["actor"])
    worker.load("actor", BEFORE, None)
    worker.begin_save("actor")
    worker.close()
    assert written.is_set()


def test_shards_of_one_call_have_the_rows_that_each_has_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.workspace(tmp_path)
    config, store = tiny.config(tmp_path), RunStore(ObjectStore(f"file://{tmp_path}/run"))
    store.write_as(1)
    worker = Worker(config, store, ["actor"])
    worker.load("actor", BEFORE, None)
    asked: list[int] = []
    engine = worker.engines.model("actor")
    infer_each = engine.infer_each

    def watched(batches: Sequence[TrajectoryBatch], *arguments: Any, **options: Any) -> Any:
        asked.append(len(batches))
        return infer_each(batches, *arguments, **options)

    monkeypatch.setattr(engine, "infer_each", watched)
    requests = []
    for shard, lengths in enumerate([[3, 9, 1], [5], [2, 8]]):
        rows = {
            "trajectory_id": [f"{shard}-{row}" for row in range(len(lengths))],
            "prompt_ids": [[5] * length for length in lengths],
            "response_ids": [[7 + length] * length for length in lengths],
        }
        read = store.write_shard(0, "generate", 0, shard, TrajectoryBatch.of(rows).table)
        inputs = (((read,), OLD_LOG_PROBS.reads["generate"]),)
        of_stage = OldLogProbsConfig.of(config)
        this = Call(1, "old_log_probs", 0, of_stage, inputs, shard=shard, role="actor", weights=BEFORE)
        requests.append(RowsCall(this, old_log_probs, OLD_LOG_PROBS.writes))
    together = worker.rows(requests)
    alone = [rows for request in requests for rows in worker.rows([request])]
    assert asked == [3, 1, 1, 1]
    assert [rows.shard for rows in together] == [rows.shard for rows in alone], "the same files, by their digests"


def test_a_shard_that_is_not_finite_stops_none_before_it(tmp_path: Path) -> None:
    def compute(context: Context[StageConfig]) -> ShardOutput[ShardSummary]:
        value = math.nan if context.shard == 1 else 1.0
        return ShardOutput(TrajectoryBatch.of({"trajectory_id": ["a"], "value": [value]}), ShardSummary())

    store = RunStore(ObjectStore(f"file://{tmp_path}"))
    store.write_as(1)
    worker = Worker(tiny.config(tmp_path), store, ())
    writes = (Column("value", pa.float32(), "odd", "a number"),)
    requests = [RowsCall(Call(1, "odd", 0, StageConfig(), shard=shard), compute, writes) for shard in range(3)]
    [first] = worker.rows(requests)
    assert first.shard is not None and first.shard.key.endswith("00000.parquet")
    with pytest.raises(NotFinite, match="odd computed nan"):
        worker.rows(requests[1:])


@pytest.mark.parametrize(
    ("workers", "stage", "done", "chosen"),
    [
        (2, OLD_LOG_PROBS, [], [0, 1]),  # 80 rows: at least 32 for each rank
        (2, OLD_LOG_PROBS, [1], [0, 3]),
        (3, OLD_LOG_PROBS, [], [0, 1, 3]),
        (4, OLD_LOG_PROBS, [], [0, 1, 3]),  # the others are not ready
        (1, OLD_LOG_PROBS, [], [0]),
        (2, SCORE, [], [0]),
    ],
)
def test_a_call_has_as_many_shards_as_the_ranks_need(
    tmp_path: Path, workers: int, stage: Any, done: list[int], chosen: list[int]
) -> None:
    tiny.workspace(tmp_path)
    config = tiny.config(tmp_path, pools={"train": {"workers": workers}})
    store = RunStore(ObjectStore(f"file://{tmp_path}/run"))
    shards = {number: ShardRef(key=f"{number}", sha256="", rows=40, bytes=0) for number in (0, 1, 3)}
    handle = StageHandle.so_far("generate", shards)
    job = ShardJob(Driver(config, store), stage, 0, {"generate": handle}, 0, 5, StageHandle(stage.name))
    assert job.next_shards(done) == chosen
