"""Files of NeMo-RL, imported as a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.infra.observe.importing import Imported, import_run
from ratchet.infra.observe.sources.nemo_rl import NeMoRL
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.errors import UserError

CONFIG = """
policy: {model_name: Qwen/Qwen3-4B}
grpo: {num_generations_per_prompt: 2}
logger: {wandb: {api_key: s3cret}}
"""


def sample(idx: int, **fields: Any) -> dict[str, Any]:
    """A line of `train_data_step{N}.jsonl`: a prompt of 5 tokens, a response of 2, and one of padding."""
    row = {
        "content": [["What is 7*8?", "56"]],
        "rewards": [1.0],
        "input_lengths": [7],
        "token_ids": [[151644, 872, 198, 22, 9, 20, 21, 151643]],
        "token_loss_mask": [[0, 0, 0, 0, 0, 1, 1, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * 8],
        "generation_logprobs": [[0.0, 0.0, 0.0, 0.0, 0.0, -0.25, -0.5, 0.0]],
        "prev_logprobs": [[0.0, -1.25, -0.25, -2.0, -0.75, -0.125, -0.375, 0.0]],
    }
    return {**row, **fields, "idx": idx}


def write(file: Path, *rows: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def imported(path: Path, tmp_path: Path) -> Imported:
    return import_run(NeMoRL(path), "nemo", f"file://{tmp_path}/runs")


def run_of(path: Path, tmp_path: Path) -> Run:
    return open_run(imported(path, tmp_path).url)


def test_a_step(tmp_path: Path) -> None:
    multi = sample(
        1,
        content=[["Guess.", "8", "Higher.", "9"]],
        token_ids=[[1, 2, 3, 4, 5, 6, 7, 0]],
        token_loss_mask=[[0, 0, 1, 0, 0, 1, 1, 0]],
        sample_loss_mask=[0.0],
        rewards=[0.0],
        agent_ref=[{"name": "math"}],
    )
    write(tmp_path / "exp_001" / "train_data_step5.jsonl", sample(0), multi)
    one, other = run_of(tmp_path / "exp_001", tmp_path).trajectories().to_dict("records")
    assert (one["prompt"], one["response"], one["score"]) == ("What is 7*8?", "56", 1.0)
    assert list(one["prompt_ids"]) == [151644, 872, 198, 22, 9] and list(one["response_ids"]) == [20, 21]
    assert list(one["rollout_log_probs"]) == [-0.25, -0.5] and list(one["old_log_probs"]) == [-0.125, -0.375]
    assert list(one["advantages"]) == [0.5, 0.5] and list(one["loss_mask"]) == [1, 1]
    assert (other["prompt"], other["response"]) == ("Guess.", "8\nHigher.\n9")
    assert [turn["role"] for turn in other["turns"]] == ["policy", "environment", "policy"]
    assert list(other["response_ids"]) == [3, 4, 5, 6, 7] and list(other["response_mask"]) == [1, 0, 0, 1, 1]
    assert list(other["loss_mask"]) == [0] * 5 and other["source_agent_ref"] == {"name": "math"}


def test_groups_and_model_are_those_of_the_config(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "exp_001" / "train_data_step1.jsonl", *map(sample, range(4)))
    run = run_of(tmp_path, tmp_path / "without")
    assert run.trajectories()["sample"].tolist() == [0, 1, 2, 3]
    (checkpoint := tmp_path / "results" / "step_10").mkdir(parents=True)
    (checkpoint / "config.yaml").write_text(CONFIG)
    run = run_of(tmp_path, tmp_path / "with")
    assert run.trajectories()["sample"].tolist() == [0, 1, 0, 1] and run.config.model.path == "Qwen/Qwen3-4B"
    assert run.config.observed is not None and "s3cret" not in str(run.config.observed)


def test_the_trained_rewards_count(tmp_path: Path) -> None:
    # with dynamic sampling, `rewards` are those before the filter, in another order
    write(tmp_path / "exp_001" / "train_data_step1.jsonl", sample(0, rewards=[0.0], filtered_rewards=[1.0]))
    assert run_of(tmp_path, tmp_path).trajectories()["score"].tolist() == [1.0]


def test_validations(tmp_path: Path) -> None:
    told = [[{"role": "user", "content": "7*8?"}, {"role": "assistant", "content": "56"}]]
    for step, reward in ((0, 0.0), (1, 1.0)):
        row = {"content": told, "rewards": [reward], "idx": 0}
        write(tmp_path / "exp_001" / f"val_data_step{step}.jsonl", row)
    write(tmp_path / "exp_001" / "train_data_step1.jsonl", sample(0))
    run = run_of(tmp_path, tmp_path)
    assert [run.store.validation_metrics(k)["val-core/nemo-rl/reward/mean@1"] for k in (0, 1)] == [0.0, 1.0]


def test_a_resumed_run_goes_on_in_the_next_folder(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write(tmp_path / "logs" / "exp_001" / f"train_data_step{step}.jsonl", sample(0))
    for step in (10, 11):
        write(tmp_path / "logs" / "exp_002" / f"train_data_step{step}.jsonl", sample(0, rewards=[0.5]))
    run = run_of(tmp_path / "logs", tmp_path)
    assert run.metrics()["training/global_step"].tolist() == [1, 2, 10, 11]
    assert run.trajectories()["score"].tolist() == [1, 1, 0.5, 0.5]
    write(tmp_path / "logs" / "exp_003" / "train_data_step1.jsonl", sample(0))
    with pytest.raises(UserError, match=r"exp_003 begins with step 1 again.*name the folder of one"):
        imported(tmp_path / "logs", tmp_path)


def test_a_file_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    write(tmp_path / "exp_001" / "train_data_step1.jsonl", sample(0))
    (cut := tmp_path / "exp_001" / "train_data_step2.jsonl").write_text(json.dumps(sample(0))[:-3])
    assert imported(tmp_path, tmp_path).steps == 1
    write(cut, sample(0))
    again = imported(tmp_path, tmp_path)
    assert (again.steps, again.already) == (1, 1)


def test_other_shapes(tmp_path: Path) -> None:
    alone = sample(0, content=["56"])
    silent = sample(1, token_loss_mask=[[0] * 8], content=[["What is 7*8?"]])
    distilled = {"content": [["What is 7*8?", "56"]], "input_lengths": [7], "idx": 2}
    write(tmp_path / "exp_001" / "train_data_step1.jsonl", alone, silent)
    write(tmp_path / "exp_001" / "train_data_step2.jsonl", distilled)
    rows = run_of(tmp_path, tmp_path).trajectories().to_dict("records")
    assert [row["response"] for row in rows] == ["56", "", "56"]
    assert list(rows[1]["response_ids"]) == [] and len(rows[1]["prompt_ids"]) == 7


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train_data_step1.jsonl: name NeMo-RL's logger.log_dir"):
        NeMoRL(tmp_path)
    file = tmp_path / "exp_001" / "train_data_step1.jsonl"
    for row, says in (
        (sample(0, rewards=[1.0, 2.0]), r"line 1: rewards is a list of 2"),
        (sample(0, token_ids=[["a"]]), r"line 1: token_ids is no list of numbers"),
        (sample(0, rewards=["good"]), r"row 0: score is no float"),
    ):
        write(file, row)
        with pytest.raises(UserError, match=rf"train_data_step1.jsonl.*{says}"):
            imported(tmp_path, tmp_path)
