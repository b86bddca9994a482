"""Runs with the rewards and the data that people bring."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes
from tests.tiers import sampled

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k"


def train(processes: Processes, config: RunConfig, *faults: Fault) -> Child:
    path = processes.folder / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return processes.cli("train", path, faults=faults)


def test_gsm8k_from_its_own_files(workspace: Path, processes: Processes) -> None:
    """Random weights solve nothing: what is tried is the way from JSON lines to metrics."""
    out, source = processes.folder / "gsm8k", processes.folder / "source"
    shutil.copytree(GSM8K, source)
    for split in ("train", "test"):  # as in the dataset's own repository
        shutil.copyfile(GSM8K / f"{split}.jsonl", source / f"{split}_socratic.jsonl")
    made = processes.cli("data", "gsm8k", out, "--source", source)
    assert made.wait() == 0, made.text
    assert "300 prompts" in made.text
    assert "100 prompts" in made.text
    config = tiny.config(
        workspace,
        run__name="gsm8k",
        run__store=f"file://{processes.folder}/runs",
        data={
            "train": [str(out / "train.parquet")],
            "prompts_per_iteration": 4,
            "max_prompt_tokens": 300,
            "truncation": "drop",
            "system_prompt": "You count.",
        },
        reward={"function": {"auto": 1.0, "length": 0.1}, "options": {"length": {"wanted_characters": 1}}},
        validation={"data": str(out / "test.parquet"), "n": 2, "before_train": False},
        rollout__prompts_per_shard=50,
        train__iterations=1,
    )
    child = train(processes, config)
    assert child.wait() == 0, child.text
    assert "of 300 prompts are longer than data.max_prompt_tokens: left out" in child.text
    frame = History.of(config).run.trajectories()
    assert frame["prompt"].str.startswith("You count.\n").all()
    assert frame["prompt_ids"].map(len).max() <= 300
    parts = frame["reward_parts"].tolist()
    assert all({"auto", "auto/format", "length"} <= each.keys() for each in parts)
    assert (frame["score"] <= 0).all()
    shown = processes.cli(
        *("show", "gsm8k", "--store", config.run.store, "--columns", "score,reward_parts", "--format", "json"),
        *("--where", "reward_parts['length'] < 0 and reward_parts['auto'] = 0", "--limit", 1),
    )
    assert shown.wait() == 0, shown.text
    [row] = map(json.loads, shown.text.splitlines())
    assert row["score"] == pytest.approx(0.1 * row["reward_parts"]["length"], abs=1e-6)
    metrics = History.of(config).run.validation()
    assert set(metrics["data_source"]) == {"openai/gsm8k"}
    assert (metrics["iteration"] == 1).all(), "not before the training"
    store = History.of(config).run.store
    found = store.manifests(1)["validate"].metrics
    expected = {f"val-core/openai/gsm8k/reward/{name}@2" for name in ("mean", "maj", "best")}
    expected.add("val-aux/openai/gsm8k/reward/stderr@2")
    assert set(found) == expected, "of a sum of rewards, no score means solved"
    answered = processes.cli("evaluate", "gsm8k", "--store", config.run.store, "--data", out / "test.parquet", "--n", 2)
    assert answered.wait() == 0, answered.text
    assert "best@2" in answered.text


def test_a_reward_that_cannot_score_the_prompts_is_found_before_anything_starts(
    workspace: Path, processes: Processes
) -> None:
    """Rows of GSM8K under the reward of another game."""
    out, store = processes.folder / "data", f"file://{processes.folder}/runs"
    made = processes.cli("data", "gsm8k", out, "--source", GSM8K)
    assert made.wait() == 0, made.text
    config = tiny.config(
        workspace,
        run__name="gsm8k",
        run__store=store,
        data__train=[str(out / "train.parquet")],
        data__truncation="drop",
        reward__function="countdown",
    )
    refused = train(processes, config)
    assert refused.wait() == 2, refused.text
    [line] = [line for line in refused.text.splitlines() if line.startswith("error: ")]
    assert f"{out}/train.parquet, row 1: reward.function countdown cannot score an answer to this prompt: " in line
    assert "ground_truth must be an object with target and numbers, not 72" in line
    assert line.endswith("; openai/gsm8k has a built-in reward: set reward.function: gsm8k")
    assert "starting Prefect" not in refused.text
    assert not (processes.folder / "runs").exists()

    kinder = config.with_values({"reward.on_error": "zero", "train.iterations": 1})
    noted = train(processes, kinder)
    assert noted.wait() == 1, noted.text
    assert "reward.function countdown cannot score an answer" in noted.text
    [line] = [line for line in noted.text.splitlines() if line.startswith("error: ")]
    assert "more than reward.max_error_share 0.5: nothing of the shard is committed" in line
    assert re.search(r"The first error: it000000-\S+: the reward raised .*ground_truth must be an object", line)
    allowed = train(processes, kinder.with_values({"reward.max_error_share": 1}))
    assert allowed.wait() == 0, "what the message says to do works"
    counted = "iteration 0: the reward failed for 8 trajectories; the first: it000000-"
    assert counted in allowed.text
    assert "reward/errors 8" in allowed.text, "in the line of the iteration"
    fixed = train(processes, config.with_values({"run.name": "fixed", "reward.function": "gsm8k"}))
    assert fixed.wait() == 0, "what the message says to do works"


def test_a_failed_reward_is_recorded_and_the_policy_decides(workspace: Path, processes: Processes) -> None:
    for policy, code in (("fail", 1), ("zero", 0), ("drop", 0)):
        config = tiny.config(
            workspace,
            run__name=policy,
            run__store=f"file://{processes.folder}/runs",
            reward={
                "function": "tests.rewards_of_responses:fails_on_some",
                "timeout_s": 1.0,
                "on_error": policy,
                "max_error_share": 1.0,  # a shard has four responses
            },
            validation={"data": str(workspace / "prompts.parquet"), "n": 2, "before_train": False},
            train__iterations=2,
        )
        child = train(processes, config)
        assert child.wait() == code, child.text
        if policy == "fail":
            assert "the reward raised ValueError: not this one" in child.text.splitlines()[-1]
            continue
        history = History.of(config)
        history.check_sound()
        frame = history.run.trajectories(columns=["response", "score", "reward_error"])
        failed = frame["reward_error"].notna()
        assert 0 < failed.sum() < len(frame)
        assert (frame["score"][failed] == 0).all()
        assert frame["reward_error"][failed].str.contains("not this one|took longer").all()
        learned = history.run.trajectories(columns=["advantages"])
        assert len(learned) == (len(frame) if policy == "zero" else (~failed).sum())
        metrics = history.run.metrics()
        assert metrics["reward/errors"].sum() == failed.sum()
        kept = frame if policy == "zero" else frame[~failed]
        assert metrics["reward/mean"].mul(
            8 if policy == "zero" else (~failed).groupby(frame.index // 8).sum()
        ).sum() == (pytest.approx(kept["score"].sum(), rel=1e-5))
        held_out = history.run.validation()
        failed = held_out["reward_error"].notna()
        assert 0 < failed.sum() < len(held_out)
        found = history.run.store.manifests(2)["validate"].metrics
        assert found["val/reward_errors"] == failed.sum()
        kept = held_out if policy == "zero" else held_out[~failed]
        assert found["val-core/countdown/reward/mean@2"] == pytest.approx(kept["score"].mean(), rel=1e-5)
        table = processes.cli("evaluate", policy, "--store", config.run.store, "--temperature", 1, "validation.n=1")
        assert table.wait() == 0, table.text
        counted = "count as 0" if policy == "zero" else "left out"
        assert re.search(rf"[0-9]+ rewards failed, and {counted}:", " ".join(table.text.split()))


def test_what_is_left_without_a_comparison_is_left_out(workspace: Path, processes: Processes) -> None:
    """A prompt with one good trajectory under GRPO, and one whose greedy answer has no reward under ReMax."""
    learned = {}
    for estimator in ("grpo", "remax"):
        config = tiny.config(
            workspace,
            run__name=estimator,
            run__store=f"file://{processes.folder}/runs",
            reward={
                "function": "tests.rewards_of_responses:fails_on_a_third",
                "on_error": "drop",
                "max_error_share": 1.0,
            },
            algorithm={"advantage": estimator},
            data__prompts_per_iteration=8,
            train__iterations=1,
        )
        child = train(processes, config)
        assert child.wait() == 0, child.text
        history = History.of(config)
        history.check_sound()
        learned[estimator] = history.run.trajectories()
        assert history.run.metrics()["actor/grad_norm"].item() > 0
    compared = learned["grpo"]
    alone = compared.groupby("prompt_id")["prompt_id"].transform("size") == 1
    assert 0 < alone.sum() < len(compared)
    against = learned["remax"]
    failed = against["greedy_error"].notna()
    assert 0 < failed.sum() < len(against)
    assert against["greedy_score"].isna().equals(failed)
    assert against["greedy_error"][failed].str.contains("not this one").all()
    for frame, left_out in ((compared, alone), (against, failed)):
        for name in ("advantages", "loss_mask"):
            assert (frame[name].map(lambda row: np.abs(row).max()) == 0)[left_out].all()
        assert (frame["loss_mask"].map(min) == 1)[~left_out].all()

    config = config.with_values({"run.name": "stops", "reward.on_error": "fail"})
    stopped = train(processes, config)
    assert stopped.wait() == 1, stopped.text
    assert "nothing of the shard is committed" in stopped.text


TINY_ZERO = """
def compute_score(solution_str, ground_truth, method="strict", extra_info=None, data_source=""):
    assert data_source == "countdown" and extra_info.get("index") is None
    return ground_truth["target"] * ground_truth["numbers"][0]
