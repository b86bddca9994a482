"""Policy losses: from log-probs, old log-probs and advantages to the number that the actor minimizes.

Throughout, :math:`\\rho = \\pi / \\pi_{old}` of a token, and A is its advantage. Log-ratios are limited to ±20 where
they are exponentiated, so that nothing overflows.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rlhf.algorithms.base import Algorithm
from rlhf.algorithms.masked import (
    EPSILON,
    MAX_LOG_RATIO,
    Aggregation,
    LossNormalizers,
    aggregate,
    masked_mean,
    sequence_mean,
    sequence_sum,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    Tokens = Float[Tensor, "batch response"]
    Flags = Bool[Tensor, "batch response"]
    Scalar = Float[Tensor, ""]


class PolicyLossBase(Algorithm):
    """What all policy losses have."""

    needs: ClassVar[tuple[str, ...]] = ("old_log_probs",)

    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        mask: Tokens,
        normalizers: LossNormalizers,
        *,
        rollout_is_weights: Tokens | None = None,
    ) -> tuple[Scalar, dict[str, Scalar]]:
        """The loss and metrics: this micro-batch's shares of the mini-batch's, whose `totals` are given.

        `rollout_is_weights` multiply the loss of each token.
        """
        loss, metrics = self.token_losses(log_probs, old_log_probs, advantages, mask)
        return self.reduced(loss, metrics, mask, normalizers, rollout_is_weights)

    def reduced(
        self,
        loss: Tokens,
        metrics: dict[str, Tokens],
        mask: Tokens,
        normalizers: LossNormalizers,
        weights: Tokens | None,
    ) -> tuple[Scalar, dict[str, Scalar]]:
        if weights is not None:
            loss = loss * weights
        return aggregate(loss, mask, self.how, normalizers), means(metrics, mask, normalizers)

    @property
    @abstractmethod
    def how(self) -> Aggregation:
        """How token losses become one number."""

    @abstractmethod
    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        """The loss of each token, and per-token metrics, which are averaged."""


class TokenLoss(PolicyLossBase):
    """A loss whose tokens can be put together in several ways."""

    aggregate: Aggregation = Field("token-mean", description="how token losses become one number")

    @property
    def how(self) -> Aggregation:
        return self.aggregate


class SequenceLoss(PolicyLossBase):
    """A loss in which every trajectory weighs the same, whatever its length."""

    @property
    def how(self) -> Aggregation:
        return "seq-mean-token-mean"


class SelectingLoss(TokenLoss):
    """A loss that treats some tokens in another way, and picks them by comparing all tokens of a mini-batch.

    Whoever cuts a mini-batch into micro-batches calls `select` on the whole first.
    """

    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        mask: Tokens,
        normalizers: LossNormalizers,
        *,
        rollout_is_weights: Tokens | None = None,
        selected: Flags | None = None,
    ) -> tuple[Scalar, dict[str, Scalar]]:
        """As any policy loss; without `selected`, the micro-batch is the whole mini-batch."""
        if selected is None:
            selected = self.select(log_probs, old_log_probs, advantages, mask, log_probs.new_zeros(log_probs.shape))
        loss, metrics = self.token_losses(log_probs, old_log_probs, advantages, mask)
        loss, metrics = self.treat(loss, metrics, log_probs - old_log_probs, selected)
        return self.reduced(loss, metrics, mask, normalizers, rollout_is_weights)

    @abstractmethod
    def select(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens, noise: Tokens
    ) -> Flags:
        """Which tokens of a whole mini-batch; `noise`, uniform in [0, 1), decides where chance does."""

    @abstractmethod
    def treat(
        self, loss: Tokens, metrics: dict[str, Tokens], log_ratio: Tokens, selected: Flags
    ) -> tuple[Tokens, dict[str, Tokens]]:
        """The losses of the tokens, and metrics, with what is done to the selected ones."""


def means(metrics: dict[str, Tokens], mask: Tokens, normalizers: LossNormalizers) -> dict[str, Scalar]:
    return {name: masked_mean(value.detach().to(mask.dtype), mask, normalizers) for name, value in metrics.items()}


def ratio_of(log_ratio: Tokens) -> Tokens:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class PPOClip(TokenLoss):
    r"""PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with asymmetric clipping (arXiv 2503.14476) and the dual
    clip for negative advantages (arXiv 1912.09729, eq. 5).

    .. math::
        L &= \max\left(-\rho A,\; -\operatorname{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high}) A\right) \\
        L &\leftarrow \min(L, -c A) \quad\text{where } A < 0
    """

    type: Literal["ppo"] = "ppo"
    clip_ratio_low: float = Field(0.2, gt=0, lt=1, description="how far below 1 the ratio may go")
    clip_ratio_high: float = Field(0.2, gt=0, description="how far above 1 the ratio may go")
    clip_ratio_c: float = Field(3.0, gt=1, description="dual clip: bound of the ratio where the advantage is negative")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        plain = -ratio * advantages
        clipped = -ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high) * advantages
        surrogate = plain.maximum(clipped)
        bound = -self.clip_ratio_c * advantages
        negative = advantages < 0
        return surrogate.minimum(bound).where(negative, surrogate), {
            "pg_clipfrac": clipped > plain,
            "pg_clipfrac_lower": (surrogate > bound) & negative,
            "ppo_kl": -log_ratio,
        }


class GSPO(SequenceLoss):
    r"""Group sequence policy optimization (arXiv 2507.18071): one ratio for a whole response.

    .. math::
        s = \exp\left(\tfrac{1}{|y|}\sum_t \log\rho_t\right), \qquad s_t = \operatorname{sg}[s]\,
        \frac{\pi_t}{\operatorname{sg}[\pi_t]}, \qquad
        L_t = \max\left(-s_t A,\; -\operatorname{clip}(s_t, 1-\epsilon_{low}, 1+\epsilon_{high}) A\right)

    sg stops the gradient; log s is limited to 10.
    """

    type: Literal["gspo"] = "gspo"
    clip_ratio_low: float = Field(3e-4, gt=0, lt=1, description="how far below 1 the sequence's ratio may go")
    clip_ratio_high: float = Field(4e-4, gt=0, description="how far above 1 the sequence's ratio may go")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        log_ratio = log_probs - old_log_probs
        sequence = sequence_sum(log_ratio, mask) / mask.sum(-1).clamp(min=1.0)
        ratio = (log_probs - log_probs.detach() + sequence.detach()[:, None]).clamp(max=10.0).exp()
        plain = -ratio * advantages
        clipped = -ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high) * advantages
        return plain.maximum(clipped), {
            "pg_clipfrac": clipped > plain,
            "pg_clipfrac_lower": mask.new_zeros(mask.shape),
            "ppo_kl": -log_ratio,
        }


class GPGLoss(TokenLoss):
    r"""Group policy gradient (arXiv 2504.02546): plain REINFORCE, without old log-probs and without clipping.

    .. math:: L = -A \log\pi

    Its comparison with the reference is the KL term in the loss, ``kl.in_loss``.
    """

    type: Literal["gpg"] = "gpg"
    needs: ClassVar[tuple[str, ...]] = ()

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        return -log_probs * advantages, {}


class CISPO(TokenLoss):
    r"""Clipped importance-sampling weights (arXiv 2506.13585): every token keeps its gradient.

    .. math::
        L = -\operatorname{sg}\left[\operatorname{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high})\right] A \log\pi

    sg stops the gradient.
    """

    type: Literal["cispo"] = "cispo"
    clip_ratio_low: float = Field(1.0, gt=0, description="how far below 1 the weight may go; 1 or more: to 0")
    clip_ratio_high: float = Field(0.2, gt=0, description="how far above 1 the weight may go")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        return -weight * advantages * log_probs, {
            "pg_clipfrac": ratio != weight,
            "pg_clipfrac_lower": mask.new_zeros(mask.shape),
            "ppo_kl": -log_ratio,
        }


class GMPO(SequenceLoss):
    r"""Geometric-mean policy optimization (arXiv 2507.20673): log-ratios are clipped by token, then averaged.

    .. math::
        \ell_t = \operatorname{sgn}(A) \min\left(\operatorname{sgn}(A) \log\rho_t,\; \operatorname{sgn}(A)
        \operatorname{clip}(\log\rho_t, -\epsilon_{low}, \epsilon_{high})\right), \qquad
        L = -\bar A \exp\left(\tfrac{1}{|y|}\sum_t \ell_t\right)

    averaged over trajectories. Rollout weights enter by their geometric mean.
    """

    type: Literal["geo_mean"] = "geo_mean"
    clip_ratio_low: float = Field(0.4, gt=0, description="how far below 0 a log-ratio may go")
    clip_ratio_high: float = Field(0.4, gt=0, description="how far above 0 a log-ratio may go")

    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        mask: Tokens,
        normalizers: LossNormalizers,
        *,
        rollout_is_weights: Tokens | None = None,
    ) -> tuple[Scalar, dict[str, Scalar]]:
        exponents, metrics = self.token_losses(log_probs, old_log_probs, advantages, mask)
        loss = -sequence_mean(advantages, mask) * sequence_mean(exponents, mask).exp()
        if rollout_is_weights is not None:
            loss = loss * sequence_mean((rollout_is_weights + 1e-10).log(), mask).exp()
        return loss.sum() / max(normalizers.sequences, 1), means(metrics, mask, normalizers)

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        """The exponents :math:`\\ell_t`, of which the loss takes each trajectory's mean."""
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        clipped = log_ratio.clamp(-self.clip_ratio_low, self.clip_ratio_high)
        sign = advantages.sign()
        outside = log_ratio != clipped
        return sign * (sign * log_ratio).minimum(sign * clipped), {
            "pg_clipfrac": outside & (advantages > 0),
            "pg_clipfrac_lower": outside & (advantages < 0),
            "ppo_kl": -log_ratio,
        }


