"""Advantage estimators: compute advantages and returns from per-token rewards.

The score of a trajectory is the sum of its unmasked token rewards. Estimators that compare the trajectories of a prompt
give every unmasked token the advantage of its trajectory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator

from ratchet.rlhf.algorithms.base import Algorithm
from ratchet.rlhf.algorithms.groups import Groups
from ratchet.rlhf.algorithms.masked import EPSILON, sequence_mean, sequence_sum, whiten
from ratchet.rlhf.algorithms.tensor import Tensor
from ratchet.rlhf.algorithms.turn_values import Turns
from ratchet.rlhf.errors import UserError

Tokens = Float[Tensor, "batch response"]
TokenNumbers = Int[Tensor, "batch response"]
Scores = Float[Tensor, " batch"]


class AdvantageEstimator(Algorithm):
    """Base class of all estimators.

    An estimator is called with ``token_rewards`` and ``mask``, float32, shape (batch, response), and with the inputs
    that `needs` names:

    - ``values``, shape (batch, response): the critic's values before its update;
    - ``group_ids``, shape (batch,): equal for trajectories of the same prompt;
    - ``entropy``, shape (batch, response): entropy of the policy, in nats;
    - ``old_log_probs``, shape (batch, response): log-probs of the policy before its update, in nats;
    - ``sum_pi_squared``, shape (batch, response): sum of the squared probabilities of all tokens that the policy could
      have drawn;
    - ``greedy_scores``, shape (batch,): score of the greedy answer to the same prompt;
    - ``turn_values``, shape (batch, response): value of the state in which each token's turn begins, the mean of what
      its continuations earn (`rollout.continuations`);
    - ``reward_parts``: each named part of the score, shape (batch,);
    - ``turns``, int64, shape (batch, response): number of the turn that each token belongs to, in its trajectory;
    - ``states``, int64, shape (batch, response): equal for tokens whose turns follow the same text: the same answer of
      the environment, or the prompt.

    It returns advantages and returns, float32, shape (batch, response), 0 where masked, and may return metrics of the
    batch, by name, as a third item.
    """

    if TYPE_CHECKING:  # each estimator declares the inputs that it needs
        __call__: Callable[..., tuple[Tokens, Tokens] | tuple[Tokens, Tokens, Mapping[str, float]]]

    learns_from_reward: ClassVar[bool] = True
    """False if the reward has no effect."""
    whiten: bool = Field(False, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")
    clip_rewards: float | None = Field(
        None, gt=0, description="scores and their parts are clamped to ± this value first; null: no limit"
    )
    drop_zero_std_groups: bool = Field(
        False, description="leave trajectories out of the losses if all scores of their group are equal"
    )

    def finished(self, advantages: Tokens, mask: Tokens) -> Tokens:
        """Whitens advantages if configured, and sets masked positions to 0."""
        return whiten(advantages, mask) if self.whiten else advantages * mask

    def clipped(self, scores: Scores) -> Scores:
        """Clamps scores, or parts of them, to ± `clip_rewards` if configured."""
        return scores if self.clip_rewards is None else scores.clamp(-self.clip_rewards, self.clip_rewards)

    def teaches(self, scores: Scores, lengths: Scores, group_ids: Int[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Finds the trajectories to train on; the losses and the batch statistics leave the others out.

        `lengths` are numbers of unmasked tokens. With `drop_zero_std_groups`, groups whose scores are all equal are
        left out. Estimators that compare the trajectories of a prompt leave out a trajectory that is alone in its
        group.
        """
        groups = Groups(group_ids)
        if self.drop_zero_std_groups:
            return groups.differ(scores)
        return ~groups.alone if "group_ids" in self.needs else groups.size > 0


