"""Corrections for the mismatch between the rollout engine's log-probs and the trainer's.

The two differ because of different kernels, different precision, or older weights.

Notation: :math:`\\rho = \\pi_{old} / \\pi_{rollout}` is the ratio of a token.
"""

from __future__ import annotations

import math
from typing import Literal

from jaxtyping import Float
from pydantic import Field, model_validator

from ratchet.rlhf.algorithms.base import Options
from ratchet.rlhf.algorithms.masked import (
    EPSILON,
    MAX_LOG_RATIO,
    LossNormalizers,
    masked_mean,
    sequence_mean,
    sequence_sum,
)
from ratchet.rlhf.algorithms.tensor import Tensor
from ratchet.rlhf.metrics import Statistic

Tokens = Float[Tensor, "batch response"]


class ImportanceWeights(Options):
    r"""Importance weights, truncated (arXiv 1802.01561) or masked on both sides (IcePop, arXiv 2510.18855).

    .. math:: w_t = \min(\rho_t, C) \qquad\text{or}\qquad w_t = \rho_t\,[c \le \rho_t \le C]

    per token; at the level of sequences, :math:`\prod_t \rho_t` replaces :math:`\rho_t`. Log-ratios are clamped to ±20.
    """

    level: Literal["token", "sequence"] = Field("token", description="one weight per token or per trajectory")
    upper: float = Field(2.0, gt=0, description="larger weights are truncated to this; with `lower`, they become 0")
    lower: float | None = Field(None, gt=0, description="smaller weights become 0; null: one-sided truncation")
    normalize: bool = Field(False, description="scale the weights to mean 1 over the batch")

    @model_validator(mode="after")
    def _ordered(self) -> ImportanceWeights:
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"lower {self.lower} is above upper {self.upper}")
        return self

    def __call__(self, old_log_probs: Tokens, rollout_log_probs: Tokens, mask: Tokens) -> Tokens:
        """Computes the truncated or masked weight of each token, 0 where `mask` is 0.

        `old_log_probs` are the trainer's, `rollout_log_probs` the rollout engine's, both in nats.
        """
        weights = self.untruncated(old_log_probs, rollout_log_probs, mask)
        if self.lower is None:
            weights = weights.clamp(max=self.upper)
        else:
            weights = weights.where((weights >= self.lower) & (weights <= self.upper), 0.0)
        return weights / self._mean(weights, mask) if self.normalize else weights

    def untruncated(self, old_log_probs: Tokens, rollout_log_probs: Tokens, mask: Tokens) -> Tokens:
        """Computes the weight of each token before truncation: the ratio of the token or of its trajectory."""
        log_ratio = (old_log_probs - rollout_log_probs).where(mask > 0, 0.0)
        if self.level == "sequence":
            log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
        return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * mask

    def _mean(self, weights: Tokens, mask: Tokens) -> Tensor:
        """Averages over tokens or trajectories; returns 1 if all weights are 0, so that dividing keeps them 0."""
        if self.level == "token":
            mean = masked_mean(weights, mask, LossNormalizers.of(mask))
        else:
            nonempty = (mask.sum(-1) > 0).to(mask.dtype)
            mean = (sequence_mean(weights, mask) * nonempty).sum() / nonempty.sum().clamp(min=EPSILON)
        return mean.where(mean > EPSILON, 1.0)

    def metrics(self, old_log_probs: Tokens, rollout_log_probs: Tokens, mask: Tokens) -> dict[str, Tensor]:
        """Summarizes the weights over the unmasked tokens, before they are scaled by `normalize`."""
        raw = self.untruncated(old_log_probs, rollout_log_probs, mask)
        weights = self.model_copy(update={"normalize": False})(old_log_probs, rollout_log_probs, mask)
        normalizers, unmasked = LossNormalizers.of(mask), mask > 0
        lower = 1.0 / self.upper if self.lower is None else self.lower
        mean = masked_mean(weights, mask, normalizers)
        spread = masked_mean(weights.square(), mask, normalizers) - mean.square()
        return {
            "rollout_is_mean": mean,
            "rollout_is_max": weights.masked_fill(~unmasked, float("-inf")).max(),
            "rollout_is_min": weights.masked_fill(~unmasked, float("inf")).min(),
            "rollout_is_std": spread.clamp(min=0.0).sqrt(),
            "rollout_is_ratio_fraction_high": masked_mean((raw > self.upper).to(mask.dtype), mask, normalizers),
            "rollout_is_ratio_fraction_low": masked_mean((raw < lower).to(mask.dtype), mask, normalizers),
            "rollout_is_eff_sample_size": effective_sample_size(weights, mask),
        }