"""


def test_functions_and_prompts_as_others_have_them(workspace: Path, processes: Processes) -> None:
    """By name, with structures, and without extra_info; a file alone, and prompts by their URL."""
    (processes.folder / "tiny_zero.py").write_text(TINY_ZERO)
    rows = [
        {
            "data_source": "countdown",
            "prompt": f"{target}?",
            "reward_model": {"style": "rule", "ground_truth": {"target": target, "numbers": [2, target]}},
        }
        for target in range(8)
    ]
    path = processes.folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = tiny.config(
        workspace,
        run__name="verl",
        run__store=f"file://{processes.folder}/runs",
        data__train=[f"file://{path}"],
        reward__function=str(processes.folder / "tiny_zero.py"),
        train__iterations=1,
    )
    child = train(processes, config)
    assert child.wait() == 0, child.text
    frame = History.of(config).run.trajectories()
    assert frame["ground_truth_is_json"].all()
    assert frame["score"].tolist() == [2 * json.loads(truth)["target"] for truth in frame["ground_truth"]]
    assert frame["score"].nunique() > 1

    path.write_text(path.read_text().replace('"ground_truth": {"target": 3,', '"truth": {"target": 3,'))
    refused = train(processes, config.with_values({"run.name": "missing", "reward.function": "countdown"}))
    assert refused.wait() == 2, refused.text
    assert "line 4: reward.function countdown needs reward_model.ground_truth (or a column" in refused.text


SEES = """
from ratchet.rlhf.environments import Observation