def rewards_to_go(
    rewards: Float[Tensor, "batch step"], mask: Float[Tensor, "batch step"], gamma: float
) -> Float[Tensor, "batch step"]:
    """Sums up each step's reward and the discounted rewards of the following steps. Masked steps are skipped.

    A step is a token or a turn; a masked one gets the sum of the step that follows.
    """
    sums = rewards.new_zeros(rewards.shape)
    following = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        following = (rewards[:, t] + gamma * following).where(mask[:, t] > 0, following)
        sums[:, t] = following
    return sums


def generalized_advantages(
    rewards: Float[Tensor, "batch step"],
    values: Float[Tensor, "batch step"],
    mask: Float[Tensor, "batch step"],
    gamma: float,
    lam: float | Scores,
) -> Float[Tensor, "batch step"]:
    """Computes the advantages of `GAE` for each step, a token or a turn. Masked steps are skipped.

    `values` are those of the state before each step. A masked step gets the advantage of the step that follows. `lam`
    may differ from trajectory to trajectory.
    """
    advantages = rewards.new_zeros(rewards.shape)
    next_value = rewards.new_zeros(rewards.shape[0])
    next_advantage = next_value
    for t in reversed(range(rewards.shape[1])):
        unmasked = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage).where(unmasked, next_advantage)
        next_value = values[:, t].where(unmasked, next_value)
        advantages[:, t] = next_advantage
    return advantages


class GAE(AdvantageEstimator):
    r"""Generalized advantage estimation (arXiv 1506.02438, eq. 16), for PPO with a critic.

    .. math::
        \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}, \qquad R_t = A_t + V_t

    with :math:`V = A = 0` after the last token. Masked tokens (tool output) are skipped: t+1 is the next unmasked
    token. Returns are computed before the advantages are whitened. With `critic_lam`, they are computed with this
    lambda instead (VC-PPO, arXiv 2503.01491): 1 lets the critic learn the observed return, however long the response.
    """

    type: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token (verl, TRL, OpenRLHF)")
    lam: float = Field(
        0.95,
        ge=0,
        le=1,
        description="GAE's lambda: 0 trusts the critic, 1 the observed return (TRL; verl and OpenRLHF have 1)",
    )
    critic_lam: float | None = Field(
        None, ge=0, le=1, description="lambda of the returns, which the critic learns; null: `lam`"
    )
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")
    needs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(self, token_rewards: Tokens, mask: Tokens, *, values: Tokens) -> tuple[Tokens, Tokens]:
        """Computes advantages and returns from the critic's values before its update."""
        advantages = generalized_advantages(token_rewards, values, mask, self.gamma, self.lam)
        of_critic = advantages
        if self.critic_lam is not None:
            of_critic = generalized_advantages(token_rewards, values, mask, self.gamma, self.critic_lam)
        return self.finished(advantages, mask), (of_critic + values).where(mask > 0, 0.0)


class VAPO(AdvantageEstimator):
    r"""Generalized advantage estimation with a lambda that grows with the response's length (VAPO, arXiv 2504.05118).

    .. math:: \lambda_i = \max\left(0,\; 1 - \frac{1}{\alpha |y_i|}\right)

    in `gae`, so that the rewards of the last tokens reach the first ones of a long response; |y| counts unmasked
    tokens. Returns have a lambda of their own, `critic_lam`. The paper also adds the likelihood of right answers to the
    loss, clips higher (``loss.clip_ratio_high: 0.28``) and trains the critic alone first
    (``critic.warmup_iterations``).
    """

    type: Literal["vapo"] = "vapo"
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    alpha: float = Field(0.05, gt=0, description="how fast lambda grows: it is 0 up to a length of 1 / alpha tokens")
    critic_lam: float = Field(1.0, ge=0, le=1, description="lambda of the returns, which the critic learns")
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")
    needs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(self, token_rewards: Tokens, mask: Tokens, *, values: Tokens) -> tuple[Tokens, Tokens]:
        """Computes advantages and returns from the critic's values before its update."""
        lam = (1.0 - 1.0 / (self.alpha * mask.sum(-1).clamp(min=1.0))).clamp(min=0.0)
        advantages = generalized_advantages(token_rewards, values, mask, self.gamma, lam)
        of_critic = generalized_advantages(token_rewards, values, mask, self.gamma, self.critic_lam)
        return self.finished(advantages, mask), (of_critic + values).where(mask > 0, 0.0)


