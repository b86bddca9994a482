"""The whole recipe: supervised steps, a reward model from preferences, and PPO against it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes
from tests.tiers import sampled

PAIRS = 96


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Letters are preferred to digits."""
    folder = tmp_path_factory.mktemp("preferences")
    draw = np.random.default_rng(5)

    def response(alphabet: str) -> str:
        return "".join(draw.choice(list(alphabet), size=draw.integers(2, 9)))

    rows = [
        {"prompt": f"Say {number}", "chosen": response("abcdefghij"), "rejected": response("0123456789")}
        for number in range(PAIRS + 16)
    ]
    pq.write_table(pa.Table.from_pylist(rows[:PAIRS]), folder / "train.parquet")
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows[PAIRS:])))
    return folder


def fit(processes: Processes, workspace: Path, preferences: Path, name: str, *more: object, fault: Any = None) -> Child:
    return processes.cli(
        *("reward-model", "--model", workspace / "model", "--data", preferences / "train.parquet"),
        *("--validation", preferences / "test.jsonl", "--output", processes.folder / name),
        *("--store", f"file://{processes.folder}/runs", "--batch-pairs", 16, "--lr", 0.01, "--epochs", 3),
        *("checkpoint_steps=4", *more),
        faults=() if fault is None else (fault,),
    )


