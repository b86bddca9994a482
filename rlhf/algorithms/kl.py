"""Keeping the actor near the reference: estimators of the KL divergence, and controllers of its coefficient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhf.algorithms.base import Options

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Estimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


def kl_divergence(
    log_probs: Float[Tensor, "batch response"], ref_log_probs: Float[Tensor, "batch response"], estimator: Estimator
) -> Float[Tensor, "batch response"]:
    r"""Per-token estimates of :math:`KL(\pi \| \pi_{ref})` from tokens sampled by :math:`\pi`
    (J. Schulman, "Approximating KL divergence", 2020), with :math:`\Delta = \log\pi - \log\pi_{ref}`:

    - ``k1``: :math:`\Delta` (unbiased, may be negative)
    - ``abs``: :math:`|\Delta|`
    - ``k2``: :math:`\Delta^2 / 2` (biased, low variance)
    - ``k3``: :math:`e^{-\Delta} - 1 + \Delta` (unbiased, never negative); :math:`\Delta` is limited to ±20 and the
      result to ±10, as in the published code, so that one stray token cannot overflow.

    A ``+`` makes it straight-through: the value is the estimator's, the gradient that of k2, which alone has the
    gradient of the KL divergence as its expectation.
    """
    delta = log_probs - ref_log_probs
    if estimator.endswith("+"):
        value = _estimate(delta.detach(), estimator.removesuffix("+"))
        squared = 0.5 * delta.square()
        return squared - squared.detach() + value
    return _estimate(delta, estimator)


def _estimate(delta: Float[Tensor, "batch response"], estimator: str) -> Float[Tensor, "batch response"]:
    if estimator == "k1":
        return delta
    if estimator == "abs":
        return delta.abs()
    if estimator == "k2":
        return 0.5 * delta.square()
    delta = delta.clamp(-20.0, 20.0)
    return ((-delta).exp() - 1.0 + delta).clamp(-10.0, 10.0)


class FixedCoefficient(Options):
    """The coefficient stays what the config says."""

    type: Literal["fixed"] = "fixed"


class AdaptiveCoefficient(Options):
    r"""Steers the coefficient so that the measured KL nears a target (arXiv 1909.08593, section 2.2):

    .. math:: e = \operatorname{clip}(KL / KL_{target} - 1, -0.2, 0.2), \qquad \beta' = \beta (1 + e n / horizon)

    with n the trajectories of the iteration. The coefficient is committed with the advantages of each iteration.
    """

    type: Literal["adaptive"] = "adaptive"
    target: float = Field(gt=0, description="KL per token to aim for")
    horizon: int = Field(10_000, gt=0, description="trajectories over which the coefficient adapts")

    def __call__(self, coefficient: float, kl: float, trajectories: int) -> float:
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coefficient * (1.0 + error * trajectories / self.horizon)


Controller = Annotated[FixedCoefficient | AdaptiveCoefficient, Field(discriminator="type")]


class KLPenalty(Options):
    """The KL term: subtracted from the token rewards, added to the loss, or both; neither means no reference."""

    in_reward: float | None = Field(None, ge=0, description="coefficient of the KL subtracted from token rewards")
    in_loss: float | None = Field(None, ge=0, description="coefficient of the KL added to the actor's loss")
    estimator: Estimator = Field("k3", description="how KL is estimated from the sampled tokens")
    controller: Controller = Field(FixedCoefficient(), description="how the coefficient in the reward moves")

    @property
    def needs(self) -> tuple[str, ...]:
        reward = ("old_log_probs", "ref_log_probs") if self.in_reward is not None else ()
        return reward or (("ref_log_probs",) if self.in_loss is not None else ())
