"""What a policy that sees images refuses before a start."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ratchet.infra.execution.preflight.models import check_models
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.families import VISION, VLLM_VISION, WITHOUT_TORCHVISION
from tests import tiny
from tests.vision_models import tiny_vision_model

SERVER = {"type": "server", "urls": ["http://127.0.0.1:1"]}


def config(folder: Path, **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run": {"name": "sees", "store": str(folder)},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": ["prompts.parquet"], "prompts_per_iteration": 4, "max_prompt_tokens": 64},
        "rollout": {"engine": "hf", "n": 4, "max_response_tokens": 8},
        "reward": {"function": "gsm8k"},
        "algorithm": {"advantage": "grpo"},
    }
    merged = {name: {**values.get(name, {}), **sections.get(name, {})} for name in values.keys() | sections.keys()}
    return RunConfig.model_validate(merged)


def test_hf_with_torch_or_fsdp_sees(tmp_path: Path) -> None:
    tiny_vision_model(tmp_path / "model", "qwen2_5_vl")
    check_models(config(tmp_path))
    check_models(config(tmp_path, actor={"engine": "fsdp"}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollout": {"engine": {"type": "server", "urls": ["http://127.0.0.1:1"], "api": "sglang"}}},
            "rollout.engine.api sglang cannot be sent any: set rollout.engine.api: vllm, or rollout.engine: hf",
        ),
        ({"actor": {"engine": "deepspeed"}}, "actor.engine cannot split or compute: set actor.engine to torch or fsdp"),
        ({"model": {"kernels": "compile"}}, "model.kernels compile cannot compute them: set model.kernels: torch"),
    ],
)
def test_others_are_refused_by_name(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    tiny_vision_model(tmp_path / "model", "qwen2_5_vl")
    with pytest.raises(UserError, match=message) as refused:
        check_models(config(tmp_path, **sections))
    assert f"model.path {tmp_path / 'model'} sees images" in str(refused.value)


@pytest.mark.parametrize("kind", VISION)
@pytest.mark.parametrize("engine", ["vllm", SERVER], ids=["vllm", "server"])
def test_families_that_vllm_cannot_load_are_refused(tmp_path: Path, kind: str, engine: Any) -> None:
    tiny_vision_model(tmp_path / "model", kind)
    wanted = config(tmp_path, rollout={"engine": engine})
    if kind not in VLLM_VISION:
        with pytest.raises(UserError, match=f"cannot load the weights of {kind} as they are trained: set rollout.eng"):
            check_models(wanted)
    elif engine == "vllm" and kind not in WITHOUT_TORCHVISION and find_spec("torchvision") is None:
        with pytest.raises(UserError, match=f"reads the images of {kind} with torchvision, which is not installed"):
            check_models(wanted)
    else:
        check_models(wanted)


def test_the_reference_must_see_too(tmp_path: Path) -> None:
    tiny_vision_model(tmp_path / "model", "qwen2_5_vl")
    blind = tiny.model_folder(tmp_path / "blind")
    sections: dict[str, Any] = {"reference": {"model": str(blind)}, "algorithm": {"kl": {"in_loss": 0.1}}}
    with pytest.raises(UserError, match=r"the reference .*blind does not: name a model of its family"):
        check_models(config(tmp_path, **sections))