class Picky:
    stop = ()

    def reset(self, messages, ground_truth, extra_info):
        self.turns = 0

    def step(self, turn):
        self.turns += 1
        if turn[:1] < "d":
            raise ValueError("not this one")
        return Observation("XY" if self.turns == 1 else None)

async def alone(data_source, solution_str, ground_truth, turns, metadata, extra_info=None):
    assert "".join(turn["content"] for turn in turns) == solution_str
    asked = ("sample", "iteration", "policy_version", "response_length")
    parts = {name: metadata[name] for name in asked if metadata[name] is not None}
    reason = ["turns", "stop", "length"].index(metadata["finish_reason"])
    return {"score": 0.0, "turns": len(turns), "reason": reason} | parts

def compute_scores(group):
    [prompt] = {trajectory.metadata["prompt_id"] for trajectory in group}
    ids = [trajectory.metadata["trajectory_id"] for trajectory in group]
    assert all(name.startswith(prompt) for name in ids) and len(set(ids)) == len(ids)
    return [{"score": len(group), "rank": rank} for rank in range(len(group))]
"""


def test_rewards_that_see_the_group_the_turns_and_where_they_come_from(workspace: Path, processes: Processes) -> None:
    """What an environment's failure ended is in no group."""
    file = processes.folder / "sees.py"
    file.write_text(SEES)
    config = tiny.config(
        workspace,
        run__name="sees",
        run__store=f"file://{processes.folder}/runs",
        rollout={
            "n": 4,
            "max_response_tokens": 12,
            "prompts_per_shard": 2,
            "environment": {"name": f"{file}:Picky", "max_turns": 2, "on_error": "drop", "max_error_share": 1.0},
        },
        reward={"function": {str(file): 1.0, f"{file}:alone": 1.0}},
        train__iterations=2,
    )
    child = train(processes, config)
    assert child.wait() == 0, child.text
    run = History.of(config).run
    frame = run.trajectories(columns=["prompt_id", "sample", "turns", "finish_reason", "response_mask", "score"])
    frame = frame.join(run.trajectories(columns=["reward_parts", "rollout_error", "policy_version"]), rsuffix="_again")
    complete = frame["rollout_error"].isna()
    assert 0 < complete.sum() < len(frame)
    assert (frame["score"][~complete] == 0).all()
    sizes = complete.groupby(frame["prompt_id"]).transform("sum")
    assert sizes[complete].nunique() > 1
    for index, row in frame[complete].iterrows():
        parts = row["reward_parts"]
        assert row["score"] == parts[str(file)] == sizes[index]
        alone = {name.removeprefix(f"{file}:alone/"): part for name, part in parts.items() if ":alone/" in name}
        assert alone == {
            "turns": len(row["turns"]),
            "reason": ["turns", "stop", "length"].index(row["finish_reason"]),
            "sample": row["sample"],
            "iteration": int(row["prompt_id"][2:8]),
            "policy_version": row["policy_version"],
            "response_length": row["response_mask"].sum(),
        }
    assert frame["reward_parts"][complete].map(lambda parts: parts[f"{file}/rank"]).nunique() > 1


