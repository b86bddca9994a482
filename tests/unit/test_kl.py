"""KL estimators and coefficient controllers: by hand, and what always holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms import KLPenalty
from rlhf.algorithms.kl import AdaptiveCoefficient, Estimator, kl_divergence
from tests.padded import properties


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [math.log(2), -math.log(2), 0]),
        ("abs", [math.log(2), math.log(2), 0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0]),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0]),
    ],
)
def test_estimators_by_hand(estimator: Estimator, expected: list[float]) -> None:
    """The policy holds a token twice as likely as the reference does, half as likely, and as likely."""
    log_probs = torch.full((1, 3), -1.0, dtype=torch.float64)
    ref = log_probs - math.log(2) * torch.tensor([1, -1, 0], dtype=torch.float64)
    found = kl_divergence(log_probs, ref, estimator)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("difference", "k1", "k3"),
    [
        (2.0, 2.0, math.exp(-2) + 1),  # within every limit
        (30.0, 30.0, 10.0),
        (-2.5, -2.5, math.exp(2.5) - 3.5),
        (-30.0, -30.0, 10.0),
        (-2000.0, -2000.0, 10.0),  # exp(2000) overflows
    ],
)
def test_k3_is_limited_and_k1_is_not(difference: float, k1: float, k3: float) -> None:
    log_probs = torch.tensor([[difference]], dtype=torch.float64, requires_grad=True)
    ref = torch.zeros(1, 1, dtype=torch.float64)
    assert kl_divergence(log_probs, ref, "k1").item() == pytest.approx(k1)
    found = kl_divergence(log_probs, ref, "k3")
    assert found.item() == pytest.approx(k3, rel=1e-14)
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    assert gradient.item() == pytest.approx(0.0 if k3 == 10 else 1 - math.exp(-difference))


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_straight_through_has_the_estimates_value_and_the_gradient_of_k2(estimator: str) -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, -0.5]], dtype=torch.float64)
    found = kl_divergence(log_probs, ref, f"{estimator}+")  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    plain = kl_divergence(log_probs, ref, estimator)  # type: ignore[arg-type]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-15)
    torch.testing.assert_close(gradient, (log_probs - ref).detach(), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.11, 1 + 0.1 * 256 / 10_000),  # a tenth above the target
        (0.09, 1 - 0.1 * 256 / 10_000),
        (5.0, 1 + 0.2 * 256 / 10_000),  # never more than a fifth
        (0.0, 1 - 0.2 * 256 / 10_000),
        (0.1, 1.0),
    ],
)
def test_adaptive_controller_by_hand(kl: float, factor: float) -> None:
    assert AdaptiveCoefficient(target=0.1)(0.05, kl, 256) == pytest.approx(0.05 * factor, rel=1e-12)


@properties
@given(st.floats(-50, 0), st.floats(-50, 0), st.sampled_from(["abs", "k2", "k3"]))
def test_never_negative_and_zero_where_equal(log_prob: float, ref: float, estimator: Estimator) -> None:
    pair = torch.tensor([[log_prob]], dtype=torch.float64), torch.tensor([[ref]], dtype=torch.float64)
    assert kl_divergence(*pair, estimator).item() >= 0
    assert kl_divergence(pair[0], pair[0], estimator).item() == 0


@pytest.mark.parametrize(("in_reward", "in_loss"), [(None, None), (0.1, None), (None, 0.1), (0.0, None)])
def test_a_reference_is_needed_exactly_where_there_is_a_kl_term(in_reward: float | None, in_loss: float | None) -> None:
    needs = KLPenalty(in_reward=in_reward, in_loss=in_loss).needs
    assert ("ref_log_probs" in needs) == (in_reward is not None or in_loss is not None)
    assert ("old_log_probs" in needs) == (in_reward is not None)
