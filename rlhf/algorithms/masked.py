"""Sums and means over the tokens of a padded batch, with the normalizers of the whole mini-batch.

A mini-batch is computed in micro-batches, so no loss may divide by what it happens to see: every mean is
a sum over the micro-batch divided by a count taken over the mini-batch (`Totals`). Micro-batch losses then
add up to the mini-batch's loss, however it was cut or padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to ± this before they are exponentiated, as in the published code."""

EPSILON = 1e-8
"""Added to counts where the published code does: no tokens, mean 0."""


@dataclass(frozen=True)
class LossNormalizers:
    """What a mini-batch counts in all."""

    tokens: int
    """Unmasked response tokens."""
    sequences: int
    """Trajectories that have at least one."""
    horizon: int
    """A length that all trajectories have in common; unless told otherwise, that of the longest response."""

    @classmethod
    def of(cls, mask: Float[Tensor, "batch response"]) -> LossNormalizers:
        return cls(
            tokens=int(mask.sum().item()), sequences=int((mask.sum(-1) > 0).sum().item()), horizon=mask.shape[-1]
        )


def masked_mean(
    x: Float[Tensor, "batch response"], mask: Float[Tensor, "batch response"], normalizers: LossNormalizers
) -> Float[Tensor, ""]:
    """This micro-batch's share of the mean over the mini-batch's unmasked tokens; 0 where there are none."""
    return x.where(mask > 0, 0.0).sum() / (normalizers.tokens + EPSILON)


def aggregate(
    loss: Float[Tensor, "batch response"],
    mask: Float[Tensor, "batch response"],
    how: Aggregation,
    normalizers: LossNormalizers,
) -> Float[Tensor, ""]:
    """One number from per-token losses.

    - ``token-mean``: every token weighs the same (DAPO, arXiv 2503.14476).
    - ``token-sum``: the plain sum.
    - ``seq-mean-token-sum``: tokens are summed, trajectories averaged.
    - ``seq-mean-token-mean``: each trajectory's mean, averaged (GRPO, arXiv 2402.03300).
    - ``seq-mean-token-sum-norm``: tokens are summed and divided by one length for all, trajectories averaged
      (Dr. GRPO, arXiv 2503.20783); the length is ``rollout.max_response_tokens``.

    Masked positions never count, whatever they hold; a trajectory with no unmasked token counts nowhere.
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
    """The sum over each trajectory's unmasked tokens."""
    return x.where(mask > 0, 0.0).sum(-1)


def sequence_mean(x: Float[Tensor, "batch response"], mask: Float[Tensor, "batch response"]) -> Float[Tensor, " batch"]:
    """The mean over each trajectory's unmasked tokens; 0 where there are none."""
    return sequence_sum(x, mask) / (mask.sum(-1) + EPSILON)


def whiten(
    x: Float[Tensor, "batch response"], mask: Float[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """Shift and scale to zero mean and unit variance over unmasked positions (Bessel-corrected variance)."""
    count = mask.sum()
    mean = (x * mask).sum() / count.clamp(min=1.0)
    variance = ((x - mean) ** 2 * mask).sum() / (count - 1.0).clamp(min=1.0)
    return (x - mean) * (variance + 1e-8).rsqrt() * mask
