"""Policy losses: from log-probs, old log-probs and advantages to the number that the actor minimizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlhf.algorithms.base import Algorithm
from rlhf.algorithms.masked import Aggregation, Totals, aggregate, masked_mean

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Metrics = dict[str, "Float[Tensor, '']"]


class PPOClip(Algorithm):
    r"""PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with asymmetric clipping (arXiv 2503.14476) and the dual
    clip for negative advantages (arXiv 1912.09729, eq. 5). With :math:`\rho = e^{\log\pi - \log\pi_{old}}`:

    .. math::
        L &= \max\left(-\rho A,\; -\operatorname{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high}) A\right) \\
        L &\leftarrow \min(L, -c A) \quad\text{where } A < 0

    The log-ratio is limited to ±20 so that it never overflows.
    """

    type: Literal["ppo"] = Field("ppo", description="the policy loss")
    clip_ratio_low: float = Field(0.2, gt=0, lt=1, description="how far below 1 the ratio may go")
    clip_ratio_high: float = Field(0.2, gt=0, description="how far above 1 the ratio may go")
    clip_ratio_c: float = Field(3.0, gt=1, description="dual clip: bound of the ratio where the advantage is negative")
    aggregate: Aggregation = Field("token-mean", description="how token losses become one number")

    def __call__(
        self,
        log_probs: Float[Tensor, "batch response"],
        old_log_probs: Float[Tensor, "batch response"],
        advantages: Float[Tensor, "batch response"],
        mask: Float[Tensor, "batch response"],
        totals: Totals,
    ) -> tuple[Float[Tensor, ""], Metrics]:
        log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
        ratio = log_ratio.exp()
        plain = -ratio * advantages
        clipped = -ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high) * advantages
        surrogate = plain.maximum(clipped)
        bound = -self.clip_ratio_c * advantages
        negative = advantages < 0
        loss = surrogate.minimum(bound).where(negative, surrogate)
        return aggregate(loss, mask, self.aggregate, totals), {
            "pg_clipfrac": masked_mean((clipped > plain).to(loss.dtype), mask, totals),
            "pg_clipfrac_lower": masked_mean(((surrogate > bound) & negative).to(loss.dtype), mask, totals),
            "ppo_kl": masked_mean(-log_ratio.detach(), mask, totals),
        }
