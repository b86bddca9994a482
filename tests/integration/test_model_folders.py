"""Folders of models as the hub has them: PPO trains them, and what it exports is a folder of the same kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.flows.train import train
from ratchet.infra.runs.run import open_run
from tests import tiny


def pad_is_eos(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    edit(folder / "config.json", pad_token_id=tokenizer.eos_token_id)


def no_pad(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    edit(folder / "config.json", pad_token_id=None)


def more_embeddings_than_tokens(folder: Path) -> None:
    tiny.model_folder(folder, vocabulary=128)


def added_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()


def tied_embeddings(folder: Path) -> None:
    tiny.model_folder(folder, tied=True)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


FOLDERS: list[Callable[[Path], None]] = [
    pad_is_eos,
    no_pad,
    more_embeddings_than_tokens,
    added_tokens,
    no_generation_config,
    tied_embeddings,
]


@pytest.mark.parametrize("change", FOLDERS, ids=lambda change: change.__name__)
def test_ppo_trains_it(change: Callable[[Path], None], tmp_path: Path, prefect_server: str) -> None:
    tiny.workspace(tmp_path)
    change(tmp_path / "model")
    before = {path.name for path in (tmp_path / "model").iterdir()}
    config = tiny.config(tmp_path, reward__function="tests.rewards:letters", rollout__n=8, train__iterations=2)
    train(config)
    run = open_run(f"{config.run.store}/{config.run.name}")
    frame = run.trajectories()
    ended = frame[frame["finish_reason"] == "stop"]
    assert len(ended) > 0
    eos = AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id
    for row in ended.itertuples():
        # whatever else the token stands for, the policy drew this one, and learns from it
        assert row.response_ids[-1] == eos
        assert row.response_mask[-1] == 1
        assert row.advantages[-1] != 0
    assert np.isfinite(np.concatenate(frame["old_log_probs"].tolist())).all()
    assert (run.metrics()["actor/grad_norm"] > 0).all()

    exported = run.export(2, tmp_path / "exported")
    assert before <= {path.name for path in exported.iterdir()} | {"generation_config.json"}
    was, is_now = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "model", exported))
    assert is_now.config.tie_word_embeddings == was.config.tie_word_embeddings
    assert is_now.get_input_embeddings().weight.shape == was.get_input_embeddings().weight.shape
    assert (
        AutoTokenizer.from_pretrained(exported).get_vocab()
        == AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab()
    )