class TurnGAE(AdvantageEstimator):
    r"""Generalized advantage estimation over turns (Turn-PPO, arXiv 2512.17008): a turn of the policy is one action.

    .. math::
        \delta_k = r_k + \gamma V_{k+1} - V_k, \qquad A_k = \delta_k + \gamma\lambda A_{k+1}, \qquad R_k = A_k + V_k

    where :math:`r_k` is the sum of the rewards of the turn's tokens, and :math:`V_k` the critic's value at its first
    token: of the state that the policy has read when the turn begins. :math:`V = A = 0` after the last turn. All
    tokens of a turn have its advantage and its return, so the critic learns at each of them what the turn leads to.
    Returns are computed before the advantages are whitened.
    """

    type: Literal["turn_gae"] = "turn_gae"
    gamma: float = Field(1.0, ge=0, le=1, description="discount per turn")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda: 0 trusts the critic, 1 the observed return")
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")
    needs: ClassVar[tuple[str, ...]] = ("values", "turns")

    def __call__(
        self, token_rewards: Tokens, mask: Tokens, *, values: Tokens, turns: TokenNumbers
    ) -> tuple[Tokens, Tokens]:
        """Computes the advantage and the return of each turn."""
        by_turn = Turns(turns, mask)
        before = by_turn.first(values)
        advantages = generalized_advantages(by_turn.sum(token_rewards), before, by_turn.mask, self.gamma, self.lam)
        return self.finished(by_turn.of_tokens(advantages), mask), by_turn.of_tokens(advantages + before)


class VinePPO(AdvantageEstimator):
    r"""VinePPO (arXiv 2410.01679, eqs. 5 and 6): the values of states are means over Monte-Carlo continuations.

    .. math::
        A_k = r_k + \hat V(s_{k+1}) - \hat V(s_k), \qquad
        \hat V(s) = \frac{1}{K} \sum_{j=1}^{K} R(\tau_j), \quad \tau_j \sim \pi(\cdot \mid s)

    A step is a turn of the policy: :math:`r_k` is the sum of the rewards of its tokens, :math:`s_k` the state in which
    it begins, and :math:`\hat V = 0` after the last turn. K is `rollout.continuations`; the value of the prompt is the
    mean score of the prompt's other trajectories. The continuations count the score without a KL penalty.
    """

    type: Literal["vine_ppo"] = "vine_ppo"
    clip_rewards: Literal[None] = Field(None, description="never: the values are of unclipped scores")
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")
    needs: ClassVar[tuple[str, ...]] = ("turn_values", "turns")

    def __call__(
        self, token_rewards: Tokens, mask: Tokens, *, turn_values: Tokens, turns: TokenNumbers
    ) -> tuple[Tokens, Tokens]:
        """Computes the advantage of each turn, and its return: the advantage and the value."""
        by_turn = Turns(turns, mask)
        before = by_turn.first(turn_values)
        advantages = generalized_advantages(by_turn.sum(token_rewards), before, by_turn.mask, gamma=1.0, lam=0.0)
        return self.finished(by_turn.of_tokens(advantages), mask), by_turn.of_tokens(advantages + before)


class ReinforcePlusPlus(AdvantageEstimator):
    r"""REINFORCE++ (arXiv 2501.03262): discounted rewards-to-go, whitened over the whole batch; no critic, no groups.

    .. math:: R_t = r_t + \gamma R_{t+1}, \qquad A_t = \frac{R_t - \operatorname{mean}(R)}{\operatorname{std}(R)}

    Masked tokens (tool output) are skipped, as in `gae`: tokens that the model wrote before a tool call share in the
    final reward. verl's code instead resets the return to 0 at every masked token, so only the last turn learns from
    the final reward. Both agree if no token inside a response is masked.
    """

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")

    def __call__(self, token_rewards: Tokens, mask: Tokens) -> tuple[Tokens, Tokens]:
        """Computes advantages and returns from discounted rewards-to-go."""
        returns = rewards_to_go(token_rewards, mask, self.gamma)
        return self.finished(returns, mask), returns * mask