def test_a_greedy_answer_is_scored_as_one(workspace: Path, processes: Processes) -> None:
    file = processes.folder / "greedy.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, metadata, extra_info=None):\n"
        "    return float(metadata['trajectory_id'] == metadata['prompt_id'] + '-greedy')\n"
    )
    config = tiny.config(
        workspace,
        run__name="greedy",
        run__store=f"file://{processes.folder}/runs",
        reward__function=str(file),
        algorithm={"advantage": "remax"},
        train__iterations=1,
    )
    child = train(processes, config)
    assert child.wait() == 0, child.text
    frame = History.of(config).run.trajectories(columns=["score", "greedy_score"])
    assert (frame["score"] == 0).all()
    assert (frame["greedy_score"] == 1).all()


def test_another_policy_begins_where_the_first_one_led(workspace: Path, processes: Processes) -> None:
    """To drop is to select: what has not read the selection is another stage."""
    store = f"file://{processes.folder}/runs"
    reward = {"function": "tests.rewards:letters"}
    config = tiny.config(workspace, run__name="once", run__store=store, reward=reward, train__iterations=1)
    never_scored = Fault("put", "trajectories/score/", "before", delay_s=600)
    died = Fault("create", '{"kind":"stage","iteration":0,"stage":"old_log_probs"')
    killed = train(processes, config, never_scored, died)
    assert killed.wait() == -signal.SIGKILL, killed.text
    records = History.of(config).records
    drops = config.with_values({"reward.on_error": "drop"})
    refused = train(processes, drops)
    assert refused.wait() == 2, refused.text
    assert (
        "old_log_probs of iteration 0 is committed, but what it depends on has changed (it would read" in refused.text
    )
    assert "select" in refused.text
    assert "`ratchet fork once --at 0:old_log_probs --run NEW`" in refused.text
    assert History.of(config).records == records, "it is refused before it has done anything"
    point = ("--at", "0:old_log_probs", "--run", "other", "--store", store)
    forked = processes.cli("fork", "once", *point, "reward.on_error=drop")
    assert forked.wait() == 0, forked.text
    resumed = processes.cli("resume", "other", "--store", store)
    assert resumed.wait() == 0, resumed.text
    asked = (
        'select count(*) as n, max(t.group_spread) > 0 as some from trajectories t join "select" using (trajectory_id)'
    )
    answer = processes.cli("query", "other", asked, "--store", store, "--format", "json")
    assert answer.wait() == 0, answer.text
    assert json.loads(answer.text) == {"n": 8, "some": True}
    back = ("--at", "0:score", "--run", "back", "--store", store)
    forked = processes.cli("fork", "other", *back, "reward.on_error=fail")
    assert forked.wait() == 0, forked.text
    resumed = processes.cli("resume", "back", "--store", store)
    assert resumed.wait() == 0, resumed.text
    finished = train(processes, config)
    assert finished.wait() == 0, finished.text
    once, again = (History.of(config.with_values({"run.name": name})).results for name in ("once", "back"))
    assert once["weights"] == again["weights"]


@sampled(4)
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "Why?"}, "line 2: reward.function auto has no built-in reward for data_source prompts: name your"),
        ({"data_source": "s"}, "line 2: prompt is missing; there are data_source"),
        ({"data_source": "s", "prompt": []}, "line 2: prompt is an empty list"),
        ('{"data_source": "s", ', "line 2 is not JSON"),
    ],
)
def test_a_wrong_prompt_is_named(row: Any, says: str, workspace: Path, processes: Processes) -> None:
    path = processes.folder / "prompts.jsonl"
    good = {"data_source": "gsm8k", "prompt": "Why?", "reward_model": {"ground_truth": "1"}}
    path.write_text(f"{json.dumps(good)}\n{row if isinstance(row, str) else json.dumps(row)}\n")
    child = train(processes, tiny.config(workspace, data__train=[str(path)], run__store=f"file://{processes.folder}"))
    assert child.wait() == 2
    assert f"error: {path}, {says}" in child.text
    assert "Traceback" not in child.text
