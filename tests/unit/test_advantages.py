"""Advantage estimators: by hand, against recorded cases, and what holds for all of them."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms import GAE, GRPO, Advantage
from rlhf.algorithms.base import Algorithm
from tests.oracles import Case, cases
from tests.padded import GARBAGE, Batch, batches, members, padded, properties, rows, spoiled


def tensor(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# gamma = lambda = 1/2, so that delta = r + V'/2 - V and A = delta + A'/4. In the first trajectory the second token is
# tool output: the third follows the first. The second trajectory ends after two tokens.
GAE_REWARDS = tensor([1, 99, 0, 4], [0, 2, 99, 99])
GAE_VALUES = tensor([1, 77, 2, 1], [3, 1, 77, 77])
GAE_MASK = tensor([1, 0, 1, 1], [1, 1, 0, 0])
GAE_ADVANTAGES = tensor([0.8125, 0, -0.75, 3], [-2.25, 1, 0, 0])
GAE_RETURNS = tensor([1.8125, 0, 1.25, 4], [0.75, 2, 0, 0])


def test_gae_by_hand() -> None:
    advantages, returns = GAE(gamma=0.5, lam=0.5, whiten=False)(GAE_REWARDS, GAE_MASK, values=GAE_VALUES)
    assert torch.equal(advantages, GAE_ADVANTAGES)
    assert torch.equal(returns, GAE_RETURNS)


def test_gae_gamma_and_lambda_each_have_their_place() -> None:
    rewards, values, mask = tensor([0, 0, 1]), tensor([0, 2, 4]), tensor([1, 1, 1])
    # A2 = 1 - 4 = -3;  A1 = (4 g - 2) - 3 g l;  A0 = 2 g + g l A1
    advantages, _ = GAE(gamma=0.5, lam=0.25, whiten=False)(rewards, mask, values=values)
    assert torch.equal(advantages, tensor([1 + 0.125 * -0.375, 0 - 0.375, -3]))


def test_gae_whitens_advantages_but_not_returns() -> None:
    advantages, returns = GAE(gamma=0.5, lam=0.5)(GAE_REWARDS, GAE_MASK, values=GAE_VALUES)
    plain = GAE_ADVANTAGES[GAE_MASK > 0].tolist()
    deviation = (statistics.variance(plain) + 1e-8) ** 0.5
    expected = tensor(*[(a - statistics.mean(plain)) / deviation for a in plain])
    torch.testing.assert_close(advantages[GAE_MASK > 0], expected, rtol=1e-12, atol=0)
    assert (advantages[GAE_MASK == 0] == 0).all()
    assert torch.equal(returns, GAE_RETURNS)


GRPO_REWARDS = tensor([0, 1, 99], [3, 0, 99], [0, 4, 0], [4, 0, 99], [1, 2, 3])
GRPO_MASK = tensor([1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1])
GRPO_GROUPS = torch.tensor([5, 5, 9, 9, 7])


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_grpo_by_hand(norm_by_std: bool) -> None:
    """Group 5 scores 1 and 3 (mean 2, deviation sqrt 2); group 9 does not spread; group 7 is one trajectory, of 6."""
    spread, alone = (1 / (2**0.5 + 1e-6), 6 / (1 + 1e-6)) if norm_by_std else (1, 6)
    advantages, returns = GRPO(norm_by_std=norm_by_std)(GRPO_REWARDS, GRPO_MASK, groups=GRPO_GROUPS)
    expected = tensor(-spread, spread, 0, 0, alone)[:, None] * GRPO_MASK
    torch.testing.assert_close(advantages, expected, rtol=1e-14, atol=0)
    assert torch.equal(returns, advantages)


@pytest.mark.parametrize("case", cases("advantage", "gae", "grpo", "dr_grpo"))
def test_recorded_cases(case: Case) -> None:
    estimator = (GAE if case.name == "gae" else GRPO)(**case.params)
    mask, recorded = case.inputs["response_mask"], {"values": "values", "groups": "group_index"}
    needs = {name: case.inputs[recorded[name]] for name in estimator.needs}
    found = estimator(case.inputs["token_level_rewards"], mask, **needs)
    case.check(dict(zip(("advantages", "returns"), found, strict=True)), mask)


estimators = pytest.mark.parametrize("kind", members(Advantage))


def estimate(kind: type[Algorithm], batch: Batch, **changes: object) -> Tensor:
    estimator = kind(**{name: value for name, value in changes.items() if name in kind.model_fields})
    needs = {name: batch[name] for name in estimator.needs}
    return torch.stack(estimator(batch["token_rewards"], batch["mask"], **needs))  # type: ignore[operator]


@estimators
@properties
@given(batches(), st.sampled_from(GARBAGE), st.integers(0, 3))
def test_masked_positions_never_matter(kind: type[Algorithm], batch: Batch, garbage: float, wider: int) -> None:
    found = estimate(kind, batch)
    assert found.isfinite().all()
    assert (found[:, batch["mask"] == 0] == 0).all()
    assert torch.equal(estimate(kind, spoiled(batch, garbage)), found)
    expected = torch.nn.functional.pad(found, (0, wider))
    torch.testing.assert_close(estimate(kind, padded(batch, wider)), expected, rtol=1e-9, atol=1e-9)


@estimators
@properties
@given(batches(), st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_result(kind: type[Algorithm], batch: Batch, random: object) -> None:
    order = list(range(len(batch["mask"])))
    random.shuffle(order)  # type: ignore[attr-defined]
    found, permuted = estimate(kind, batch, whiten=False), estimate(kind, rows(batch, order), whiten=False)
    torch.testing.assert_close(permuted, found[:, order], rtol=1e-9, atol=1e-9)