class ReMax(AdvantageEstimator):
    r"""ReMax (arXiv 2310.10505): the score of the greedy answer to the same prompt is the baseline.

    .. math:: R_t = \sum_{s \ge t} r_s, \qquad A_t = R_t - R(x, y_{greedy})
    """

    type: Literal["remax"] = "remax"
    needs: ClassVar[tuple[str, ...]] = ("greedy_scores",)

    def __call__(self, token_rewards: Tokens, mask: Tokens, *, greedy_scores: Scores) -> tuple[Tokens, Tokens]:
        """Computes advantages by subtracting the greedy answer's score from the returns, the rewards-to-go."""
        returns = token_rewards.where(mask > 0, 0.0).flip(-1).cumsum(-1).flip(-1)
        return self.finished(returns - greedy_scores[:, None], mask), returns * mask


class GroupEstimator(AdvantageEstimator):
    """Base class of estimators that compute one advantage per trajectory by comparing scores within its group.

    The advantage is 0 for a trajectory that is alone in its group (the stage `advantages` also leaves it out of the
    losses). Returns are equal to the advantages, since no critic is trained.
    """

    needs: ClassVar[tuple[str, ...]] = ("group_ids",)

    def __call__(
        self, token_rewards: Tokens, mask: Tokens, *, group_ids: Int[Tensor, " batch"]
    ) -> tuple[Tokens, Tokens]:
        """Gives every unmasked token the advantage that `compare` computes for its trajectory."""
        compared = self.compare(sequence_sum(token_rewards, mask), mask.sum(-1), Groups(group_ids))
        advantages = self.finished(compared[:, None] * mask, mask)
        return advantages, advantages

    @abstractmethod
    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Computes the advantage of each trajectory; `lengths` are numbers of unmasked tokens. Shapes are (batch,)."""


def relative_to_group(scores: Scores, groups: Groups, norm_by_std: bool, epsilon: float) -> Scores:
    """Subtracts the group's mean from each score, and may divide by its standard deviation plus `epsilon`; see
    `GRPO`."""
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
        """Subtracts the group's mean, and divides by its std if configured; see `GroupEstimator.compare`."""
        return relative_to_group(scores, groups, self.norm_by_std, self.epsilon)


class DrGRPO(GroupEstimator):
    r"""Dr. GRPO (arXiv 2503.20783): GRPO without the division by the standard deviation, which favours very easy and
    very hard prompts.

    .. math:: A_i = R_i - \operatorname{mean}(R_{group})

    The paper also sums over tokens instead of averaging: ``loss.aggregate: seq-mean-token-sum-norm``.
    """

    type: Literal["dr_grpo"] = "dr_grpo"
    norm_by_std: Literal[False] = Field(False, description="never divided by the standard deviation")

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Subtracts the mean of the group; see `GroupEstimator.compare`."""
        return relative_to_group(scores, groups, norm_by_std=False, epsilon=0.0)


class MaxRL(GroupEstimator):
    r"""Maximum-likelihood reinforcement learning (MaxRL, arXiv 2602.02710): divides by the group's mean instead of the
    standard deviation, so that a prompt counts the more, the more rarely it is solved.

    .. math:: A_i = \frac{R_i - \operatorname{mean}(R_{group})}{\operatorname{mean}(R_{group})}

    and 0 if the mean is not positive. For scores of 0 and 1. With more answers per prompt (``rollout.n``), the gradient
    comes nearer to that of the log of the probability of a right answer.
    """

    type: Literal["max_rl"] = "max_rl"

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Subtracts the group's mean, and divides by it; see `GroupEstimator.compare`."""
        mean = groups.mean(scores)
        return ((scores - mean) / mean).where(mean > 0, 0.0)


