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
