"""Model folders that the contract suites share, and a batch that no shortcut gets right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.models.loading import load_actor, load_critic
from tests.tiny import model_folder, moe_folder


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks tests that start Megatron, according to their parameters."""
    if "megatron" in item.name:
        item.add_marker(pytest.mark.needs("megatron"))


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny Llama with ten times the usual weights, so that a token's neighbours matter to it."""
    folder = model_folder(tmp_path_factory.mktemp("policy"))
    model = load_actor(ModelConfig(path=str(folder)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 10
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns tiny mixtures of experts by their type in transformers."""
    return {kind: moe_folder(tmp_path_factory.mktemp(kind), kind) for kind in ("qwen3_moe", "mixtral")}


@pytest.fixture(scope="session")
def critic_folder(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the same backbone as a critic whose head is not zero, as a new one is."""
    folder = tmp_path_factory.mktemp("critic")
    critic = load_critic(ModelConfig(path=str(policy_folder)))
    with torch.no_grad():
        for name, parameter in critic.named_parameters():
            if name.startswith("score."):
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    critic.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def batch() -> TrajectoryBatch:
    """Returns prompts and responses of many lengths, also one token; some share a prompt, some tokens are masked."""
    rng = np.random.default_rng(11)
    lengths = [(1, 5), (7, 1), (3, 3), (12, 8), (3, 2), (12, 8), (9, 6), (2, 1)]
    prompts = [rng.integers(3, 78, prompt).tolist() for prompt, _ in lengths]
    prompts[4], prompts[5] = prompts[2], prompts[3]

    def per_token(scale: float, shift: float = 0.0) -> list[list[float]]:
        return [(shift + scale * rng.standard_normal(response)).tolist() for _, response in lengths]

    mask = [[1] * response for _, response in lengths]
    mask[3][2:5] = [0, 0, 0]
    return TrajectoryBatch.of(
        {
            "trajectory_id": [f"it000000-p{row:05d}-s00" for row in range(len(lengths))],
            "prompt_ids": prompts,
            "response_ids": [rng.integers(3, 78, response).tolist() for _, response in lengths],
            "loss_mask": mask,
            "advantages": per_token(1),
            "returns": per_token(1),
            "values": per_token(0.5),
            "old_log_probs": per_token(0.5, shift=-4.5),
            "ref_log_probs": per_token(0.5, shift=-4.5),
        }
    )