class GRPOPassK(GroupEstimator):
    r"""Group-relative advantages for pass@k (arXiv 2503.19595): only the best trajectory of a group gets an advantage,
    its lead over the second best.

    .. math:: A_{best} = \frac{R_{best} - R_{second}}{\operatorname{std}(R_{group}) + \epsilon}, \qquad A_{other} = 0
    """

    type: Literal["grpo_passk"] = "grpo_passk"
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Gives the best trajectory of a group its lead over the second best; see `GroupEstimator.compare`.

        All advantages of a group are 0 if several trajectories share the best score.
        """
        best = groups.max(scores)
        at_best = scores == best
        tied = groups.sum(at_best.to(scores.dtype)) > 1
        second = groups.max(scores.where(~at_best, float("-inf")))
        lead = (best - second).where(at_best & ~tied & ~groups.alone, 0.0)
        return lead / (groups.std(scores) + self.epsilon) if self.norm_by_std else lead


class RLOO(GroupEstimator):
    r"""REINFORCE leave-one-out (arXiv 2402.14740): the baseline is the mean score of the other trajectories.

    .. math:: A_i = R_i - \frac{1}{n - 1}\sum_{j \ne i} R_j = \frac{n}{n-1}\left(R_i - \operatorname{mean}(R)\right)
    """

    type: Literal["rloo"] = "rloo"

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Subtracts the mean score of the other trajectories of the group; see `GroupEstimator.compare`."""
        return groups.size * (scores - groups.mean(scores)) / (groups.size - 1).clamp(min=1)


class OPO(GroupEstimator):
    r"""On-policy optimization (arXiv 2505.23585): the baseline of least variance, the mean score weighted by length.

    .. math:: A_i = R_i - \frac{\sum_j |y_j| R_j}{\sum_j |y_j|}
    """

    type: Literal["opo"] = "opo"

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Subtracts the group's mean score, weighted by length; see `GroupEstimator.compare`."""
        return scores - groups.mean(scores, weights=lengths)


class OptimalTokenBaseline(AdvantageEstimator):
    r"""The optimal token baseline (OTB, arXiv 2602.07078): each token has the baseline of least variance, the mean
    return of the group from there on, weighted by how much the policy's gradient has varied so far.

    .. math::
        A_{it} = G_{it} - \frac{\sum_j W_{jt} G_{jt}}{\sum_j W_{jt}}, \qquad
        W_{jt} = \sum_{s \le t} \left(1 - 2 \pi_{js} + \sum_v \pi_{js}(v)^2\right), \qquad
        G_{it} = \sum_{s \ge t} r_{is}

    The sums over j are over the trajectories of the group that have a token t; t counts unmasked tokens. The baseline
    is 0 where only one trajectory has one, as in verl. The weights of the rollout correction do not enter W.
    """

    type: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    needs: ClassVar[tuple[str, ...]] = ("group_ids", "old_log_probs", "sum_pi_squared")

    def __call__(
        self,
        token_rewards: Tokens,
        mask: Tokens,
        *,
        group_ids: Int[Tensor, " batch"],
        old_log_probs: Tokens,
        sum_pi_squared: Tokens,
    ) -> tuple[Tokens, Tokens]:
        """Computes advantages, and returns: the rewards-to-go."""
        groups, exists = Groups(group_ids), mask > 0
        returns = token_rewards.where(exists, 0.0).flip(-1).cumsum(-1).flip(-1) * mask
        # at most 1 and at least 0, but for rounding
        energy = (1.0 - 2.0 * old_log_probs.clamp(max=0.0).exp() + sum_pi_squared).clamp(min=0.0).where(exists, 0.0)
        place = (exists.cumsum(-1) - 1).clamp(min=0)

        def packed(x: Tokens) -> Tokens:
            return x.new_zeros(x.shape).scatter_add(1, place, x.where(exists, 0.0))

        of_place, weights, count = packed(returns), packed(energy.cumsum(-1)), groups.sum(packed(mask))
        # the mean of equal returns is exactly their value
        largest = groups.max(of_place.where(packed(mask) > 0, float("-inf"))).where(count > 0, 0.0)
        below = groups.sum(weights * (of_place - largest)) / groups.sum(weights).clamp(min=EPSILON)
        baseline = (largest + below).where(count > 1, 0.0)
        return self.finished(returns - baseline.gather(1, place), mask), returns


