"""Sums and means over the tokens of a padded batch, with the normalizers of the whole mini-batch.

A mini-batch is computed in micro-batches, so every mean is a sum over the micro-batch divided by a count over the
whole mini-batch (`LossNormalizers`). The micro-batch losses then add up to the loss of the mini-batch, however it is
split or padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Num

from ratchet.rlhf.algorithms.tensor import Tensor

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this value before exponentiation, as in the published code."""

EPSILON = 1e-8
"""Added to counts where the published code does, so that a mean over no tokens is 0."""


@dataclass(frozen=True)
class LossNormalizers:
    """Counts over a whole mini-batch, by which losses are divided."""

    tokens: int
    """Number of unmasked response tokens."""
    sequences: int
    """Number of trajectories with at least one unmasked token."""
    horizon: int
    """Length in tokens by which `seq-mean-token-sum-norm` divides; by default the longest response's."""

    @classmethod
    def of(cls, mask: Num[Tensor, "batch response"]) -> LossNormalizers:
        """Counts a whole mini-batch, with the width of the mask as `horizon`."""
        return cls(
            tokens=int(mask.sum().item()), sequences=int((mask.sum(-1) > 0).sum().item()), horizon=mask.shape[-1]
        )


def masked_mean(
    x: Float[Tensor, "batch response"], mask: Float[Tensor, "batch response"], normalizers: LossNormalizers
) -> Float[Tensor, ""]:
    """Computes a micro-batch's contribution to the mean over the mini-batch's unmasked tokens; 0 if it has none."""
    return x.where(mask > 0, 0.0).sum() / (normalizers.tokens + EPSILON)


def aggregate(
    loss: Float[Tensor, "batch response"],
    mask: Float[Tensor, "batch response"],
    how: Aggregation,
    normalizers: LossNormalizers,
) -> Float[Tensor, ""]:
    """Reduce per-token losses to a scalar.

    - ``token-mean``: mean over all tokens (DAPO, arXiv 2503.14476).
    - ``token-sum``: sum over all tokens.
    - ``seq-mean-token-sum``: sum over the tokens of each trajectory, then mean over trajectories.
    - ``seq-mean-token-mean``: mean over the tokens of each trajectory, then mean over trajectories (GRPO, arXiv
      2402.03300).
    - ``seq-mean-token-sum-norm``: sum over the tokens of each trajectory divided by ``rollout.max_response_tokens``,
      then mean over trajectories (Dr. GRPO, arXiv 2503.20783).

    Masked positions are ignored, whatever their values. Trajectories with no unmasked token are not counted.

    Args:
        loss: loss of each token, float32, shape (batch, response).
        mask: 1 for tokens that count, 0 for the rest, same shape.
        how: one of the names above.
        normalizers: counts over the whole mini-batch.

    Returns:
        A scalar; it adds up over the micro-batches of a mini-batch.
    """
    loss = loss.where(mask > 0, 0.0)
    if how == "token-mean":
        return loss.sum() / max(normalizers.tokens, 1)
    if how == "token-sum":
        return loss.sum()
    per_sequence = loss.sum(-1)
    if how == "seq-mean-token-mean":
        per_sequence = per_sequence / (mask.sum(-1) + EPSILON)
    if how == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / normalizers.horizon
    return per_sequence.sum() / max(normalizers.sequences, 1)


def sequence_sum(x: Float[Tensor, "batch response"], mask: Float[Tensor, "batch response"]) -> Float[Tensor, " batch"]:
    """Sums over the unmasked tokens of each trajectory."""
    return x.where(mask > 0, 0.0).sum(-1)


def sequence_mean(x: Float[Tensor, "batch response"], mask: Float[Tensor, "batch response"]) -> Float[Tensor, " batch"]:
    """Averages over the unmasked tokens of each trajectory; 0 without any."""
    return sequence_sum(x, mask) / (mask.sum(-1) + EPSILON)


def whiten(
    x: Float[Tensor, "batch response"], mask: Float[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """Shifts and scales to zero mean and unit variance over unmasked positions (Bessel-corrected); 0 where masked."""
    unmasked = x[mask > 0]
    # equal values leave only rounding errors, which the division would make large
    if (unmasked == unmasked[:1]).all():
        return x.new_zeros(x.shape)
    count = mask.sum()
    mean = (x * mask).sum() / count.clamp(min=1.0)
    variance = ((x - mean) ** 2 * mask).sum() / (count - 1.0).clamp(min=1.0)
    return (x - mean) * (variance + 1e-8).rsqrt() * mask
