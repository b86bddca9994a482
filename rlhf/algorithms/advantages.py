"""Advantage estimators: from per-token rewards to advantages and returns.

A trajectory's score, as the estimators below use it, is the sum of its unmasked token rewards. Those that compare the
trajectories of a prompt give every unmasked token its trajectory's advantage.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf.algorithms.base import Algorithm
from rlhf.algorithms.groups import Groups
from rlhf.algorithms.masked import sequence_mean, sequence_sum, whiten
from rlhf.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    Tokens = Float[Tensor, "batch response"]
    Scores = Float[Tensor, " batch"]


class AdvantageEstimator(Algorithm):
    """What all estimators have. Calling one gives advantages and returns, 0 where masked; `needs` names its inputs:

    - ``values`` [batch, response]: the critic's, before its update;
    - ``group_ids`` [batch]: equal for trajectories of the same prompt;
    - ``entropy`` [batch, response]: of the policy, in nats;
    - ``greedy_scores`` [batch]: the score of the greedy answer to the same prompt;
    - ``reward_parts``: each named part of the score, [batch].
    """

    whiten: bool = Field(False, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")
    clip_rewards: float | None = Field(
        None, gt=0, description="scores (and parts of them) are limited to ± this before anything; null: not limited"
    )
    drop_zero_std_groups: bool = Field(
        False, description="trajectories whose group has one score throughout do not enter the losses"
    )

    def finished(self, advantages: Tokens, mask: Tokens) -> Tokens:
        return whiten(advantages, mask) if self.whiten else advantages * mask

    def clipped(self, scores: Scores) -> Scores:
        return scores if self.clip_rewards is None else scores.clamp(-self.clip_rewards, self.clip_rewards)

    def teaches(self, scores: Scores, group_ids: Int[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Which trajectories there is something to learn from; the others enter neither the losses nor any statistic
        over the batch. Left out are flat groups, if asked for, and for an estimator that compares the trajectories of a
        prompt, one that has no other to be compared with.

        Args:
            scores: the score of each trajectory.
            group_ids: equal for trajectories of the same prompt.
        """
        groups = Groups(group_ids)
        if self.drop_zero_std_groups:
            return groups.differ(scores)
        return ~groups.alone if "group_ids" in self.needs else groups.size > 0


class GAE(AdvantageEstimator):
    r"""Generalized advantage estimation (arXiv 1506.02438, eq. 16), for PPO with a critic.

    .. math::
        \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}, \qquad R_t = A_t + V_t

    with :math:`V = A = 0` after the last token. Masked tokens (tool output) are stepped over: the next unmasked
    token follows the previous one. Returns are taken before the advantages are whitened.
    """

    type: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda: 0 trusts the critic, 1 the observed return")
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")
    needs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(self, token_rewards: Tokens, mask: Tokens, *, values: Tokens) -> tuple[Tokens, Tokens]:
        advantages = token_rewards.new_zeros(token_rewards.shape)
        next_value = token_rewards.new_zeros(token_rewards.shape[0])
        next_advantage = next_value
        for t in reversed(range(token_rewards.shape[1])):
            here = mask[:, t] > 0
            delta = token_rewards[:, t] + self.gamma * next_value - values[:, t]
            next_advantage = (delta + self.gamma * self.lam * next_advantage).where(here, next_advantage)
            next_value = values[:, t].where(here, next_value)
            advantages[:, t] = next_advantage
        return self.finished(advantages, mask), (advantages + values).where(mask > 0, 0.0)


class ReinforcePlusPlus(AdvantageEstimator):
    r"""REINFORCE++ (arXiv 2501.03262): discounted rewards-to-go, whitened over the whole batch; no critic, no groups.

    .. math:: R_t = r_t + \gamma R_{t+1}, \qquad A_t = \frac{R_t - \operatorname{mean}(R)}{\operatorname{std}(R)}

    Masked tokens (tool output) are stepped over, as in `gae`: what the model wrote before a tool answered has its part
    in the final reward. verl's code sets the return to 0 at every masked token instead, so that only the last turn
    learns from the final reward. The two agree where nothing within a response is masked.
    """

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")

    def __call__(self, token_rewards: Tokens, mask: Tokens) -> tuple[Tokens, Tokens]:
        returns = token_rewards.new_zeros(token_rewards.shape)
        following = token_rewards.new_zeros(token_rewards.shape[0])
        for t in reversed(range(token_rewards.shape[1])):
            following = (token_rewards[:, t] + self.gamma * following).where(mask[:, t] > 0, following)
            returns[:, t] = following
        return self.finished(returns, mask), returns * mask


