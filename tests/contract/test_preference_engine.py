"""A reward model in training: its scores are Hugging Face's, and pairs stay together however a batch is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ratchet.rlhf.algorithms.masked import LossNormalizers
from ratchet.rlhf.algorithms.objectives import PreferenceObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.models.loading import load_scorer
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.torch_engine import TorchEngine
from tests import tiny

PLAN = OptimizerPlan(
    lr=1e-3,
    optimizer=AdamW(betas=(0.8, 0.95)),
    grad_clip=None,
    micro_batch_tokens=60,
    mini_batches=((2, 3, 6, 7, 0, 1, 4, 5),),
    temperature=1.0,
)


@pytest.fixture(scope="module")
def folder(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.reward_model_folder(tmp_path_factory.mktemp("judge"), policy_folder)


@pytest.fixture(scope="module")
def pairs() -> TrajectoryBatch:
    rng = np.random.default_rng(2)
    conversations = [rng.integers(3, 78, length).tolist() for length in (5, 17, 9, 9, 20, 3, 1, 12)]
    return TrajectoryBatch.of(
        {"prompt_ids": conversations, "response_ids": [[0]] * 8, "loss_mask": [[1]] * 8},
    )


def naive_scores(model: torch.nn.Module, pairs: TrajectoryBatch) -> torch.Tensor:
    return torch.stack([model(torch.tensor([ids])).logits[0, 0] for ids in pairs.list("prompt_ids")])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_scores_are_those_of_the_classifier(budget: int, packing: bool, folder: Path, pairs: TrajectoryBatch) -> None:
    engine = TorchEngine(load_scorer(ModelConfig(path=str(folder))), "reward", packing=packing)
    found = engine.infer(pairs, ("scores",), temperature=1.0, micro_batch_tokens=budget)["scores"].to_pylist()
    with torch.no_grad():
        expected = naive_scores(AutoModelForSequenceClassification.from_pretrained(folder), pairs)
    assert [score for [score] in found] == pytest.approx(expected.tolist(), abs=1e-4)  # of a size of ten


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_a_step_is_that_of_all_pairs(budget: int, packing: bool, folder: Path, pairs: TrajectoryBatch) -> None:
    engine = TorchEngine(load_scorer(ModelConfig(path=str(folder))), "reward", packing=packing)
    schedule = OptimizerPlan(**{**vars(PLAN), "micro_batch_tokens": budget})
    metrics = engine.update(pairs, PreferenceObjective(), schedule)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    scores = naive_scores(model, pairs)
    margin = scores[0::2] - scores[1::2]
    loss = torch.log1p(torch.exp(-margin)).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert metrics["reward/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["reward/accuracy"] == (margin > 0).double().mean().item()
    assert metrics["reward/margin"] == pytest.approx(margin.mean().item(), rel=1e-4, abs=1e-5)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert metrics["reward/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert engine.optimizer is not None
    for name, parameter in model.named_parameters():
        moment = engine.optimizer.state[engine.parameters[name]]["exp_avg"] / (1 - 0.8)
        assert parameter.grad is not None
        largest = parameter.grad.abs().max().item()
        torch.testing.assert_close(moment.cpu(), parameter.grad, rtol=1e-3, atol=1e-4 * largest)


def test_bradley_and_terry_by_hand() -> None:
    mask = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    scores = torch.tensor([[9.0, 2.0], [1.0, 9.0], [-1.0, 9.0], [9.0, 2.0]])
    loss, metrics = PreferenceObjective()({"scores": scores}, {"loss_mask": mask}, LossNormalizers.of(mask))
    expected = (np.log1p(np.exp(-1.0)) + np.log1p(np.exp(3.0))) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert metrics["reward/accuracy"].item() == 0.5
    assert metrics["reward/margin"].item() == -1.0


def test_a_new_head_says_nothing_and_learns(policy_folder: Path, pairs: TrajectoryBatch) -> None:
    engine = TorchEngine(load_scorer(ModelConfig(path=str(policy_folder))), "reward")
    first = engine.update(pairs, PreferenceObjective(), PLAN)
    assert first["reward/loss"] == pytest.approx(np.log(2), rel=1e-6)
    losses = [engine.update(pairs, PreferenceObjective(), PLAN)["reward/loss"] for _ in range(30)]
    assert losses[-1] < 0.35, "half of what it was"