class GPG(GroupEstimator):
    r"""Group policy gradient (arXiv 2504.02546): the difference to the group's mean, scaled up to make up for
    trajectories with score 0.

    .. math:: A_i = \alpha\,(R_i - \operatorname{mean}(R_{group})), \qquad \alpha = \frac{B}{|\{j : R_j \ne 0\}|}

    where B counts the trajectories that enter the losses, as in the published code.
    """

    type: Literal["gpg"] = "gpg"

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Subtracts the group's mean, and scales up for trajectories with score 0; see `GroupEstimator.compare`."""
        compared: Scores = scores - groups.mean(scores)
        return compared * (lengths > 0).sum() / scores.count_nonzero().clamp(min=1)


class ReinforcePlusPlusBaseline(GroupEstimator):
    r"""REINFORCE++ with a baseline (arXiv 2501.03262): subtracts the mean of the group, then whitens over the batch.

    .. math:: A_i = \frac{R_i - \operatorname{mean}(R_{group})}{\operatorname{std}_{batch}}
    """

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Subtracts the mean of the group; see `GroupEstimator.compare`. `finished` then whitens over the batch."""
        return scores - groups.mean(scores)


class RAFT(GroupEstimator):
    r"""Reward-ranked fine-tuning (RAFT, arXiv 2304.06767), or best of n: learns only from the best answers to a prompt.

    .. math:: A_i = 1 \text{ if } i \text{ is one of the } k \text{ best of its group, and } R_i \ge R_{min}

    The other trajectories are left out of the losses. With one optimizer step per batch, this is supervised fine-tuning
    on the best answers; with several, the ratio of `algorithm.loss` corrects for the steps before. With `min_score`,
    prompts that nobody solved teach nothing, as in the variant of arXiv 2504.11343.
    """

    type: Literal["raft"] = "raft"
    best: int = Field(1, gt=0, description="number of best answers to a prompt to learn from; of equal ones, the first")
    min_score: float | None = Field(None, description="answers with a lower score are left out; null: none")

    def teaches(self, scores: Scores, lengths: Scores, group_ids: Int[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Finds the best answers; see `AdvantageEstimator.teaches`."""
        groups = Groups(group_ids)
        chosen = groups.rank(scores) < self.best
        if self.min_score is not None:
            chosen &= scores >= self.min_score
        return chosen & groups.differ(scores) if self.drop_zero_std_groups else chosen

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Returns 1 for each trajectory to train on; see `GroupEstimator.compare`."""
        return (lengths > 0).to(scores.dtype)


class GFPO(GroupEstimator):
    r"""Group filtered policy optimization (GFPO, arXiv 2508.09726): learns only from the answers of a group that are
    most efficient, or shortest.

    .. math::
        S = \operatorname{top}_k\left(\frac{R_i}{|y_i|}\right) \text{ or } \operatorname{top}_k(-|y_i|), \qquad
        A_i = \frac{R_i - \operatorname{mean}(R_S)}{\operatorname{std}(R_S) + \epsilon} \text{ for } i \in S

    :math:`|y|` counts unmasked tokens. The other trajectories are left out of the losses. The standard deviation is
    Bessel-corrected.
    """

    type: Literal["gfpo"] = "gfpo"
    keep: int = Field(4, ge=2, description="number k of answers to a prompt to learn from; of equal ones, the first")
    metric: Literal["token_efficiency", "length"] = Field(
        "token_efficiency", description="token_efficiency: highest score per token; length: shortest"
    )
    norm_by_std: bool = Field(True, description="divide by the standard deviation of those that are kept")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")

    def teaches(self, scores: Scores, lengths: Scores, group_ids: Int[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Finds the answers to keep; see `AdvantageEstimator.teaches`."""
        wanted = scores / lengths.clamp(min=1.0) if self.metric == "token_efficiency" else -lengths
        kept = Groups(group_ids).rank(wanted) < self.keep
        teaches = kept.clone()
        teaches[kept] = super().teaches(scores[kept], lengths[kept], group_ids[kept])
        return teaches

    def compare(self, scores: Scores, lengths: Scores, groups: Groups) -> Scores:
        """Compares the trajectories that `teaches` leaves; see `GroupEstimator.compare`."""
        kept = lengths > 0
        compared = scores.new_zeros(len(scores))
        compared[kept] = relative_to_group(scores[kept], Groups(groups.index[kept]), self.norm_by_std, self.epsilon)
        return compared