class ReMax(AdvantageEstimator):
    r"""ReMax (arXiv 2310.10505): the score of the greedy answer to the same prompt is the baseline.

    .. math:: R_t = \sum_{s \ge t} r_s, \qquad A_t = R_t - R(x, y_{greedy})
    """

    type: Literal["remax"] = "remax"
    needs: ClassVar[tuple[str, ...]] = ("greedy_scores",)

    def __call__(self, token_rewards: Tokens, mask: Tokens, *, greedy_scores: Scores) -> tuple[Tokens, Tokens]:
        returns = token_rewards.where(mask > 0, 0.0).flip(-1).cumsum(-1).flip(-1)
        return self.finished(returns - greedy_scores[:, None], mask), returns * mask


class GroupEstimator(AdvantageEstimator):
    """One advantage for a trajectory, from its score and those of its group; 0 for one alone in its group, which has
    nothing to be compared with (the stage `advantages` leaves it out of the losses, too). There is nothing for a critic
    to learn: returns are the advantages."""

    needs: ClassVar[tuple[str, ...]] = ("group_ids",)

    def __call__(
        self, token_rewards: Tokens, mask: Tokens, *, group_ids: Int[Tensor, " batch"]
    ) -> tuple[Tokens, Tokens]:
        compared = self.compare(sequence_sum(token_rewards, mask), mask.sum(-1), Groups(group_ids))
        advantages = self.finished(compared[:, None] * mask, mask)
        return advantages, advantages

    @abstractmethod
    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Advantages [batch] from scores and numbers of unmasked tokens [batch]."""


def relative_to_group(scores: Scores, groups: Groups, norm_by_std: bool, epsilon: float) -> Scores:
    """The score less its group's mean, divided by its group's standard deviation if asked; see `GRPO`."""
    advantages = scores - groups.mean(scores)
    return advantages / (groups.std(scores) + epsilon) if norm_by_std else advantages


class GRPO(GroupEstimator):
    r"""Group-relative advantages (arXiv 2402.03300, eq. 4).

    .. math:: A_i = \frac{R_i - \operatorname{mean}(R_{group})}{\operatorname{std}(R_{group}) + \epsilon}

    The standard deviation is Bessel-corrected.
    """

    type: Literal["grpo"] = "grpo"
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        return relative_to_group(scores, groups, self.norm_by_std, self.epsilon)


class DrGRPO(GroupEstimator):
    r"""Dr. GRPO (arXiv 2503.20783): GRPO without the division, which favours easy and hard prompts.

    .. math:: A_i = R_i - \operatorname{mean}(R_{group})

    The paper also sums over tokens instead of averaging: ``loss.aggregate: seq-mean-token-sum-norm``.
    """

    type: Literal["dr_grpo"] = "dr_grpo"
    norm_by_std: Literal[False] = Field(False, description="never divided by the standard deviation")

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        return relative_to_group(scores, groups, norm_by_std=False, epsilon=0.0)


class GRPOPassK(GroupEstimator):
    r"""Group-relative advantages for pass@k (arXiv 2503.19595): only the best of a group learns, by its lead.

    .. math:: A_{best} = \frac{R_{best} - R_{second}}{\operatorname{std}(R_{group}) + \epsilon}, \qquad A_{other} = 0
    """

    type: Literal["grpo_passk"] = "grpo_passk"
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        best = groups.max(scores)
        at_best = scores == best
        tied = groups.sum(at_best.to(scores.dtype)) > 1
        second = groups.max(scores.where(~at_best, float("-inf")))
        lead = (best - second).where(at_best & ~tied & ~groups.alone, 0.0)
        return lead / (groups.std(scores) + self.epsilon) if self.norm_by_std else lead


class RLOO(GroupEstimator):
    r"""REINFORCE, leave one out (arXiv 2402.14740): the mean score of the others is the baseline.

    .. math:: A_i = R_i - \frac{1}{n - 1}\sum_{j \ne i} R_j = \frac{n}{n-1}\left(R_i - \operatorname{mean}(R)\right)
    """

    type: Literal["rloo"] = "rloo"

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        return groups.size * (scores - groups.mean(scores)) / (groups.size - 1).clamp(min=1)


class OPO(GroupEstimator):
    r"""On-policy optimization with the baseline of least variance (arXiv 2505.23585): scores weighted by length.

    .. math:: A_i = R_i - \frac{\sum_j |y_j| R_j}{\sum_j |y_j|}
    """

    type: Literal["opo"] = "opo"

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        return scores - groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1.0)


class GPG(GroupEstimator):
    r"""Group policy gradient (arXiv 2504.02546): the plain difference, scaled up by the batch's share of zero scores.

    .. math:: A_i = \alpha\,(R_i - \operatorname{mean}(R_{group})), \qquad \alpha = \frac{B}{|\{j : R_j \ne 0\}|}

    over the B trajectories that are learned from, as in the published code.
    """

    type: Literal["gpg"] = "gpg"

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        compared: Scores = scores - groups.mean(scores)
        return compared * (lengths > 0).sum() / scores.count_nonzero().clamp(min=1)


class ReinforcePlusPlusBaseline(GroupEstimator):
    r"""REINFORCE++ with a baseline (arXiv 2501.03262): the group's mean is taken away, the batch is whitened.

    .. math:: A_i = \frac{R_i - \operatorname{mean}(R_{group})}{\operatorname{std}_{batch}}
    """

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        return scores - groups.mean(scores)


class EGPO(AdvantageEstimator):
    r"""Entropy-guided advantages (arXiv 2508.05118): uncertain answers weigh more when right, less when wrong.

    .. math::
        A_i = A_i^{GRPO} + \lambda \operatorname{clip}\left(H_i, -\frac{|A_i^{GRPO}|}{\alpha},
        \frac{|A_i^{GRPO}|}{\alpha}\right)

    :math:`H_i` is the mean entropy over the response's unmasked tokens, by the policy that generated it.
    """

    type: Literal["egpo"] = "egpo"
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")
    lam: float = Field(0.4, ge=0, description="weight of the entropy")
    alpha: float = Field(2.0, gt=0, description="the entropy counts up to the advantage's size divided by this")
    needs: ClassVar[tuple[str, ...]] = ("group_ids", "entropy")

    def __call__(
        self, token_rewards: Tokens, mask: Tokens, *, group_ids: Int[Tensor, " batch"], entropy: Tokens
    ) -> tuple[Tokens, Tokens]:
        scores = sequence_sum(token_rewards, mask)
        compared = relative_to_group(scores, Groups(group_ids), self.norm_by_std, self.epsilon)
        limit = compared.abs() / self.alpha
        guided = compared + self.lam * sequence_mean(entropy, mask).clamp(-limit, limit)
        advantages = self.finished(guided[:, None] * mask, mask)
        return advantages, advantages


class GDPO(AdvantageEstimator):
    r"""Decoupled normalization (arXiv 2601.05242): each part of the reward is compared within its group on its own.

    .. math:: A_i = \operatorname{whiten}\left(\sum_k w_k A_{ik}^{GRPO}\right)

    so that a part with a large spread does not drown the others. It reads the parts alone, not the token rewards;
    whether a group is flat is judged by the score.
    """

    type: Literal["gdpo"] = "gdpo"
    parts: tuple[str, ...] = Field(
        min_length=1, description="names of the reward's parts, which it gives for every response; `score` is one"
    )
    weights: tuple[float, ...] | None = Field(None, description="a weight for each part; null: 1 each")
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")
    needs: ClassVar[tuple[str, ...]] = ("group_ids", "reward_parts")

    @model_validator(mode="after")
    def _a_weight_each(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.parts):
            raise ValueError(f"weights has {len(self.weights)} values for {len(self.parts)} parts: give one each")
        return self

    def __call__(
        self,
        token_rewards: Tokens,
        mask: Tokens,
        *,
        group_ids: Int[Tensor, " batch"],
        reward_parts: Mapping[str, Scores],
    ) -> tuple[Tokens, Tokens]:
        if missing := [name for name in self.parts if name not in reward_parts]:
            raise UserError(
                f"algorithm.advantage.parts names {missing[0]}, but the reward gives every trajectory only "
                f"{', '.join(reward_parts)}"
            )
        groups = Groups(group_ids)
        total = mask.new_zeros(len(mask))
        for name, weight in zip(self.parts, self.weights or (1.0,) * len(self.parts), strict=True):
            part = reward_parts[name].where(mask.sum(-1) > 0, 0.0)  # as the scores: none without a token
            total = total + weight * relative_to_group(part, groups, self.norm_by_std, self.epsilon)
        advantages = self.finished(total[:, None] * mask, mask)
        return advantages, advantages


Advantage = Annotated[
    GAE
    | GRPO
    | DrGRPO
    | GRPOPassK
    | RLOO
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | ReMax
    | OPO
    | GPG
    | GDPO
    | EGPO,
    Field(discriminator="type"),
]