def test_from_preferences_to_ppo(workspace: Path, preferences: Path, processes: Processes) -> None:
    made = fit(processes, workspace, preferences, "judge")
    assert made.wait() == 0, made.text
    share = re.search(r"([\d.]+)% of the held-out pairs", made.text)
    assert share is not None, made.text
    assert float(share[1]) > 90
    assert "continues without Prefect" not in made.text
    card = (processes.folder / "judge" / "README.md").read_text()
    assert "training a reward model on preferences" in card and "| `val/accuracy` | " in card
    again = fit(processes, workspace, preferences, "judge")
    assert again.wait() == 0, again.text
    assert not again.engine_calls, "it is done: nothing is computed"
    metrics = open_run(f"file://{processes.folder}/runs/judge").metrics()
    assert metrics["step"].tolist() == [4, 8, 12, 16, 18]
    assert metrics["reward/loss"].iloc[0] > 2 * metrics["reward/loss"].iloc[-1]

    # died in the third round, after the state was written and before the record
    killed = fit(
        processes, workspace, preferences, "killed", fault=Fault("create", '{"kind":"close","iteration":2', "before")
    )
    assert killed.wait() == -signal.SIGKILL, killed.text
    other = fit(processes, workspace, preferences, "killed", "lr=0.02")
    assert other.wait() == 2, other.text
    assert "was started with different settings (lr 0.01 -> 0.02)" in other.text
    resumed = fit(processes, workspace, preferences, "killed")
    assert resumed.wait() == 0, resumed.text
    whole, resumed = (load_file(processes.folder / name / "model.safetensors") for name in ("judge", "killed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    seen = pd.read_parquet(processes.folder / "runs" / "killed" / "metrics")
    assert sorted(seen["step"]) == [4, 8, 12, 16, 18], "what the dead driver wrote and never committed is gone"
    state = open_run(f"file://{processes.folder}/runs/killed").state
    assert list(state.snapshots) == [5], "the newest one is enough"

    judge = processes.folder / "judge"
    config = tiny.config(
        workspace,
        run__name="ppo",
        run__store=f"file://{processes.folder}/runs",
        reward={"model": {"path": str(judge), "dtype": "float32", "weight": 0.5}},
        critic__model={"path": str(judge), "dtype": "float32"},
        validation={"data": str(workspace / "held_out.parquet"), "before_train": False},
        train__iterations=2,
        actor__lr=1e-2,
    )
    killed = train(processes, config, Fault("create", '{"kind":"shard","iteration":0,"stage":"reward_model"'))
    assert killed.wait() == -signal.SIGKILL, killed.text
    resumed = train(processes, config)
    assert resumed.wait() == 0, resumed.text
    assert ("reward_model", 0, 0) not in resumed.computed_shards
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    np.testing.assert_allclose(frame["score"], 0.5 * frame["model_score"], rtol=1e-6)
    assert [parts["model"] for parts in frame["reward_parts"]] == frame["model_score"].tolist()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    for row in frame.itertuples():
        prompt = "\n".join(message["content"] for message in json.loads(row.messages))
        ids = tokenizer(prompt + row.response + "<eos>", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert row.model_score == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-4)
    assert frame["values"].map(max).max() > 0, "the critic knows something from the start"
    held_out = history.run.validation()
    assert held_out["score"].nunique() > 1
    assert processes.cli("reproduce", "ppo", "--store", config.run.store, "--iteration", 1).wait() == 0

    # another weight keeps what the model said, another model does not
    store = ("--store", config.run.store)
    fork = processes.cli("fork", "ppo", "--at", "1:score", "--run", "f", *store, "reward.model.weight=1")
    assert fork.wait() == 0, fork.text
    resumed = processes.cli("resume", "f", *store)
    assert resumed.wait() == 0, resumed.text
    assert ("score", 1, 0) in resumed.computed_shards
    assert ("reward_model", 1, 0) not in resumed.computed_shards
    other = tiny.reward_model_folder(processes.folder / "other", workspace / "model")
    refused = processes.cli("fork", "ppo", "--at", "1:score", "--run", "g", *store, f"reward.model.path={other}")
    assert refused.wait() == 2
    assert (
        "reward_model of iteration 1 is committed, but what it depends on has changed (the files of reward.model ("
        in refused.text
    )
    refused = processes.cli(
        "fork", "ppo", "--at", "1:generate", "--run", "g", *store, f"reward.model={workspace}/model"
    )
    assert refused.wait() == 2
    assert "lacks score.weight: it is not a reward model of kind outcome" in refused.text


def train(processes: Processes, config: RunConfig, *faults: Fault) -> Child:
    path = processes.folder / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return processes.cli("train", path, faults=faults)


def test_a_process_reward_besides_a_rule_with_dynamic_sampling(workspace: Path, processes: Processes) -> None:
    judge = tiny.reward_model_folder(processes.folder / "judge", workspace / "model", process=True, labels=2)
    config = tiny.config(
        workspace,
        run__name="process",
        run__store=f"file://{processes.folder}/runs",
        rollout__max_response_tokens=24,
        reward={
            "function": "tests.rewards_of_responses:fails_on_some",
            "timeout_s": 1.0,
            "on_error": "zero",
            "model": {"path": str(judge), "dtype": "float32", "kind": "process", "step_separator": "e", "weight": 2.0},
        },
        actor__offload_when_idle=True,
        algorithm={"advantage": "grpo", "dynamic_sampling": {"max_prompts": 8}},
        train__iterations=1,
    )
    child = train(processes, config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    frame, tokenizer = history.run.trajectories(), AutoTokenizer.from_pretrained(judge)
    assert 0 < frame["reward_error"].notna().sum() < len(frame)
    for row in frame.itertuples():
        if isinstance(row.reward_error, str):
            assert (row.score, sum(row.token_scores), sum(row.token_rewards)) == (0, 0, 0)
            continue
        assert row.score == pytest.approx(row.reward_parts["rule"] + 2 * row.model_score, abs=1e-5)
        assert sum(row.token_scores) == pytest.approx(2 * row.model_score, abs=1e-5)
        written = {at: tokenizer.decode([token]) for at, token in enumerate(row.response_ids) if token > 1}  # no end
        assert "".join(written.values()) == row.response
        ends = {at for at, letter in written.items() if letter == "e"} | {*[*written][-1:]}
        assert set(np.flatnonzero(row.token_scores)) <= ends
        assert sum(row.token_rewards) == pytest.approx(row.score, abs=1e-5)
    assert frame["token_scores"].map(np.count_nonzero).max() > 1


@sampled(3)
@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "line 1 has no rejected: preferences are rows of prompt, chosen and rejected; there are",
        ),
        ({"chosen": "b", "rejected": "c"}, "line 1: chosen should be a text after a prompt, or end with a message"),
        ({"prompt": "a", "chosen": "b" * 3000, "rejected": "c"}, "up to max_tokens 2048, has no examples"),
    ],
)
def test_wrong_pairs_are_named(row: dict[str, str], says: str, workspace: Path, processes: Processes) -> None:
    data = processes.folder / "pairs.jsonl"
    data.write_text(json.dumps(row) + "\n")
    child = processes.cli(
        *("reward-model", "--model", workspace / "model", "--data", data, "--output", processes.folder / "judge"),
        *("--store", f"file://{processes.folder}/runs"),
    )
    assert child.wait() == 2
    assert says in child.text
    assert "Traceback" not in child.text
