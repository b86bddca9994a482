"""What a config shows to everyone: no secrets, no folders of a machine, and otherwise the values themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import JsonValue

from ratchet.rlhf.config import RewardTraining, RunConfig, SFTConfig, keys
from ratchet.rlhf.config.published import LEFT_OUT, SECRET, published
from ratchet.rlhf.models.model_folders import base_models, hub_name
from tests import tiny


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/data/train.parquet", "…/train.parquet"),
        ("/home/me/data:test", "…/data:test"),
        ("/home/me/judge.py:score", "…/judge.py:score"),
        ("/home/me/", "…/"),
        ("~/train.parquet", "…/train.parquet"),
        ("file:///home/me/runs", "…/runs"),
        ("python /home/me/judge.py --data=/home/me/data", "python …/judge.py --data=…/data"),
        ('{"path": "/home/me/data"}', '{"path": "…/data"}'),
        ("s3://key:word@bucket/runs", "s3://bucket/runs"),
        ("https://me@host/train.parquet?signature=abc#part", "https://host/train.parquet"),
        ({"/home/me/judge.py:score": 0.5}, {"…/judge.py:score": 0.5}),
        ({"a": [{"Api_Key": "x", "OPENAI_API_KEY": "x", "hf_token": "x", "password": None}]}, None),
    ],
)
def test_what_concerns_a_machine_or_a_person_is_left_out(value: JsonValue, shown: JsonValue) -> None:
    secrets: JsonValue = {"Api_Key": LEFT_OUT, "OPENAI_API_KEY": LEFT_OUT, "hf_token": LEFT_OUT, "password": None}
    assert published(value) == ({"a": [secrets]} if shown is None else shown)


@pytest.mark.parametrize(
    "text",
    [
        "Qwen/Qwen2.5-0.5B",
        "data/train.parquet",
        "./model",
        "hf://datasets/openai/gsm8k/main",
        "memory://runs",
        "http://127.0.0.1:8000",
        "/no_think Answer in <answer></answer>, and/or say 1/2 // 3.",
        "</answer>",
        "//",
        "ratchet.rlhf.rewards.code:compute_score",
        "see https://host/a/b for more",
    ],
)
def test_other_values_stay_as_they_are(text: str) -> None:
    assert published({"key": [text, 1, None, True]}) == {"key": [text, 1, None, True]}


def test_no_key_of_a_config_is_named_like_a_secret() -> None:
    names = [key for model in (RunConfig, SFTConfig, RewardTraining) for key, *_ in keys(model)]
    assert not [name for name in names if SECRET.search(name)]


@pytest.mark.parametrize(
    ("card", "named"),
    [
        ("---\nbase_model: owner/base\n---\n", ["owner/base"]),
        ("---\nbase_model: [owner/base, other/base]\n---\n", ["owner/base", "other/base"]),
        ("---\nbase_model: /home/me/base\n---\n", []),
        ("---\nbase_model: '<img src=x>'\n---\n", []),
        ("---\nbase_model: [\n---\n", []),
        ("---\njust text\n---\n", []),
        ("---\nlicense: mit\n---\n", []),
        ("# a model\n", []),
    ],
)
def test_a_folder_derives_from_what_its_card_names(
    card: str, named: list[str], workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(card)
    model = tiny.config(workspace, model__path=str(tmp_path)).model
    assert base_models(model) == named
    assert hub_name(model) is None


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("owner/name", ["owner/name"]),
        ("/nowhere/model", []),
        ("./model", []),
        ("../model", []),
        ("a/b/c", []),
        ("a", []),
    ],
)
def test_a_model_that_is_no_folder_may_be_on_the_hub(path: str, named: list[str], workspace: Path) -> None:
    assert base_models(tiny.config(workspace, model__path=path).model) == named