class NoAdvantage(AdvantageEstimator):
    """The reward teaches nothing: only `algorithm.distillation` does."""

    type: Literal["none"] = "none"
    learns_from_reward: ClassVar[bool] = False

    def __call__(self, token_rewards: Tokens, mask: Tokens) -> tuple[Tokens, Tokens]:
        """Returns zeros."""
        return mask.new_zeros(mask.shape), mask.new_zeros(mask.shape)


class EGPO(AdvantageEstimator):
    r"""Entropy-guided advantages (arXiv 2508.05118): uncertain answers are rewarded more when right and punished less
    when wrong.

    .. math::
        A_i = A_i^{GRPO} + \lambda \operatorname{clip}\left(H_i, -\frac{|A_i^{GRPO}|}{\alpha},
        \frac{|A_i^{GRPO}|}{\alpha}\right)

    :math:`H_i` is the mean entropy of the policy that generated the response, over its unmasked tokens.
    """

    type: Literal["egpo"] = "egpo"
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")
    lam: float = Field(0.4, ge=0, description="weight of the entropy")
    alpha: float = Field(2.0, gt=0, description="the entropy is clamped to ± the absolute advantage divided by this")
    needs: ClassVar[tuple[str, ...]] = ("group_ids", "entropy")

    def __call__(
        self, token_rewards: Tokens, mask: Tokens, *, group_ids: Int[Tensor, " batch"], entropy: Tokens
    ) -> tuple[Tokens, Tokens]:
        """Computes GRPO's advantages and adds the entropy term."""
        scores = sequence_sum(token_rewards, mask)
        compared = relative_to_group(scores, Groups(group_ids), self.norm_by_std, self.epsilon)
        limit = compared.abs() / self.alpha
        guided = compared + self.lam * sequence_mean(entropy, mask).clamp(-limit, limit)
        advantages = self.finished(guided[:, None] * mask, mask)
        return advantages, advantages


