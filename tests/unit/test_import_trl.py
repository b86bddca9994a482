"""Completions and metrics of TRL as a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import ratchet
from ratchet.flows.commands.app import app
from ratchet.infra.observe.importing import Imported, import_run
from ratchet.infra.observe.sources.trl import TRL
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.extras import needs


def row(prompt: Any, completion: Any, advantage: float, **columns: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, **columns, "advantage": advantage}


def group(step: int, prompt: str = "7*8?", **columns: Any) -> list[dict[str, Any]]:
    """The two completions of a step, whose texts differ between steps."""
    return [
        row(prompt, f"56 at {step}", 0.7, right=1.0, short=0.5, **columns),
        row(prompt, f"54 at {step}", -0.7, right=0.0, short=1.0, **columns),
    ]


def write(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    file = folder / "completions" / f"completions_{step:05d}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{"step": step, **one} for one in rows]), file)
    return file


def entry(step: int, right: float = 0.5, short: float = 0.75, weight: float = 1.0, **metrics: Any) -> dict[str, Any]:
    return {
        "rewards/right/mean": right,
        "rewards/short/mean": short,
        "reward": right + weight * short,
        "step": step,
        "learning_rate": step * 1e-6,
        "loss": 0.25,
        **metrics,
    }


def checkpoint(folder: Path, *log: Mapping[str, Any]) -> None:
    step = max(one["step"] for one in log)
    (folder / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
    state = {"global_step": step, "max_steps": 9, "log_history": log, "best_metric": None}
    (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state, indent=2))


def imported(tmp_path: Path, folder: Path) -> Imported:
    return import_run(TRL(folder), "run", f"file://{tmp_path}/runs")


def opened(tmp_path: Path) -> ratchet.Run:
    return ratchet.open_run(f"file://{tmp_path}/runs/run")


def test_texts(tmp_path: Path) -> None:
    for step in (9, 10):
        write(tmp_path / "out", step, group(step, parity=step % 2, remark="r"))
    checkpoint(tmp_path / "out", entry(9, entropy=1.5, kl=0.1, num_tokens=7.0, tools=None), entry(10))
    assert imported(tmp_path, tmp_path / "out" / "completions").trajectories == 4
    rows = opened(tmp_path).trajectories()
    assert list(rows["response"]) == ["56 at 9", "54 at 9", "56 at 10", "54 at 10"]
    assert set(rows["prompt"]) == {"7*8?"} and set(rows["prompt_id"][:2]) == {"it000000-p00000"}
    assert list(rows["score"]) == [1.5, 1.0, 1.5, 1.0]
    assert rows["reward_parts"][0] == {"right": 1.0, "short": 0.5}
    assert [value[0] for value in rows["advantages"][:2]] == pytest.approx([0.7, -0.7])
    assert list(rows["source_parity"]) == [1, 1, 0, 0], "the log names no such reward"
    assert set(rows["source_remark"]) == {"r"}
    metrics = opened(tmp_path).metrics()
    assert list(metrics["training/global_step"]) == [9, 10]
    assert metrics["reward/mean"][0] == 1.25 and metrics["reward/short/mean"][0] == 0.75
    assert (
        metrics["actor/lr"][1] == pytest.approx(1e-5)
        and metrics["actor/entropy"][0] == 1.5
        and metrics["actor/kl_loss"][0] == 0.1
    )
    assert metrics["trl/num_tokens"][0] == 7.0
    assert metrics["trl/loss"][0] == 0.25, "it has the KL as another term"
    assert metrics["actor/pg_loss"][1] == 0.25


def test_new_steps_come_with_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in (1, 2):
        write(out, step, group(step))
    checkpoint(out, entry(1))
    assert imported(tmp_path, out).steps == 1
    whole = write(out, 3, group(3)).read_bytes()
    (out / "completions" / "completions_00003.parquet").write_bytes(whole[:-9])
    checkpoint(out, entry(1), entry(2), entry(3))
    done = imported(tmp_path, out)
    assert (done.steps, done.already) == (1, 1), "the last file has no end yet"
    (out / "checkpoint-4").mkdir()
    (out / "checkpoint-4" / "trainer_state.json").write_text('{\n  "global_step": 4,\n')
    (out / "completions" / "completions_00003.parquet").write_bytes(whole)
    assert imported(tmp_path, out).steps == 1
    assert list(opened(tmp_path).trajectories()["response"]) == [
        f"{text} at {step}" for step in (1, 2, 3) for text in ("56", "54")
    ]
    assert imported(tmp_path, out).steps == 0


def test_completions_that_a_file_repeats_count_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step, of in ((1, 1), (2, 1), (3, 3)):  # two updates for each generation
        write(out, step, group(of))
    checkpoint(out, entry(1), entry(2), entry(3))
    imported(tmp_path, out)
    rows = opened(tmp_path).trajectories()
    assert list(rows["iteration"]) == [0, 0, 2, 2]
    assert list(opened(tmp_path).metrics()["actor/lr"]) == pytest.approx([1e-6, 2e-6, 3e-6])
    assert imported(tmp_path, out).already == 3


def test_an_evaluation_becomes_a_validation(tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluation = {"eval_reward": 1.5, "eval_runtime": 0.1, "eval_samples_per_second": 9.99}
    write(out, 1, [*group(1), *group(1, "9*9?")])
    # room for four: one prompt with two answers was evaluated after the last group of step 2, then two after step 3
    write(out, 2, [*group(2), *group(0, "1+1?")])
    write(out, 3, [*group(0, "1+1?"), *group(0, "2+2?")])
    checkpoint(
        out,
        *(entry(1), entry(2), {**evaluation, "step": 2}),
        *(entry(3), {**evaluation, "step": 3, "eval_runtime": 0.2}),
    )
    done = imported(tmp_path, out)
    assert (done.steps, done.validations) == (3, 2)
    rows = opened(tmp_path).trajectories()
    assert list(rows["iteration"]) == [0, 0, 0, 0, 1, 1]
    assert list(rows["prompt"][4:]) == ["7*8?", "7*8?"]
    answers = opened(tmp_path).validation()
    assert list(answers["iteration"]) == [2, 2, 3, 3, 3, 3]
    assert list(answers["prompt"]) == ["1+1?", "1+1?", "1+1?", "1+1?", "2+2?", "2+2?"]
    assert list(answers["score"][:2]) == [1.5, 1.0] and answers["source_eval_advantage"][0] == 0.7
    assert opened(tmp_path).metrics()["trl/eval_reward"][1] == 1.5
    again = imported(tmp_path, out)
    assert (again.steps, again.validations, again.already) == (0, 0, 5)


def test_weights_of_rewards_are_those_of_the_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, 1, group(1))
    checkpoint(out, *(entry(step, 1 / step, step % 2, weight=0.25) for step in (1, 2, 3, 4)))
    imported(tmp_path, out)
    assert list(opened(tmp_path).trajectories()["score"]) == [1.125, 0.25]


def test_what_no_function_scored_has_no_score(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, 1, [row("a", "b", 0.0, right=1.0, short=None), row("a", "c", 0.0, right=None, short=None)])
    # means that would give another weight, if they were those of all completions
    checkpoint(out, *(entry(step, 1.0 / step, 1.0, weight=0.25) for step in (1, 2, 3, 4)))
    imported(tmp_path, out)
    rows = opened(tmp_path).trajectories()
    assert rows["score"][0] == 1.0 and rows["score"].isna()[1]
    assert rows["reward_error"][1] == "no reward function scored it"


def test_messages_and_calls_of_tools(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    answer = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "it is 4"},
    ]
    question = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "2+2?"}]
    write(tmp_path / "out", 1, [row(question, answer, 0.0, right=1.0), row(question, answer[2:], 0.0, right=1.0)])
    imported(tmp_path, tmp_path / "out")  # without a log, all columns of numbers are rewards
    rows = opened(tmp_path).trajectories()
    assert json.loads(rows["messages"][0]) == question
    assert rows["response"][1] == "it is 4" and rows["source_completion"].isna()[1]
    assert [turn["role"] for turn in rows["turns"][0]] == ["policy", "environment", "policy"]
    assert '"name": "add"' in rows["response"][0] and rows["response"][0].endswith("4\nit is 4")
    assert json.loads(rows["source_completion"][0]) == answer
    assert list(rows["score"]) == [1.0, 1.0]
    assert rows["prompt_id"].nunique() == 1


def test_what_is_malformed_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder completions"):
        TRL(tmp_path)
    file = write(tmp_path / "out", 1, [{"prompt": "a", "completion": None}])
    with pytest.raises(UserError, match=r"00001\.parquet, row 0: completion is neither a text nor a list of messages"):
        imported(tmp_path, tmp_path / "out")
    pq.write_table(pa.table({"prompt": ["a"]}), file)
    with pytest.raises(UserError, match=r"00001\.parquet: there is no column completion"):
        imported(tmp_path, tmp_path / "out")
    file.write_bytes(b"not Parquet PAR1")
    with pytest.raises(UserError, match=r"00001\.parquet: this is no Parquet file that can be read"):
        imported(tmp_path, tmp_path / "out")


def length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(text if isinstance(text, str) else text[0]["content"])) for text in completions]


def vowels(completions: list[Any], log_extra: Any, **_: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    log_extra("first", [text[:1] for text in texts])
    return [float(sum(letter in "aeiouAEIOU" for letter in text)) for text in texts]


@needs("trl")
@pytest.mark.slow  # importing TRL takes longer than to train with it
@pytest.mark.parametrize("are_messages", [False, True])
def test_files_of_trl(tmp_path: Path, are_messages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # TRL would import it
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = tiny.model_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    texts = [f"say {letter}" for letter in "abcdefgh"]
    prompts = [[{"role": "user", "content": text}] for text in texts] if are_messages else texts
    config = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        log_completions=True,
        num_completions_to_print=0,
        logging_steps=1,
        max_steps=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        reward_weights=[1.0, 0.5],
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=[length, vowels],
        args=config,
        train_dataset=dataset,
        eval_dataset=dataset.select([0]),
        processing_class=tokenizer,
    )
    trainer.train()
    arguments = ["import", str(tmp_path / "out"), "--from", "trl", "--run", "run", "--store", f"file://{tmp_path}/runs"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows, metrics = opened(tmp_path).trajectories(), opened(tmp_path).metrics()
    # an evaluation took two places of step 3, and one after the last step two of that
    assert list(rows["iteration"]) == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2
    assert rows.groupby("iteration")["prompt_id"].nunique().tolist() == [2, 2, 1, 1]
    for _, one in rows.iterrows():
        assert one["reward_parts"]["length"] == len(one["response"]), one
        assert one["score"] == one["reward_parts"]["length"] + 0.5 * one["reward_parts"]["vowels"]
        assert (one["source_first"] or "") == one["response"][:1]
    for iteration in (0, 1):
        assert rows[rows["iteration"] == iteration]["score"].mean() == pytest.approx(metrics["reward/mean"][iteration])
    assert rows["prompt"].isin(texts).all() and bool(rows["prompt_is_text"].all()) != are_messages
    logged = {one["step"]: one for one in trainer.state.log_history if "loss" in one}
    assert list(metrics["actor/lr"]) == [logged[step]["learning_rate"] for step in (1, 2, 3, 4)]
    assert list(metrics["actor/entropy"]) == [logged[step]["entropy"] for step in (1, 2, 3, 4)]
    answers = opened(tmp_path).validation()
    assert list(answers["iteration"]) == [3, 3, 4, 4] and set(answers["prompt"]) == {"say a"}
    evaluated = [one["eval_reward"] for one in trainer.state.log_history if "eval_reward" in one]
    assert answers.groupby("iteration")["score"].mean().tolist() == pytest.approx(evaluated)
    again = CliRunner().invoke(app, arguments)
    assert "0 steps and 0 validations imported, 0 trajectories; 6 were there" in " ".join(again.output.split())
