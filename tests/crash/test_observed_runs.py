"""A trainer that writes a run is killed: what was committed stays, at most the open step is lost, and it goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet import observe
from ratchet.infra.observe.importing import import_run
from ratchet.infra.observe.sources.jsonl import JSONLines
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.runs.verify import verify
from ratchet.infra.store.object_store import ObjectStore
from ratchet.rlhf.metrics import STEP
from tests.processes import Fault, Processes
from tests.tiers import sampled

STEPS = range(1, 4)
POINTS = {
    "rows": ("put", r"trajectories/generate/iteration=000001"),
    "manifest": ("put", r"manifests/iteration=000001/generate"),
    "rows of the last stage": ("put", r"trajectories/advantages/iteration=000001"),
    "record of the stages": ("create", '{"kind":"shard","iteration":1'),
    "metrics": ("put", r"metrics/.*iteration=000001|metrics/.*000001"),
    "index": ("put", r"index/000001"),
    "record of the close": ("create", '{"kind":"close","iteration":1'),
    "hint": ("put", r"log/tail"),
}
"""What a writer stores of a step, in order."""
KEPT = {"record of the stages after", "metrics before", "metrics after", "index before", "index after"}
KEPT |= {"record of the close before", "record of the close after", "hint before", "hint after"}
"""Where the step is kept: all of its rows were committed."""


def train(work: tuple[str, int, float]) -> None:
    """Trains from a step on."""
    store, first, score = work
    with observe.start("mine", store, trainer="mine", iterations=len(STEPS)) as run:
        for number in STEPS[first - 1 :]:
            rows = [{"prompt": "2+2?", "response": str(sample), "response_ids": [sample]} for sample in range(4)]
            step = run.step(number).write("generate", rows).write("score", [{"score": score}] * 4)
            step.write("advantages", [{"advantages": 0.0}] * 4).metrics({"actor/lr": score}).close()


def import_all(work: tuple[str, str]) -> None:
    store, file = work
    import_run(JSONLines(Path(file), {}), "mine", store)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()


def stored(store: str, name: str = "mine") -> Run:
    run = open_run(f"{store}/{name}")
    assert [finding for finding in verify(run.store) if not finding.harmless] == []
    return run


def scores(run: Run) -> dict[int, list[float]]:
    """Returns the scores of each step; metrics and rows agree."""
    found = {}
    for iteration, row in enumerate(run.metrics().to_dict("records")):
        rows = run.trajectories(iteration)
        assert len(rows) == 4 and set(rows["score"]) == {row["actor/lr"]}
        found[int(row[STEP])] = list(set(rows["score"]))
    return found


@sampled(16)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_trainer_goes_on(point: str, when: str, children: Processes, tmp_path: Path) -> None:
    """It repeats the step in which it was killed, as it resumes from its checkpoint, and gets other answers."""
    store = f"file://{tmp_path}/runs"
    operation, match = POINTS[point]
    # the hint is written after each close, and after the claim there is none
    count = 2 if point == "hint" else 1
    child = children.call(train, (store, 1, 0.5), Fault(operation, match, when, count=count))
    assert child.wait() == -signal.SIGKILL, child.text
    child = children.call(train, (store, 2, 0.25))
    assert child.wait() == 0, child.text
    if f"{point} {when}" in KEPT:
        assert scores(stored(store)) == {1: [0.5], 2: [0.5]}
        assert scores(stored(store, "mine-2")) == {1: [0.5], 2: [0.25], 3: [0.25]}
    else:
        assert scores(stored(store)) == {1: [0.5], 2: [0.25], 3: [0.25]}
        assert not ObjectStore(f"{store}/mine-2").list("")


@sampled(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trainer_that_is_killed_while_it_forks(when: str, children: Processes, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/runs"
    assert children.call(train, (store, 1, 0.5)).wait() == 0
    child = children.call(train, (store, 2, 0.25), Fault("create", '{"kind":"fork"', when))
    assert child.wait() == -signal.SIGKILL, child.text
    child = children.call(train, (store, 2, 0.75))
    assert child.wait() == 0, child.text
    assert scores(stored(store)) == {1: [0.5], 2: [0.5], 3: [0.5]}
    assert scores(stored(store, "mine-2")) == {1: [0.5], 2: [0.75], 3: [0.75]}
    assert not ObjectStore(f"{store}/mine-3").list("")


@sampled(6)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", ["rows", "record of the stages", "record of the close"])
def test_a_killed_import_is_repeated(point: str, when: str, children: Processes, tmp_path: Path) -> None:
    store, file = f"file://{tmp_path}/runs", tmp_path / "rollouts.jsonl"
    rows: list[dict[str, Any]] = [
        {"iteration": step, "response": str(sample), "score": step} for step in STEPS for sample in range(4)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    operation, match = POINTS[point]
    child = children.call(import_all, (store, str(file)), Fault(operation, match, when))
    assert child.wait() == -signal.SIGKILL, child.text
    child = children.call(import_all, (store, str(file)))
    assert child.wait() == 0, child.text
    run = stored(store)
    assert run.metrics()[STEP].tolist() == list(STEPS) and run.trajectories()["score"].tolist() == [
        row["score"] for row in rows
    ]
