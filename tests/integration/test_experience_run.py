"""Runs that learn from earlier trajectories again (`data.replay`)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from infra.execution.driver import check_start
from infra.runs import Run
from rlhf.config import RunConfig
from rlhf.errors import UserError
from tasks.changes import check_open_iteration
from tests import tiny
from tests.history import History
from tests.processes import Fault, Processes


def config_of(workspace: Path, folder: Path, name: str = "replays", **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "run__store": f"file://{folder}/runs",
        "reward__function": "tests.rewards:letters",
        "algorithm__advantage": {"type": "grpo"},
        "data__replay": {"share": 0.5},
        "actor__lr": 1e-2,
        "train__iterations": 4,
    }
    return tiny.config(workspace, run__name=name, **settings | changes)


def check_repeats(rows: pd.DataFrame, earlier: Run, name: str) -> None:
    """Each repeats a trajectory of `earlier`, token by token, with the log-probs that it was drawn with."""
    originals = {(row["iteration"], row["trajectory_id"]): row for row in earlier.trajectories().to_dict("records")}
    for row in rows.to_dict("records"):
        source, iteration, trajectory = row["replayed_from"].split()
        original = originals[int(iteration), trajectory]
        assert source == name
        for column in ("response_ids", "rollout_log_probs", "response_mask"):
            assert list(row[column]) == list(original[column])
        for column in ("response", "prompt", "dataset_row", "policy_version", "finish_reason", "sample"):
            assert row[column] == original[column]


def test_a_share_of_the_prompts_keeps_its_answers(workspace: Path, processes: Processes) -> None:
    config = config_of(workspace, processes.folder)
    child = processes.train(config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    rows = history.run.trajectories()
    again = rows["replayed_from"].notna()
    assert rows[again].groupby("iteration").size().to_dict() == {1: 4, 2: 4, 3: 4}, "2 of 4 prompts, 2 answers each"
    check_repeats(rows[again], history.run, "replays")
    assert set(rows[again]["replayed_from"]).isdisjoint(
        f"replays {row.iteration} {row.trajectory_id}" for row in rows[again].itertuples()
    ), "a repeated trajectory is not repeated from its repetition"
    assert history.run.metrics()["rollout/replayed"].fillna(0).tolist() == [0, 4, 4, 4]
    weights = rows[again]["rollout_is_weights"]
    for row, found in zip(rows[again].to_dict("records"), weights, strict=True):
        expected = np.minimum(np.exp(row["old_log_probs"] - row["rollout_log_probs"]), 2.0)
        np.testing.assert_allclose(found, expected, rtol=1e-4)  # log-probs are stored in float32
    fresh = [row for row in rows[~again].to_dict("records") if row["iteration"] == 3]
    assert {row["policy_version"] for row in fresh} == {3}
    tokens = history.run.metrics()["perf/generated_tokens"]
    assert tokens[3] == sum(sum(row["response_mask"]) for row in fresh), "what is repeated is not generated"


def test_a_kill_draws_the_same_again(workspace: Path, processes: Processes) -> None:
    plain = config_of(workspace, processes.folder, "plain")
    assert processes.train(plain).wait() == 0
    killed = config_of(workspace, processes.folder, "killed")
    fault = Fault("put", "trajectories/generate/iteration=000002/.*part-00001")
    assert processes.train(killed, fault).wait() == -signal.SIGKILL
    resumed = processes.train(killed)
    assert resumed.wait() == 0, resumed.text
    histories = [History.of(config) for config in (plain, killed)]
    for history in histories:
        history.check_sound()
    both = [history.run.trajectories()["replayed_from"].dropna().str.partition(" ")[2] for history in histories]
    assert both[0].tolist() == both[1].tolist() and len(both[0])
    ends = [history.run.state.weights["actor"].digest for history in histories]
    assert ends[0] == ends[1]


def test_another_run_is_drawn_from(workspace: Path, processes: Processes) -> None:
    first = config_of(workspace, processes.folder, "first", data__replay=None, train__iterations=2)
    assert processes.train(first).wait() == 0
    url = f"file://{processes.folder}/runs/first"
    second = config_of(
        workspace,
        processes.folder,
        "second",
        data__replay={"runs": url, "share": 0.25},
        train__iterations=2,
        run__seed=7,
    )
    child = processes.train(second)
    assert child.wait() == 0, child.text
    history = History.of(second)
    history.check_sound()
    rows = history.run.trajectories()
    again = rows[rows["replayed_from"].notna()]
    assert again.groupby("iteration").size().to_dict() == {0: 2, 1: 2}, "from the first iteration on"
    check_repeats(again, History.of(first).run, "first")


def test_a_run_with_other_prompts_is_refused(workspace: Path, processes: Processes) -> None:
    first = config_of(workspace, processes.folder, "first", data__replay=None, train__iterations=1)
    assert processes.train(first).wait() == 0
    other = tiny.prompt_file(processes.folder / "other.parquet", prompts=9)
    url = f"file://{processes.folder}/runs/first"
    config = config_of(workspace, processes.folder, "second", data__replay={"runs": url}, data__train=[str(other)])
    with pytest.raises(UserError, match=r"drew from other prompts than data.train: choose a run with the same prompts"):
        check_start(config, take_over=True, accept_changes=False, check=check_open_iteration)
    config = config.with_values({"data.replay.runs": [f"{url}s"]})
    with pytest.raises(UserError, match=r"there is no run at .*firsts: is it first"):
        check_start(config, take_over=True, accept_changes=False, check=check_open_iteration)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout__mode": "one_step_off"}, "data.replay does not work with rollout.mode one_step_off"),
        (
            {"algorithm__dynamic_sampling": {"max_prompts": 8}},
            "data.replay does not work with algorithm.dynamic_sampling",
        ),
        ({"algorithm__rollout_correction": {"bypass": True}}, "rollout_correction.bypass: false"),
    ],
)
def test_what_does_not_fit_is_said(workspace: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        config_of(workspace, tmp_path, **changes)


def test_replays_are_corrected_by_default(workspace: Path, tmp_path: Path) -> None:
    correction = config_of(workspace, tmp_path).algorithm.rollout_correction
    assert correction is not None and correction.weights is not None
    assert config_of(workspace, tmp_path, data__replay=None).algorithm.rollout_correction is None