class Rejection(Options):
    r"""Hard trust region: leaves tokens or trajectories out of the losses if their estimated divergence is too large.

    .. math:: k_1 = -\log\rho, \qquad k_2 = \tfrac12 (\log\rho)^2, \qquad k_3 = \rho - 1 - \log\rho

    of single tokens, or their sum, mean or maximum over a trajectory. k1 is signed: `lower` and `upper` bound
    :math:`e^{k_1} = 1/\rho` (of the sum or the mean). k2 and k3 are bounded by `upper` only.
    """

    statistic: Statistic = Field(description="the statistic that is bounded")
    upper: float = Field(gt=0, description="largest value that is kept")
    lower: float | None = Field(None, gt=0, description="k1 only: smallest value that is kept; null: 1 / upper")

    @model_validator(mode="after")
    def _sides(self) -> Rejection:
        if self.lower is not None and not self.statistic.endswith("k1"):
            raise ValueError(f"lower is set, but {self.statistic} has one side only: remove it")
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"lower {self.lower} is above upper {self.upper}")
        if self.lower is None and self.statistic.endswith("k1") and self.upper < 1.0:
            raise ValueError(f"upper is {self.upper}: below 1, set lower too")
        return self

    def __call__(self, old_log_probs: Tokens, rollout_log_probs: Tokens, mask: Tokens) -> Tokens:
        """Removes rejected tokens from the mask."""
        log_ratio = (old_log_probs - rollout_log_probs).where(mask > 0, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        over, _, kind = self.statistic.rpartition("_")
        divergence = {
            "k1": lambda: -log_ratio,
            "k2": lambda: 0.5 * log_ratio.square(),
            "k3": lambda: log_ratio.exp() - 1.0 - log_ratio,
        }[kind]()
        whole = {
            "token": lambda: divergence,
            "seq_sum": lambda: sequence_sum(divergence, mask)[:, None],
            "seq_mean": lambda: sequence_mean(divergence, mask)[:, None],
            "seq_max": lambda: divergence.amax(-1, keepdim=True),
        }[over]()
        if kind == "k1":
            lower = 1.0 / self.upper if self.lower is None else self.lower
            stays = (whole >= math.log(lower)) & (whole <= math.log(self.upper))
        else:
            stays = whole <= self.upper
        return mask * stays


class RolloutCorrection(Options):
    """Reconciles the log-probs of the rollout engine with those of the trainer.

    `weights` and `rejection` compare the actor before the update with the rollout. With `bypass`, that actor's
    log-probs are unknown, and the loss compares the current ones (verl's `bypass_mode`). Weights are then for a loss
    without a ratio.
    """

    bypass: bool = Field(
        False,
        description="use the rollout's log-probs as the old ones and skip the old-log-prob stage; weights and "
        "rejection then compare the current policy with the rollout, in the loss",
    )
    weights: ImportanceWeights | None = Field(None, description="importance weights on the policy loss")
    rejection: tuple[Rejection, ...] = Field(
        (), description="trust regions; tokens outside any of them are left out of the losses"
    )

    @model_validator(mode="after")
    def _bypass_sees_micro_batches(self) -> RolloutCorrection:
        if self.bypass and self.weights is not None and self.weights.normalize:
            raise ValueError(
                "weights.normalize needs the weights of the whole batch, but with bypass the loss computes them "
                "micro-batch by micro-batch: remove one of them"
            )
        return self

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the inputs that the correction reads, as in `Algorithm.needs`."""
        return ("old_log_probs",) if self.weights is not None or self.rejection else ()


def effective_sample_size(weights: Tokens, mask: Tokens) -> Tensor:
    r"""Computes :math:`(\operatorname{mean} w)^2 / \operatorname{mean}(w^2)`, the effective share of the tokens."""
    normalizers = LossNormalizers.of(mask)
    normalized = weights / (masked_mean(weights, mask, normalizers) + EPSILON)
    return 1.0 / masked_mean(normalized.square(), mask, normalizers).clamp(min=EPSILON)


def off_policy_metrics(old_log_probs: Tokens, rollout_log_probs: Tokens, mask: Tokens) -> dict[str, Tensor]:
    r"""Measure how far the trainer's policy is from the rollout's:

    - ``kl``: :math:`E[-\log\rho]`; ``k3_kl``: :math:`E[\rho - 1 - \log\rho]`, both per token;
    - ``training_ppl``, ``rollout_ppl``: perplexity :math:`e^{-\overline{\log\pi}}` of a trajectory, averaged;
      ``*_log_ppl``: its logarithm, averaged; ``log_ppl_*`` and ``ppl_ratio``: difference and ratio of the two;
    - ``chi2_token``: :math:`E[\rho^2] - 1`; ``chi2_seq``: the same with the product over a trajectory.

    Args:
        old_log_probs: the trainer's log-probs in nats, float32, shape (batch, response).
        rollout_log_probs: the rollout engine's log-probs in nats, same shape.
        mask: 1 for tokens that count in the loss, 0 for the rest, same shape.

    Returns:
        Scalars by metric name.
    """
    normalizers = LossNormalizers.of(mask)
    log_ratio = (old_log_probs - rollout_log_probs).where(mask > 0, 0.0)
    limited = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    training, rollout = -sequence_mean(old_log_probs, mask), -sequence_mean(rollout_log_probs, mask)
    difference = training - rollout
    return {
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": rollout.exp().mean(),
        "rollout_log_ppl": rollout.mean(),
        "kl": masked_mean(-log_ratio, mask, normalizers),
        "k3_kl": masked_mean(limited.exp() - limited - 1.0, mask, normalizers),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": masked_mean((2.0 * limited).exp(), mask, normalizers) - 1.0,
        "chi2_seq": (2.0 * log_ratio.sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp().mean() - 1.0,
    }
