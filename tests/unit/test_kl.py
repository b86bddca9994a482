"""KL estimators and coefficient controllers: by hand, and what always holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from ratchet.rlhf.algorithms import KLPenalty
from ratchet.rlhf.algorithms.kl import AdaptiveCoefficient, Estimator, kl_divergence
from tests.padded import properties
from tests.tiers import sampled


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


ARMS = 20
BETA = 0.5


def bandit() -> tuple[Tensor, Tensor]:
    """Rewards of the arms, and the reference's log-probs of them."""
    draw = torch.Generator().manual_seed(0)
    rewards = torch.randn(ARMS, generator=draw, dtype=torch.float64)
    return rewards, torch.randn(ARMS, generator=draw, dtype=torch.float64).log_softmax(-1)


def learned(in_reward: Estimator | None, in_loss: Estimator | None) -> Tensor:
    """Where the policy comes to rest under policy gradients that are exact: over all arms, not over samples. The KL
    term is taken off the rewards, as in the stage `advantages`, or added to the loss, as in the actor's objective."""
    rewards, ref = bandit()
    logits = torch.zeros(ARMS, dtype=torch.float64, requires_grad=True)
    for _ in range(2000):
        log_probs = logits.log_softmax(-1)
        token_rewards = rewards
        if in_reward is not None:
            token_rewards = rewards - BETA * kl_divergence(log_probs[None], ref[None], in_reward)[0].detach()
        loss = -token_rewards * log_probs
        if in_loss is not None:
            loss = loss + BETA * kl_divergence(log_probs[None], ref[None], in_loss)[0]
        (descent,) = torch.autograd.grad((log_probs.exp().detach() * loss).sum(), logits)
        logits = (logits - descent).detach().requires_grad_()
    return logits.detach().softmax(-1)


def value_and_kl(probabilities: Tensor) -> tuple[float, float]:
    rewards, ref = bandit()
    kl = (probabilities * (probabilities.log() - ref)).sum()
    return float((probabilities * rewards).sum()), float(kl)


def best() -> tuple[float, float]:
    """Of the policy that maximizes the reward less BETA times the KL divergence, which is known."""
    rewards, ref = bandit()
    return value_and_kl((ref + rewards / BETA).softmax(-1))


def test_the_default_kl_in_the_reward_leads_to_the_policy_that_the_penalty_asks_for() -> None:
    assert value_and_kl(learned(KLPenalty(in_reward=BETA).reward_estimator, None)) == pytest.approx(best(), abs=1e-3)


@sampled(3)
@pytest.mark.parametrize("estimator", ["abs", "k2", "k3"])
def test_other_estimators_in_the_reward_lead_elsewhere_and_are_refused(estimator: Estimator) -> None:
    assert value_and_kl(learned(estimator, None)) != pytest.approx(best(), abs=0.05)
    with pytest.raises(ValidationError, match=f"{estimator} in the reward does not hold the policy near the reference"):
        KLPenalty(in_reward=BETA, reward_estimator=estimator)  # type: ignore[arg-type]


@sampled(2)
@pytest.mark.parametrize("estimator", ["k2", "k1+", "abs+", "k2+", "k3+"])
def test_in_the_loss_the_gradient_of_these_is_unbiased(estimator: Estimator) -> None:
    assert value_and_kl(learned(None, estimator)) == pytest.approx(best(), abs=1e-3)


def gradient(estimator: Estimator) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean gradient of the estimator as a loss, over all arms; and those of what it might be the gradient of."""
    _, ref = bandit()
    logits = torch.linspace(-1, 1, ARMS, dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    held = log_probs.exp().detach()
    found = (held * kl_divergence(log_probs[None], ref[None], estimator)[0]).sum()
    distances = {
        "KL(policy || reference)": (log_probs.exp() * (log_probs - ref)).sum(),
        "KL(reference || policy)": (ref.exp() * (ref - log_probs)).sum(),
        "twice the total variation": (log_probs.exp() - ref.exp()).abs().sum(),
    }
    of = {name: torch.autograd.grad(each, logits, retain_graph=True)[0] for name, each in distances.items()}
    return torch.autograd.grad(found, logits)[0], of


@pytest.mark.parametrize(
    ("estimator", "distance"),
    [
        ("abs", "twice the total variation"),
        ("k2", "KL(policy || reference)"),
        ("k3", "KL(reference || policy)"),
        ("k3+", "KL(policy || reference)"),
    ],
)
def test_of_what_the_mean_gradient_in_the_loss_is_the_gradient(estimator: Estimator, distance: str) -> None:
    found, of = gradient(estimator)
    torch.testing.assert_close(found, of[distance], rtol=1e-10, atol=1e-12)


def test_k1_has_no_gradient_in_the_loss() -> None:
    assert gradient("k1")[0].abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_these_are_unbiased_as_values(estimator: Estimator) -> None:
    _, ref = bandit()
    policy = torch.linspace(-1, 1, ARMS, dtype=torch.float64).log_softmax(-1)
    expected = (policy.exp() * (policy - ref)).sum()
    found = (policy.exp() * kl_divergence(policy[None], ref[None], estimator)[0]).sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
