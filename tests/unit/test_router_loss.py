"""The router's auxiliary loss is transformers', whatever the layout of the tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ratchet.rlhf.algorithms.objectives import SupervisedObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.models.router_loss import RouterLoss
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.rollout.hf_engine import HFRollout
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.micro_batches import MicroBatch
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests.tiny import model_folder, moe_folder

COEFFICIENT = 0.5
PROMPTS = [[3, 7, 11], [5, 9], [3, 7, 11], [3, 7, 11]]
RESPONSES = [[11, 2, 40], [9, 4, 8, 30, 6], [17], [21, 22, 23, 24]]
BATCH = TrajectoryBatch.of(
    {
        "prompt_ids": PROMPTS,
        "response_ids": RESPONSES,
        "loss_mask": [[0] * len(response) for response in RESPONSES],  # so that only the router learns
    }
)
PLAN = OptimizerPlan(
    lr=0.0,
    optimizer=AdamW(betas=(0.0, 0.95), weight_decay=0.0),
    grad_clip=None,
    micro_batch_tokens=1000,
    mini_batches=((0, 1, 2, 3),),
    temperature=1.0,
)


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe_folder(
        tmp_path_factory.mktemp("moe"), request.param, output_router_logits=True, router_aux_loss_coef=COEFFICIENT
    )


def engine_of(folder: Path, **options: Any) -> TorchEngine:
    return TorchEngine(load_actor(ModelConfig(path=str(folder))), "policy", **options)


def test_it_is_the_loss_of_transformers() -> None:
    random = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(12, 5, generator=random) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    loss = RouterLoss(COEFFICIENT, top_k=2)
    expected = load_balancing_loss_func(logits, 5, 2, mask)
    torch.testing.assert_close(loss(logits, mask.flatten()), expected)
    twice = [torch.cat([layer, layer[4:8]]) for layer in logits]
    expected = load_balancing_loss_func(tuple(twice), 5, 2, torch.cat([mask, mask[1:2]]))
    torch.testing.assert_close(loss(logits, (mask * torch.tensor([[1], [2], [1]])).flatten()), expected)


def test_each_layout_counts_the_same_tokens() -> None:
    total = sum(len(prompt) + len(response) - 1 for prompt, response in zip(PROMPTS, RESPONSES, strict=True))
    for layout in ("padded", "packed", "shared"):
        micro = MicroBatch.of(BATCH, [0, 1, 2, 3], layout)  # type: ignore[arg-type]
        assert micro.copies.shape == micro.input_ids.shape
        assert micro.copies.sum() == total
    assert micro.copies[0].tolist() == [3] * 3 + [1] * 2 + [1] * (2 + 4 + 0 + 3)


def reference(folder: Path) -> torch.nn.Module:
    """The gradient of the loss alone, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    read = [prompt + response[:-1] for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    width = max(map(len, read))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in read])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in read])
    model.aux_loss = model(input_ids=ids, attention_mask=mask).aux_loss
    (COEFFICIENT * model.aux_loss).backward()
    return model


@pytest.mark.parametrize(
    "options",
    [{"share_prompts": False}, {"share_prompts": True}, {"packing": True, "share_prompts": False}, {"packing": True}],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_learns_from_it(folder: Path, options: dict[str, Any], checkpointing: bool) -> None:
    engine = engine_of(folder, gradient_checkpointing=checkpointing, **options)
    assert engine.module.shares_prompts == options.get("share_prompts", True)
    metrics = engine.update(BATCH, SupervisedObjective(), PLAN)
    expected = reference(folder)
    assert metrics["actor/router_aux_loss"] == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    moments = load_safetensors(engine.state()["optimizer.safetensors"])
    learned = 0
    for name, parameter in expected.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        learned += int(gradient.abs().max() > 1e-3)
        # sums in another order, over some dozen tokens
        torch.testing.assert_close(moments[f"exp_avg.{name}"], gradient, rtol=1e-4, atol=1e-5)
    assert learned > 10, "what is before a router learns, too"


def test_micro_batches_count_by_their_tokens(folder: Path) -> None:
    """As in the field, the shares of the experts are those of a micro-batch."""
    engine, alone = engine_of(folder), engine_of(folder)
    found = engine.update(BATCH, SupervisedObjective(), replace(PLAN, micro_batch_tokens=1))["actor/router_aux_loss"]
    sizes, losses = [], []
    for row in range(4):
        plan = replace(PLAN, mini_batches=((row,),))
        losses.append(alone.update(BATCH, SupervisedObjective(), plan)["actor/router_aux_loss"])
        sizes.append(len(PROMPTS[row]) + len(RESPONSES[row]) - 1)
    assert found == pytest.approx(np.average(losses, weights=sizes), rel=1e-5)


def test_it_is_off_unless_the_config_asks_for_it(tmp_path: Path) -> None:
    engine = engine_of(moe_folder(tmp_path, "mixtral"))
    assert "actor/router_aux_loss" not in engine.update(BATCH, SupervisedObjective(), PLAN)


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_folder(tmp_path))
    config.output_router_logits = True
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"output_router_logits is true .* LlamaForCausalLM has no auxiliary loss: set"):
        engine_of(tmp_path)


def test_generation_does_not_mind(folder: Path) -> None:
    rollout = HFRollout(load_actor(ModelConfig(path=str(folder))), eos_token_ids=(1,))
    asked = [Request(f"it000000-p{row:05d}-s00", tuple(prompt)) for row, prompt in enumerate(PROMPTS)]
    found = rollout.generate(asked, Sampling(temperature=1.0, top_p=1.0, max_tokens=5, seed=0))
    rollout.close()
    assert len(found) == 4