class GDPO(AdvantageEstimator):
    r"""Decoupled normalization (arXiv 2601.05242): each part of the reward is normalized within the group separately.

    .. math:: A_i = \operatorname{whiten}\left(\sum_k w_k A_{ik}^{GRPO}\right)

    so that a part with a large spread does not drown out the others. Only the parts enter the advantages, not the token
    rewards; `drop_zero_std_groups` still compares total scores.
    """

    type: Literal["gdpo"] = "gdpo"
    parts: tuple[str, ...] = Field(
        min_length=1, description="names of reward parts, present for every response; `score` is one of them"
    )
    weights: tuple[float, ...] | None = Field(None, description="one weight per part; null: 1 each")
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation")
    whiten: bool = Field(True, description="shift and scale advantages to mean 0, variance 1 over the batch's tokens")
    needs: ClassVar[tuple[str, ...]] = ("group_ids", "reward_parts")

    @model_validator(mode="after")
    def _check_weights(self) -> GDPO:
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
        """Computes advantages from the parts of the reward; `token_rewards` are not used.

        Raises:
            UserError: `parts` names a part that the reward does not give for every trajectory.
        """
        if missing := [name for name in self.parts if name not in reward_parts]:
            raise UserError(
                f"algorithm.advantage.parts names {missing[0]}, but the reward gives every trajectory only "
                f"{', '.join(reward_parts)}"
            )
        groups = Groups(group_ids)
        total = mask.new_zeros(len(mask))
        for name, weight in zip(self.parts, self.weights or (1.0,) * len(self.parts), strict=True):
            part = reward_parts[name].where(mask.sum(-1) > 0, 0.0)  # like scores: 0 without unmasked tokens
            total = total + weight * relative_to_group(part, groups, self.norm_by_std, self.epsilon)
        advantages = self.finished(total[:, None] * mask, mask)
        return advantages, advantages


class GiGPO(AdvantageEstimator):
    r"""Group-in-group policy optimization (arXiv 2505.10978, eqs. 3, 7 and 8): compares trajectories, and within them
    turns that follow the same observation.

    .. math::
        A_{ik} = \frac{R_i - \operatorname{mean}(R_{group})}{F(R_{group})} +
        \omega \frac{G_{ik} - \operatorname{mean}(G_{same})}{F(G_{same})}, \qquad
        G_{ik} = \sum_{l \ge k} \gamma^{l-k} r_{il}

    :math:`r_{ik}` is the sum of the rewards of the tokens in turn k of trajectory i. *same* are the turns, of all
    trajectories of the prompt, that follow the same text: the environment's answer to the turn before, or the prompt.
    So the answers of the environment should describe its state. A turn that is alone in this gets the first term only.
    F is 1, or with `norm_by_std` the Bessel-corrected standard deviation plus `epsilon`. The mean of a group counts
    every trajectory once, as in the paper; the published code counts it once for each of its turns.
    """

    type: Literal["gigpo"] = "gigpo"
    gamma: float = Field(0.95, ge=0, le=1, description="discount per turn")
    step_weight: float = Field(1.0, ge=0, description="weight omega of the comparison of turns")
    norm_by_std: bool = Field(False, description="divide by the standard deviations")
    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviations")
    needs: ClassVar[tuple[str, ...]] = ("group_ids", "turns", "states")

    def __call__(
        self,
        token_rewards: Tokens,
        mask: Tokens,
        *,
        group_ids: Int[Tensor, " batch"],
        turns: TokenNumbers,
        states: TokenNumbers,
    ) -> tuple[Tokens, Tokens]:
        """Computes the sum of both comparisons for each turn."""
        groups, by_turn = Groups(group_ids), Turns(turns, mask)
        episodes = relative_to_group(sequence_sum(token_rewards, mask), groups, self.norm_by_std, self.epsilon)
        returns = rewards_to_go(by_turn.sum(token_rewards), by_turn.mask, self.gamma)
        exists, followed = by_turn.mask > 0, by_turn.first(states)
        # one number for each pair of prompt and state
        same = Groups((groups.index[:, None] * (followed.max() + 1) + followed)[exists])
        steps = returns.new_zeros(returns.shape)
        steps[exists] = relative_to_group(returns[exists], same, self.norm_by_std, self.epsilon)
        compared = episodes[:, None] * mask + self.step_weight * by_turn.of_tokens(steps)
        advantages = self.finished(compared, mask)
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
    | EGPO
    | GiGPO
    | TurnGAE
    | VinePPO
    | RAFT
    | VAPO
    | MaxRL
    | OptimalTokenBaseline
    | GFPO
    | NoAdvantage,
    Field(discriminator="type"),
]