class SAPO(SequenceLoss):
    r"""Soft adaptive policy optimization (arXiv 2511.20347): a smooth gate instead of clipping.

    .. math::
        L = -\frac{4}{\tau}\,\sigma\left(\tau(\rho - 1)\right) A, \qquad
        \tau = \tau_{pos} \text{ where } A > 0 \text{, else } \tau_{neg}
    """

    type: Literal["sapo"] = "sapo"
    tau_pos: float = Field(1.0, gt=0, description="how sharply the gate closes where the advantage is positive")
    tau_neg: float = Field(1.05, gt=0, description="the same where it is not")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        tau = mask.new_full(mask.shape, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        gate = (tau * (log_ratio.exp() - 1.0)).sigmoid() * (4.0 / tau)
        never = mask.new_zeros(mask.shape)
        return -gate * advantages, {"pg_clipfrac": never, "pg_clipfrac_lower": never, "ppo_kl": -log_ratio}


class DPPO(TokenLoss):
    """What both divergence losses share: tokens beyond the trust region, on the side that the advantage pushes to, have
    no gradient; the others weigh by their ratio, truncated."""

    clip_ratio_c: float = Field(20.0, gt=1, description="truncation of the ratio")

    @abstractmethod
    def inside(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens) -> Flags:
        """Which tokens are within the trust region, or move back to it."""

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.detach().exp()
        inside = self.inside(log_probs.detach(), old_log_probs, advantages)
        return -advantages * ratio.clamp(max=self.clip_ratio_c) * log_probs * inside, {
            "pg_clipfrac": ~inside,
            "pg_clipfrac_lower": (ratio > self.clip_ratio_c) & inside,
            "ppo_kl": -log_ratio,
        }


class DPPOTV(DPPO):
    r"""Divergence PPO with total variation (arXiv 2602.04879): the trust region is over probabilities, not ratios.

    .. math::
        L = -\operatorname{sg}\left[\min(\rho, c)\right] A \log\pi \cdot M, \qquad
        M = \begin{cases} \pi - \pi_{old} \le \epsilon_{high} & A > 0 \\ \pi - \pi_{old} \ge -\epsilon_{low} &
        \text{else} \end{cases}
    """

    type: Literal["dppo_tv"] = "dppo_tv"
    clip_ratio_low: float = Field(0.15, gt=0, description="how far the probability may fall")
    clip_ratio_high: float = Field(0.15, gt=0, description="how far the probability may rise")

    def inside(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens) -> Flags:
        moved = log_probs.exp() - old_log_probs.exp()
        return (moved <= self.clip_ratio_high).where(advantages > 0, moved >= -self.clip_ratio_low)


class DPPOKL(DPPO):
    r"""Divergence PPO with the binary KL divergence (arXiv 2602.04879), of the token against all others.

    .. math::
        D = \pi_{old}\log\frac{\pi_{old}}{\pi} + (1 - \pi_{old})\log\frac{1 - \pi_{old}}{1 - \pi}, \qquad
        M = \begin{cases} D \le \epsilon_{high} \text{ or } \pi \le \pi_{old} & A > 0 \\
        D \le \epsilon_{low} \text{ or } \pi \ge \pi_{old} & \text{else} \end{cases}

    with the loss of `dppo_tv`.
    """

    type: Literal["dppo_kl"] = "dppo_kl"
    clip_ratio_low: float = Field(0.05, gt=0, description="largest divergence, in nats, where the probability falls")
    clip_ratio_high: float = Field(0.05, gt=0, description="largest divergence, in nats, where the probability rises")

    def inside(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens) -> Flags:
        prob, old = log_probs.exp(), old_log_probs.exp()
        others = ((1.0 - old + EPSILON) / (1.0 - prob + EPSILON)).log()
        divergence = old * (old_log_probs - log_probs) + (1.0 - old) * others
        rising = (divergence <= self.clip_ratio_high) | (prob <= old)
        falling = (divergence <= self.clip_ratio_low) | (prob >= old)
        return rising.where(advantages > 0, falling)


class ClipCov(SelectingLoss):
    r"""Clip-Cov (arXiv 2505.22617): some tokens whose log-prob and advantage vary together have no gradient.

    .. math:: \operatorname{cov}_t = (A_t - \bar A)(\log\pi_t - \overline{\log\pi})

    Of the tokens with a covariance between the two bounds that PPO's clip leaves alone, as many as `clip_cov_ratio` of
    all tokens, but at least one, are drawn at random.
    """

    type: Literal["clip_cov"] = "clip_cov"
    clip_ratio_low: float = Field(0.2, gt=0, lt=1, description="how far below 1 the ratio may go")
    clip_ratio_high: float = Field(0.2, gt=0, description="how far above 1 the ratio may go")
    clip_cov_ratio: float = Field(2e-4, gt=0, le=1, description="share of all tokens that is drawn")
    clip_cov_lb: float = Field(1.0, description="covariance above which a token may be drawn")
    clip_cov_ub: float = Field(5.0, description="covariance below which a token may be drawn")
    needs: ClassVar[tuple[str, ...]] = ("old_log_probs", "selection_noise")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        log_ratio = log_probs - old_log_probs
        plain, clipped = self._surrogates(log_ratio, advantages)
        return plain.maximum(clipped), {"ppo_kl": -log_ratio}

    def select(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens, noise: Tokens
    ) -> Flags:
        plain, clipped = self._surrogates(log_probs - old_log_probs, advantages)
        found = covariance(log_probs, advantages, mask)
        candidates = (mask > 0) & (clipped <= plain) & (found > self.clip_cov_lb) & (found < self.clip_cov_ub)
        return largest(noise, candidates, max(int(self.clip_cov_ratio * mask.sum().item()), 1))

    def treat(
        self, loss: Tokens, metrics: dict[str, Tokens], log_ratio: Tokens, selected: Flags
    ) -> tuple[Tokens, dict[str, Tokens]]:
        return loss.where(~selected, 0.0), metrics | {"pg_clipfrac": selected}

    def _surrogates(self, log_ratio: Tokens, advantages: Tokens) -> tuple[Tokens, Tokens]:
        ratio = ratio_of(log_ratio)
        return -ratio * advantages, -ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high) * advantages


