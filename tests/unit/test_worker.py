"""A worker applies an update once, or says that it cannot know."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.log import Fenced
from infra.objects import Objects
from infra.records import Weights
from infra.store import RunStore
from infra.workers.worker import Call, Context, Stale, Worker
from rlhf.config_view import ConfigView
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
    monkeypatch.setattr(Worker, "_build", lambda self, role: Counting())
    worker = Worker(tiny.config(tmp_path), RunStore(Objects(f"file://{tmp_path}")))
    worker.pass_through("actor", BEFORE)
    return worker


def call(epoch: int = 1, weights: Weights = BEFORE) -> Call:
    view = ConfigView(tiny.config(Path("/nowhere")), ())
    return Call(epoch, "update_actor", 3, 0, 0, view, (), role="actor", weights=weights)


def step(context: Context) -> dict[str, float]:
    context.engine.steps += 1
    return {}


def test_an_update_is_applied_once(worker: Worker) -> None:
    first = worker.update(call(), step)
    assert first.weights == AFTER
    assert worker.update(call(), step) is first
    assert worker.engine("actor").steps == 4
    assert worker.holds("actor", AFTER)


def test_a_worker_that_failed_in_the_middle_asks_to_be_restored(worker: Worker) -> None:
    def fails(context: Context) -> dict[str, float]:
        step(context)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        worker.update(call(), fails)
    for method in (worker.update, worker.rows):
        with pytest.raises(Stale, match="actor"):
            method(call(), step)  # type: ignore[operator]
    with pytest.raises(AssertionError, match="no state to save"):
        worker.begin_save("actor")


def test_a_worker_with_other_weights_asks_to_be_restored(worker: Worker) -> None:
    with pytest.raises(Stale, match="actor"):
        worker.update(call(weights=Weights(version=3, digest="others")), step)
    assert worker.engine("actor").steps == 3


def test_a_worker_serves_no_older_driver(worker: Worker) -> None:
    worker.update(call(epoch=2), step)
    with pytest.raises(Fenced, match="epoch 2"):
        worker.update(call(epoch=1, weights=AFTER), step)


def test_what_shares_the_actors_tensors_is_built_anew_with_it(tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    config = tiny.config(tmp_path, model__lora={"r": 2})
    worker = Worker(config, RunStore(Objects(f"file://{tmp_path}")))
    for _ in range(2):
        worker.load("actor", BEFORE, None)
        actor = worker.engine("actor")
        assert worker.engine("reference").actor is actor
        assert worker.engine("rollout").model is actor.model


def test_models_that_share_a_device_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever computes is on the device, and besides it nothing that gives way."""
    from rlhf.engines.hf_rollout import HFRollout
    from rlhf.engines.model_engine import ModelEngine

    there: dict[int, tuple[bool, bool]] = {}

    def place(self: object, *, model: bool, optimizer: bool) -> None:
        there[id(self)] = (model, optimizer)

    monkeypatch.setattr(ModelEngine, "place", place)
    monkeypatch.setattr(HFRollout, "place", place)
    tiny.workspace(tmp_path)
    turns = {"actor__by_turns": True, "critic__by_turns": True}
    for changes, roles in (
        ({}, {"rollout": "actor", "actor": "actor", "reference": "reference", "critic": "critic"}),
        ({"actor__engine": "fsdp"}, {"rollout": "rollout", "actor": "actor", "critic": "critic"}),
        ({"model__lora": {"r": 2}}, {"rollout": "actor", "actor": "actor", "reference": "actor", "critic": "critic"}),
    ):
        there.clear()
        worker = Worker(tiny.config(tmp_path, **turns, **changes), RunStore(Objects(f"file://{tmp_path}")))
        for _ in range(2):
            for role, owner in roles.items():
                for learns in (False, True) if role == owner != "rollout" else (False,):
                    worker.engine(role, learns=learns)
                    on = {number for number, (model, _) in there.items() if model}
                    assert on == {id(worker.engine(owner, learns=learns))}, (role, changes)
                    assert [optimizer for model, optimizer in there.values() if model] == [learns]
