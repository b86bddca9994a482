"""The KL penalty that keeps the actor near the reference: divergence estimators and coefficient controllers."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from jaxtyping import Float
from pydantic import BeforeValidator, Field

from ratchet.rlhf.algorithms.base import Options
from ratchet.rlhf.algorithms.tensor import Tensor

Estimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


def kl_divergence(
    log_probs: Float[Tensor, "batch response"], ref_log_probs: Float[Tensor, "batch response"], estimator: Estimator
) -> Float[Tensor, "batch response"]:
    r"""Estimate :math:`KL(\pi \| \pi_{ref})` for each token, from tokens sampled from :math:`\pi`
    (J. Schulman, "Approximating KL divergence", 2020), with :math:`\Delta = \log\pi - \log\pi_{ref}`.

    An estimator can be unbiased in two ways. As a *value*: its mean over tokens sampled from :math:`\pi` is the
    divergence. As a *loss*: the mean of its gradient is the gradient of the divergence. Neither implies the other
    (arXiv 2512.21852):

    - ``k1``, :math:`\Delta`: unbiased as a value, may be negative. As a loss its gradient is 0 on average.
    - ``abs``, :math:`|\Delta|`: biased as a value. As a loss it has the gradient of twice the total variation distance.
    - ``k2``, :math:`\Delta^2 / 2`: biased as a value, low variance. As a loss its gradient is unbiased.
    - ``k3``, :math:`e^{-\Delta} - 1 + \Delta`: unbiased as a value, never negative, low variance. As a loss it has the
      gradient of the divergence in the other direction, :math:`KL(\pi_{ref} \| \pi)`. :math:`\Delta` is clamped to ±20
      and the result to ±10, as in the published code, so that a single outlier cannot overflow.
    - ``k1+``, ``abs+``, ``k2+``, ``k3+``: straight-through. The value is unchanged; the gradient is that of k2, and
      therefore unbiased. ``k3+`` is unbiased both as a value and as a loss.

    These statements assume that the policy being trained sampled the tokens. This is exact in the first optimizer step
    of an iteration and approximate in later steps.

    In the *reward* nothing is differentiated: the policy gradient multiplies the value by :math:`\nabla\log\pi`. Only
    for ``k1`` is the mean of this product the gradient of the divergence. For ``k3`` it is the gradient of
    :math:`KL(\pi \| \pi_{ref}) - KL(\pi_{ref} \| \pi)`, whose second term drives the policy away from the reference.
    ``k2`` and ``abs`` punish tokens that have become less likely just like tokens that have become more likely.

    Args:
        log_probs: the policy's log-probs of the sampled tokens in nats, float32, shape (batch, response).
        ref_log_probs: the reference's log-probs of the same tokens in nats, same shape.
        estimator: one of the names above.

    Returns:
        The estimate for each token in nats, float32, shape (batch, response).
    """
    delta = log_probs - ref_log_probs
    if estimator.endswith("+"):
        value = _estimate(delta.detach(), estimator.removesuffix("+"))
        squared = 0.5 * delta.square()
        # straight-through: the number is `value`, the gradient that of k2
        return squared - squared.detach() + value
    return _estimate(delta, estimator)


def _estimate(delta: Float[Tensor, "batch response"], estimator: str) -> Float[Tensor, "batch response"]:
    if estimator == "k1":
        return delta
    if estimator == "abs":
        return delta.abs()
    if estimator == "k2":
        return 0.5 * delta.square()
    # as in the published code, so that a single outlier cannot overflow
    delta = delta.clamp(-20.0, 20.0)
    return ((-delta).exp() - 1.0 + delta).clamp(-10.0, 10.0)


class FixedCoefficient(Options):
    """Keeps the coefficient at its configured value."""

    type: Literal["fixed"] = "fixed"


class AdaptiveCoefficient(Options):
    r"""Adapts the coefficient so that the measured KL approaches a target (arXiv 1909.08593, section 2.2):

    .. math:: e = \operatorname{clip}(KL / KL_{target} - 1, -0.2, 0.2), \qquad \beta' = \beta (1 + e n / horizon)

    where n is the number of trajectories of the iteration. The coefficient is committed with the advantages of each
    iteration.
    """

    type: Literal["adaptive"] = "adaptive"
    target: float = Field(gt=0, description="KL per token to aim for")
    horizon: int = Field(10_000, gt=0, description="trajectories over which the coefficient adapts")

    def __call__(self, coefficient: float, kl: float, trajectories: int) -> float:
        """Computes the next coefficient from the measured KL per token, in nats."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coefficient * (1.0 + error * trajectories / self.horizon)


Controller = Annotated[FixedCoefficient | AdaptiveCoefficient, Field(discriminator="type")]


NO_REWARD = (
    "{estimator} in the reward does not hold the policy near the reference: only k1 has the gradient of the KL "
    "divergence there (docs/algorithms.md); use k1, or the KL in the loss (in_loss)"
)


def _only_k1(value: object) -> object:
    if value == "k1+":
        raise ValueError("k1+ differs from k1 only in its gradient, and in the reward there is none: write k1")
    if value in get_args(Estimator) and value != "k1":
        raise ValueError(NO_REWARD.format(estimator=value))
    return value


class KLPenalty(Options):
    """The KL term: subtracted from the token rewards, added to the loss, or both; if neither, no reference is used."""

    in_reward: float | None = Field(None, ge=0, description="coefficient of the KL subtracted from token rewards")
    in_loss: float | None = Field(None, ge=0, description="coefficient of the KL added to the actor's loss")
    reward_estimator: Annotated[Literal["k1"], BeforeValidator(_only_k1)] = Field(
        "k1", description="how the KL in the reward is estimated: only k1 has the right gradient there"
    )
    loss_estimator: Estimator = Field(
        "k3", description="how the KL in the loss is estimated; with a + (k3+), its gradient is unbiased"
    )
    controller: Controller = Field(FixedCoefficient(), description="how the coefficient in the reward changes")

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the inputs that the KL term reads, as in `Algorithm.needs`."""
        reward = ("old_log_probs", "ref_log_probs") if self.in_reward is not None else ()
        return reward or (("ref_log_probs",) if self.in_loss is not None else ())