class KLCov(SelectingLoss):
    r"""KL-Cov (arXiv 2505.22617): the tokens of largest covariance are held near the old policy.

    .. math::
        L = -\rho A + \beta\,|\log\rho| \text{ where } \operatorname{cov}_t \text{ is among the largest, else } -\rho A

    with the covariance of `clip_cov`.
    """

    type: Literal["kl_cov"] = "kl_cov"
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1, description="share of all tokens that is held")
    ppo_kl_coef: float = Field(1.0, ge=0, description="weight of their KL term")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        log_ratio = log_probs - old_log_probs
        return -ratio_of(log_ratio) * advantages, {"ppo_kl": log_ratio.abs()}

    def select(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens, noise: Tokens
    ) -> Flags:
        count = max(int(self.kl_cov_ratio * mask.sum().item()), 1)
        return largest(covariance(log_probs, advantages, mask), mask > 0, count)

    def treat(
        self, loss: Tokens, metrics: dict[str, Tokens], log_ratio: Tokens, selected: Flags
    ) -> tuple[Tokens, dict[str, Tokens]]:
        return (loss + self.ppo_kl_coef * log_ratio.abs()).where(selected, loss), metrics


class DRO(TokenLoss):
    r"""Direct reward optimization (arXiv 2405.19107): no ratio, a quadratic penalty on its logarithm.

    .. math:: L = -\left(A \log\pi - \tfrac{\beta}{2} (\log\rho)^2\right)
    """

    type: Literal["dro"] = "dro"
    dro_beta: float = Field(0.1, gt=0, description="weight of the penalty")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        log_ratio = log_probs - old_log_probs
        return 0.5 * self.dro_beta * log_ratio.square() - log_probs * advantages, {"ppo_kl": -log_ratio}


def covariance(log_probs: Tokens, advantages: Tokens, mask: Tokens) -> Tokens:
    """Of each token's log-prob and advantage, about their means over the mini-batch."""
    log_probs, normalizers = log_probs.detach(), LossNormalizers.of(mask)
    return (advantages - masked_mean(advantages, mask, normalizers)) * (
        log_probs - masked_mean(log_probs, mask, normalizers)
    )


def largest(x: Tokens, candidates: Flags, count: int) -> Flags:
    """The `count` candidates of largest x, or all there are."""
    found = candidates.new_zeros(candidates.numel())
    count = min(count, int(candidates.sum().item()))
    found[x.masked_fill(~candidates, float("-inf")).flatten().topk(count).indices] = True
    return found.view(candidates.shape)


PolicyLoss = Annotated[
    PPOClip | GSPO | GPGLoss | CISPO | GMPO | SAPO | DPPOTV | DPPOKL | ClipCov | KLCov | DRO,
    Field(discriminator="type"),
]
