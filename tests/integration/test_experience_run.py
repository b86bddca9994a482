"""Runs that learn from earlier trajectories again (`data.replay`)."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ratchet.infra.execution.driver import check_start
from ratchet.infra.runs.run import Run
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.tasks.fingerprints import check_open_iteration
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


def expert_file(workspace: Path, folder: Path, *, prompts: int = 12, answer: str = "abc") -> Path:
    """Two answers to each of the first prompts of the data, which the reward likes."""
    rows = pd.read_parquet(workspace / "prompts.parquet").head(prompts).to_dict("records")
    path = folder / "answers.jsonl"
    with path.open("w") as file:
        for row in rows:
            for number in range(2):
                messages = [*map(dict, row["prompt"]), {"role": "assistant", "content": f"{answer}{'dm'[number]}"}]
                file.write(json.dumps({"messages": messages}) + "\n")
    return path


def expert_config(workspace: Path, folder: Path, name: str, **changes: Any) -> RunConfig:
    replay = {"files": [str(folder / "answers.jsonl")], "share": 1.0, "answers": 1}
    return config_of(workspace, folder, name, rollout__n=3, data__replay=replay, **changes)


@pytest.mark.parametrize("experts", ["luffy", "sft"])
def test_answers_of_experts_are_learned_from(workspace: Path, processes: Processes, experts: str) -> None:
    expert_file(workspace, processes.folder)
    coef = {"coef": 1.0} if experts == "sft" else {}
    config = expert_config(workspace, processes.folder, experts, algorithm__experts={"type": experts, **coef})
    child = processes.train(config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    rows = history.run.trajectories()
    by_expert = rows["by_expert"]
    assert rows[by_expert].groupby(["iteration", "prompt_id"]).size().tolist() == [1] * 16, "one of each prompt's three"
    assert rows[by_expert]["dataset_row"].nunique() == 12 and rows["dataset_row"].max() < 12, "in epochs"
    dataset = pd.read_parquet(workspace / "prompts.parquet")
    for row in rows[by_expert].to_dict("records"):
        assert row["response"] in ("abcd", "abcm")
        assert row["messages"] == json.dumps([dict(message) for message in dataset["prompt"][row["dataset_row"]]])
        assert row["replayed_from"].startswith(str(processes.folder / "answers.jsonl, line "))
        assert list(row["rollout_log_probs"]) == [0.0] * 5 and row["score"] == 1.0, "four letters, and the end"
    assert set(rows[by_expert]["response"]) == {"abcd", "abcm"}, "each of an expert's answers is drawn"
    metrics = history.run.metrics()
    assert metrics["rollout/replayed"].tolist() == [4] * 4
    log_probs = metrics["experts/log_probs/mean"].tolist()
    assert log_probs[-1] > log_probs[0] + 0.5, f"the policy learns what experts write: {log_probs}"
    assert (
        metrics["perf/generated_tokens"][0]
        == rows[(rows["iteration"] == 0) & ~by_expert]["response_ids"].map(len).sum()
    )


def test_a_kill_draws_the_same_answers_of_experts(workspace: Path, processes: Processes) -> None:
    expert_file(workspace, processes.folder)
    plain = expert_config(workspace, processes.folder, "plain", train__iterations=2)
    assert processes.train(plain).wait() == 0
    killed = expert_config(workspace, processes.folder, "killed", train__iterations=2)
    fault = Fault("put", "trajectories/generate/iteration=000001/.*part-00001")
    assert processes.train(killed, fault).wait() == -signal.SIGKILL
    resumed = processes.train(killed)
    assert resumed.wait() == 0, resumed.text
    histories = [History.of(config) for config in (plain, killed)]
    for history in histories:
        history.check_sound()
    assert histories[0].run.state.weights["actor"].digest == histories[1].run.state.weights["actor"].digest


def test_other_answers_of_experts_in_an_open_iteration_are_refused(workspace: Path, processes: Processes) -> None:
    path = expert_file(workspace, processes.folder)
    config = expert_config(workspace, processes.folder, "changed", train__iterations=1)
    fault = Fault("put", "trajectories/score/iteration=000000/.*part-00001")
    assert processes.train(config, fault).wait() == -signal.SIGKILL
    expert_file(workspace, processes.folder, answer="abd")
    with pytest.raises(UserError, match=f"the answers in data.replay.files .{path}. changed"):
        check_start(config, take_over=True, accept_changes=False, check=check_open_iteration)
    path.write_text(json.dumps({"prompt": "Who?", "response": "I"}) + "\n")
    with pytest.raises(
        UserError, match=r"no answer is left: of 1, 0 are longer .* and 1 are to prompts that data.train"
    ):
        check_start(config, take_over=True, accept_changes=False, check=check_open_iteration)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data__replay": {"files": ["a.jsonl"], "runs": ["self"]}}, "runs and files are both set: remove one"),
        ({"data__replay": {"files": ["a.jsonl"], "answers": 2}}, "no answer is left to the policy: raise rollout.n"),
        (
            {"data__replay": {"files": ["a.jsonl"]}, "algorithm__experts": "sft"},
            "compares the policy's own answers with each other, and there is 1 per prompt: raise rollout.n",
        ),
        (
            {"data__replay": {"files": ["a.jsonl"]}, "algorithm__experts": "sft", "algorithm__advantage": "gae"},
            "no returns that a critic could learn: set algorithm.experts=luffy",
        ),
    ],
)
def test_what_does_not_fit_experts_is_said(workspace: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        config_of(workspace, tmp_path, **changes)
