"""`ratchet sweep`: arms that share the generations before them, stop when they fall behind, and survive a kill."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from ratchet.flows.sweep import Sweep, begin, parse_vary
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.processes import Child, Fault, Processes


@pytest.fixture
def parent(workspace: Path, processes: Processes) -> Run:
    return trained(workspace, processes)


def trained(workspace: Path, processes: Processes, **changes: Any) -> Run:
    config = tiny.config(
        workspace,
        run__name="base",
        run__store=f"file://{processes.folder}/runs",
        algorithm__kl={},
        algorithm__advantage={"type": "grpo"},
        reward__function="tests.rewards:letters",
        rollout__n=8,
        train__iterations=3,
        validation={"data": str(workspace / "held_out.parquet"), "every": 1, "n": 16, "temperature": 1.0},
        **{"actor__lr": 1e-2, **changes},
    )
    child = processes.train(config)
    assert child.wait() == 0, child.text
    return open_run(f"file://{processes.folder}/runs/base")


def started(processes: Processes, *faults: Fault, vary: str = "actor.lr=3e-2,1e-4,1e-5,1e-6", **options: Any) -> Child:
    store = f"file://{processes.folder}/runs"
    more = [word for name, value in options.items() for word in (f"--{name}", value)]
    return processes.cli(
        "sweep", "base", "--at", 2, "--vary", vary, "--iterations", 5, "--store", store, *more, faults=faults
    )


def generated(child: Child) -> list[int]:
    return sorted(iteration for stage, iteration in child.engine_calls if stage == "generate")


def test_arms_share_what_comes_before_them_and_survive_a_kill(parent: Run, processes: Processes) -> None:
    killed = started(processes, Fault("put", "base-sweep-01|trajectories/advantages/iteration=000003"), pruner="none")
    assert killed.wait() == -signal.SIGKILL
    child = started(processes, pruner="none")
    assert child.wait() == 0, child.text
    calls = generated(killed) + generated(child)
    assert min(calls) == 3, "iterations 0 and 1 are the parent's, and so are the generations of 2, before what varies"
    arms = [open_run(f"{parent.store.url}-sweep-{number:02d}") for number in range(4)]
    for arm in arms:
        assert arm.state.iteration == 5
        both = (run.trajectories(2, ["response", "score"]) for run in (arm, parent))
        assert next(both).equals(next(both))
    assert len({arm.state.weights["actor"].digest for arm in arms}) == 4
    shared = sum(row["perf/generated_tokens"] for row in parent.metric_rows()[:3])
    assert f"{4 * int(shared):,} tokens were not generated again; the best arm is base-sweep-0" in child.text
    best = max(arms, key=lambda arm: arm.store.validation_scores({5}, None)[5])
    assert f"the best arm is {best.store.url.rpartition('/')[2]}\n" in child.text

    again = started(processes, pruner="none")
    assert again.wait() == 0 and not again.engine_calls, "there is nothing left to do"
    other = started(processes, vary="actor.lr=1,2")
    assert other.wait() == 2
    assert "the sweep base-sweep exists with other settings (vary, pruner): repeat its command" in other.text


def test_arms_are_dropped_before_they_start(workspace: Path, processes: Processes) -> None:
    """Smaller steps gain less in one update."""
    trained(workspace, processes, data__prompts_per_iteration=16, actor__lr=3e-3, actor__mini_batch_trajectories=32)
    options = {"pruner": "none", "screen": "0:2", "vary": "actor.lr=1e-6,3e-3,2e-6"}
    killed = started(processes, Fault("put", "base-sweep-00|trajectories/advantages/iteration=000003"), **options)
    assert killed.wait() == -signal.SIGKILL
    child = started(processes, **options)
    assert child.wait() == 0, child.text
    assert killed.text.count("is dropped: after an update, the mean score is -") == 2
    assert "is dropped" not in child.text, "it was decided already"
    assert "arm 1 of 1: actor.lr=3e-3" in child.text and "the best arm is base-sweep-00" in child.text
    other = started(processes, **options | {"trials": 2, "vary": "actor.lr=1,2"}, run="other")
    assert other.wait() == 2 and "--screen judges all combinations" in other.text


def test_arms_that_fall_behind_are_stopped(parent: Run, processes: Processes, tmp_path: Path) -> None:
    child = started(processes)
    assert child.wait() == 0, child.text
    arms = [open_run(f"{parent.store.url}-sweep-{number:02d}") for number in range(4)]
    lengths = [arm.state.iteration for arm in arms]
    firsts = [arm.store.validation_scores({3}, None)[3] for arm in arms]
    for number, length in enumerate(lengths):
        before = sorted(firsts[: number + 1], reverse=True)
        goes_on = firsts[number] >= before[max(len(before) // 3 - 1, 0)]  # a third does, or the best of the first two
        assert length == (5 if goes_on else 3), f"{lengths} with {firsts}"
    assert lengths[0] == 5 and lengths[-1] == 3, f"the first rate is by far the best one: {firsts}"
    study_log = tmp_path / "study.log"
    shutil.copy(processes.folder / "runs" / "base-sweep" / "study.log", study_log)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(study_log)))
    study = optuna.load_study(study_name="base-sweep", storage=storage)
    states = [trial.state.name for trial in study.trials]
    assert [state == "COMPLETE" for state in states] == [length == 5 for length in lengths]
    for trial, arm in zip(study.trials, arms, strict=True):
        for step, value in trial.intermediate_values.items():
            assert value == pytest.approx(arm.store.validation_scores({2 + step}, None)[2 + step])


def test_what_does_not_fit_is_said_before_anything_starts(parent: Run, tmp_path: Path) -> None:
    def sweep(**changes: Any) -> Sweep:
        settings: dict[str, Any] = {
            "parent": parent.store.url,
            "name": "tried",
            "iteration": 2,
            "stage": None,
            "vary": {"actor.lr": ("1e-3", "1e-4")},
            "iterations": 5,
            "metric": None,
            "trials": None,
            "pruner": "halving",
        }
        return Sweep(**settings | changes)

    for changes, says in (
        ({"iteration": 9}, "--at 9: the run has iterations 0 to 3"),
        ({"iterations": 2}, "--iterations 2: the arms begin in iteration 2: raise it"),
        ({"vary": {"actor.learning": ("1", "2"), "actor.lr": ("much", "1e-3")}}, "actor.lr"),
        ({"name": "base"}, "there is a run base: choose another name"),
    ):
        with pytest.raises(UserError, match=says):
            begin(sweep(**changes))
    assert not (Path(parent.store.url.removeprefix("file://")).parent / "tried").exists()


@pytest.mark.promise
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["actor.lr"], "write key=a,b,c"),
        (["=1,2"], "write key=a,b,c"),
        (["actor.lr=1e-3"], "two values at least"),
        (["actor.lr=1,1"], "a value is there twice"),
        (["a.b=1,2", "a.b=3,4"], "a.b is there twice"),
    ],
)
def test_malformed_options(options: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_vary(options)


@pytest.mark.promise
def test_values_may_have_commas_in_brackets() -> None:
    assert parse_vary(["rollout.stop=[a,b],[c]", "x={a: 1, b: 2},3"]) == {
        "rollout.stop": ("[a,b]", "[c]"),
        "x": ("{a: 1, b: 2}", "3"),
    }
