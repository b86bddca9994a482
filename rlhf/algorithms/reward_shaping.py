"""Penalties that are added to scores before advantages are estimated."""

from __future__ import annotations

from jaxtyping import Float
from pydantic import Field

from ratchet.rlhf.algorithms.base import Options
from ratchet.rlhf.algorithms.tensor import Tensor


class OverlongPenalty(Options):
    r"""DAPO's soft penalty for overlong responses (arXiv 2503.14476, eq. 13).

    .. math:: p = -f \operatorname{clip}\left(\frac{|y| - (L_{max} - L_{buffer})}{L_{buffer}}, 0, 1\right)

    :math:`L_{max}` is ``rollout.max_response_tokens``.
    """

    buffer_tokens: int = Field(gt=0, description="number of tokens before the limit over which the penalty grows")
    factor: float = Field(1.0, gt=0, description="the penalty at the limit")

    def __call__(self, lengths: Float[Tensor, " batch"], max_response_tokens: int) -> Float[Tensor, " batch"]:
        """Computes the penalty, 0 or negative, to add to each score; `lengths` are in tokens."""
        beyond = lengths - (max_response_tokens - self.buffer_tokens)
        return -self.factor * (beyond / self.buffer_tokens).clamp(0.0, 1.0)
