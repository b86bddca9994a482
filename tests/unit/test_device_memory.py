"""Whether vLLM fits beside the other models of its GPU: the estimate from the config, by hand for Qwen2.5-7B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet.rlhf.config import ModelConfig, RunConfig, parse_config
from ratchet.rlhf.config.engines import VLLMConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.rollout.device_memory import GIB, check_config, check_fits, resident
from tests import tiny
from tests.unit.test_config import MINIMAL

SEVEN = 7_615_616_512
UNIT = SEVEN / GIB
"""GiB of a byte per parameter: 7.09."""


def grpo(**changes: Any) -> RunConfig:
    tree = {**MINIMAL, "model": {"path": "m", "dtype": "bfloat16"}, "algorithm": {"advantage": "grpo"}}
    tree["rollout"] = {"engine": "vllm", "n": 8}
    config = parse_config(tree, "tests")
    return config.with_values({key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        # the model in bfloat16; float32 weights and two moments
        ({}, 1, {"weights of the actor": 2, "optimizer state of the actor": 12, "weights of the reference": 2}),
        (
            {"model__dtype": "float32"},
            1,
            {"weights of the actor": 4, "optimizer state of the actor": 8, "weights of the reference": 4},
        ),
        ({"actor__offload_when_idle": True}, 1, {}),
        (
            {"actor__engine": "fsdp"},
            8,
            {"weights of the actor": 4 / 8, "optimizer state of the actor": 1, "weights of the reference": 2 / 8},
        ),
        (
            {"pools": {"gpus": {"workers": 8}}, "actor__engine": "fsdp", "actor__engine__shard_size": 2},
            8,
            {"weights of the actor": 4 / 2, "optimizer state of the actor": 4, "weights of the reference": 2 / 2},
        ),
        ({"actor__engine": "fsdp", "actor__engine__offload": True}, 8, {}),
        (
            {"actor__engine": "deepspeed", "actor__engine__zero_stage": 2},
            8,  # the model in bfloat16 on each rank; float32 weights and two moments are shared
            {"weights of the actor": 2, "optimizer state of the actor": 12 / 8, "weights of the reference": 2},
        ),
        (
            {"actor__engine": "deepspeed", "actor__engine__zero_stage": 2, "actor__engine__offload": True},
            8,
            {"weights of the actor": 2, "weights of the reference": 2},
        ),
        (
            {"actor__engine": "deepspeed", "actor__engine__zero_stage": 3},
            8,
            {"weights of the actor": 2 / 8, "optimizer state of the actor": 12 / 8, "weights of the reference": 2 / 8},
        ),
        ({"model__lora": {"r": 16}}, 1, {"weights of the actor": 2}),
    ],
)
def test_what_stays_on_the_gpu(changes: dict[str, Any], ranks: int, expected: dict[str, float]) -> None:
    """In bytes per parameter."""
    held = resident(grpo(**changes), {"actor": SEVEN, "reference": SEVEN}, ranks)
    assert {what: size / SEVEN for what, size in held.items()} == pytest.approx(expected)


def test_a_critic_and_a_reward_model_count_too() -> None:
    config = parse_config({**MINIMAL, "reward": {"model": {"path": "judge", "dtype": "float32"}}}, "tests")
    held = resident(config, {"actor": 10, "critic": 20, "reward": 30}, 1)
    assert held["optimizer state of the critic"] == 12 * 20
    assert held["weights of the reward model"] == 4 * 30
    idle = config.with_values({"critic.offload_when_idle": True})
    assert "weights of the critic" not in resident(idle, {"actor": 10, "critic": 20, "reward": 30}, 1)


def test_more_than_what_is_left_is_refused_with_the_arithmetic() -> None:
    held = {"weights of the actor": 20 * GIB, "optimizer state of the actor": 30 * GIB}
    check_fits(0.37, 80 * GIB, held)
    with pytest.raises(UserError) as refused:
        check_fits(0.9, 80 * GIB, held)
    assert str(refused.value) == (
        "rollout.engine.gpu_memory_utilization 0.9 of 80.0 GiB is 72.0 GiB, but weights of the actor 20.0 + optimizer "
        "state of the actor 30.0 GiB stay on the GPU, which leaves 30.0: lower it to 0.37, or let the models take "
        "turns (actor.offload_when_idle, critic.offload_when_idle)"
    )
    check_fits(float(str(refused.value).split("lower it to ")[1].split(",")[0]), 80 * GIB, held)
    with pytest.raises(UserError, match=r"which leaves 0\.0: let the models take turns"):
        check_fits(0.1, 40 * GIB, held)


def test_models_are_counted_by_their_files(tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    model = load_actor(ModelConfig(path=str(tmp_path / "model")))
    count = sum(parameter.numel() for parameter in model.parameters())
    config = tiny.config(tmp_path, rollout__engine="vllm", algorithm__advantage="grpo", algorithm__kl={})
    total = 20 * count  # weights and moments of the actor take 12
    check_config(config, VLLMConfig(gpu_memory_utilization=0.4), ["actor", "rollout"], total)
    with pytest.raises(UserError, match=r"lower it to 0\.40"):
        check_config(config, VLLMConfig(), ["actor", "rollout"], total)
    check_config(config, VLLMConfig(), ["rollout"], total)
