"""Advantage estimators: from per-token rewards to advantages and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rlhf.algorithms.base import Algorithm
from rlhf.algorithms.masked import whiten

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


class GAE(Algorithm):
    r"""Generalized advantage estimation (arXiv 1506.02438, eq. 16), for PPO with a critic.

    .. math::
        \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}, \qquad R_t = A_t + V_t

    with :math:`V = A = 0` after the last token. Masked tokens (tool output) are stepped over: the next unmasked
    token follows the previous one. Returns are taken before the advantages are whitened.
    """

    type: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda: 0 trusts the critic, 1 the observed return")
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch")
    needs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(
        self,
        token_rewards: Float[Tensor, "batch response"],
        mask: Float[Tensor, "batch response"],
        *,
        values: Float[Tensor, "batch response"],
    ) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
        advantages = token_rewards.new_zeros(token_rewards.shape)
        next_value = token_rewards.new_zeros(token_rewards.shape[0])
        next_advantage = next_value
        for t in reversed(range(token_rewards.shape[1])):
            here = mask[:, t] > 0
            delta = token_rewards[:, t] + self.gamma * next_value - values[:, t]
            next_advantage = (delta + self.gamma * self.lam * next_advantage).where(here, next_advantage)
            next_value = values[:, t].where(here, next_value)
            advantages[:, t] = next_advantage
        returns = (advantages + values) * mask
        return whiten(advantages, mask) if self.whiten else advantages * mask, returns


class GRPO(Algorithm):
    r"""Group-relative advantages (arXiv 2402.03300, eq. 4): a trajectory against the others of its prompt.

    .. math:: A_i = \frac{R_i - \operatorname{mean}(R_{group})}{\operatorname{std}(R_{group}) + \epsilon}

    :math:`R_i` is the sum of the trajectory's unmasked rewards; every such token gets :math:`A_i`. The standard
    deviation is Bessel-corrected. ``norm_by_std: false`` leaves the division out (Dr. GRPO, arXiv 2503.20783). A
    trajectory alone in its group has nothing to be compared with: mean 0 and deviation 1, so its advantage is its
    reward, as in the published code.
    """

    type: Literal["grpo"] = "grpo"
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")
    needs: ClassVar[tuple[str, ...]] = ("groups",)

    def __call__(
        self,
        token_rewards: Float[Tensor, "batch response"],
        mask: Float[Tensor, "batch response"],
        *,
        groups: Int[Tensor, " batch"],
    ) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
        scores = token_rewards.where(mask > 0, 0.0).sum(-1)
        _, group = groups.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        size = group.bincount()
        alone = size == 1
        total = scores.new_zeros(len(size)).index_add(0, group, scores)
        mean = (total / size).where(~alone, 0.0)
        squares = scores.new_zeros(len(size)).index_add(0, group, (scores - mean[group]) ** 2)
        std = (squares / (size - 1).clamp(min=1)).sqrt().where(~alone, 1.0)
        advantages = scores - mean[group]
        if self.norm_by_std:
            advantages = advantages / (std[group] + self.epsilon)
        spread = advantages[:, None] * mask
        return spread, spread
