"""Policy losses: compute the actor's loss from log-probs, old log-probs and advantages.

Notation: :math:`\\rho = \\pi / \\pi_{old}` is the ratio of a token, A its advantage. Log-ratios are clamped to ±20
before exponentiation to avoid overflow.

Unless a docstring says otherwise, tensors are float32 of shape (batch, response), log-probs are in nats, and `mask` is
1 for tokens that count in the loss, 0 for the rest.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from jaxtyping import Bool, Float
from pydantic import Field

from ratchet.rlhf.algorithms.base import Algorithm
from ratchet.rlhf.algorithms.masked import (
    EPSILON,
    MAX_LOG_RATIO,
    Aggregation,
    LossNormalizers,
    aggregate,
    masked_mean,
    sequence_mean,
    sequence_sum,
)
from ratchet.rlhf.algorithms.tensor import Tensor

Tokens = Float[Tensor, "batch response"]
Flags = Bool[Tensor, "batch response"]
Scalar = Float[Tensor, ""]
Metrics = Mapping[str, Tokens | Flags]
"""Per-token metrics by name; of flags, the share is shown."""


class PolicyLossBase(Algorithm):
    """Base class of all policy losses."""

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
        """Computes a micro-batch's contribution to the loss and metrics of its mini-batch.

        Args:
            log_probs: current log-probs of the response tokens.
            old_log_probs: log-probs before the update.
            normalizers: counts over the whole mini-batch.
            rollout_is_weights: weight by which each token's loss is multiplied; None: no weights.

        Returns:
            The loss and the metrics by name, scalars. They add up over the micro-batches of a mini-batch.
        """
        loss, metrics = self.token_losses(log_probs, old_log_probs, advantages, mask)
        return self.reduced(loss, metrics, mask, normalizers, rollout_is_weights)

    def reduced(
        self,
        loss: Tokens,
        metrics: Metrics,
        mask: Tokens,
        normalizers: LossNormalizers,
        weights: Tokens | None,
    ) -> tuple[Scalar, dict[str, Scalar]]:
        """Reduces per-token losses, multiplied by `weights` if given, and per-token metrics to scalars."""
        if weights is not None:
            loss = loss * weights
        return aggregate(loss, mask, self.how, normalizers), means(metrics, mask, normalizers)

    @property
    @abstractmethod
    def how(self) -> Aggregation:
        """The reduction of token losses to a scalar."""

    @abstractmethod
    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Computes the loss and the metrics of each token. Metrics are averaged over the unmasked tokens."""


class TokenLoss(PolicyLossBase):
    """A loss with a configurable reduction of its token losses."""

    aggregate: Aggregation = Field("token-mean", description="how token losses are reduced to a scalar")

    @property
    def how(self) -> Aggregation:
        """The configured reduction."""
        return self.aggregate


class SequenceLoss(PolicyLossBase):
    """A loss in which every trajectory has the same weight, whatever its length."""

    @property
    def how(self) -> Aggregation:
        """Always the mean over trajectories of the mean over tokens."""
        return "seq-mean-token-mean"


class SelectingLoss(TokenLoss):
    """A loss that treats selected tokens differently, and selects them by comparing all tokens of a mini-batch.

    Code that splits a mini-batch into micro-batches must call `select` on the whole mini-batch first.
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
        """Computes a micro-batch's contribution to the loss and metrics of its mini-batch; see `PolicyLossBase`.

        Args:
            selected: the selected tokens; None: select them here, treating the micro-batch as the whole mini-batch.
        """
        if selected is None:
            selected = self.select(log_probs, old_log_probs, advantages, mask, log_probs.new_zeros(log_probs.shape))
        loss, metrics = self.token_losses(log_probs, old_log_probs, advantages, mask)
        loss, metrics = self.treat(loss, metrics, log_probs - old_log_probs, selected)
        return self.reduced(loss, metrics, mask, normalizers, rollout_is_weights)

    @abstractmethod
    def select(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens, noise: Tokens
    ) -> Flags:
        """Selects tokens of a whole mini-batch. `noise` is uniform in [0, 1), for losses that select at random."""

    @abstractmethod
    def treat(self, loss: Tokens, metrics: Metrics, log_ratio: Tokens, selected: Flags) -> tuple[Tokens, Metrics]:
        """Applies the special treatment to the loss and the metrics of the selected tokens."""


def means(metrics: Metrics, mask: Tokens, normalizers: LossNormalizers) -> dict[str, Scalar]:
    """Averages per-token metrics over the unmasked tokens, without gradient.

    The results add up over the micro-batches of a mini-batch.
    """
    return {name: masked_mean(value.detach().to(mask.dtype), mask, normalizers) for name, value in metrics.items()}


def ratio_of(log_ratio: Tokens) -> Tokens:
    """Exponentiates log-ratios, clamped to ± `MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class PPOClip(TokenLoss):
    r"""PPO's clipped surrogate (arXiv 1707.06347, eq. 7), with asymmetric clipping (arXiv 2503.14476) and the dual
    clip for negative advantages (arXiv 1912.09729, eq. 5).

    .. math::
        L &= \max\left(-\rho A,\; -\operatorname{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high}) A\right) \\
        L &\leftarrow \min(L, -c A) \quad\text{where } A < 0
    """

    type: Literal["ppo"] = "ppo"
    clip_ratio_low: float = Field(0.2, gt=0, lt=1, description="how far below 1 the ratio may go (verl, TRL, OpenRLHF)")
    clip_ratio_high: float = Field(0.2, gt=0, description="how far above 1 the ratio may go (verl, TRL, OpenRLHF)")
    clip_ratio_c: float = Field(
        3.0, gt=1, description="dual clip: bound of the ratio where the advantage is negative (verl)"
    )

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Computes the surrogate with both clips; see `PolicyLossBase.token_losses`.

        The metrics are `pg_clipfrac`, `pg_clipfrac_lower` (dual clip) and `ppo_kl`, in nats.
        """
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
    r"""Group sequence policy optimization (arXiv 2507.18071): one ratio for the whole response.

    .. math::
        s = \exp\left(\tfrac{1}{|y|}\sum_t \log\rho_t\right), \qquad s_t = \operatorname{sg}[s]\,
        \frac{\pi_t}{\operatorname{sg}[\pi_t]}, \qquad
        L_t = \max\left(-s_t A,\; -\operatorname{clip}(s_t, 1-\epsilon_{low}, 1+\epsilon_{high}) A\right)

    sg stops the gradient; log s is clamped to at most 10.
    """

    type: Literal["gspo"] = "gspo"
    clip_ratio_low: float = Field(3e-4, gt=0, lt=1, description="how far below 1 the sequence's ratio may go")
    clip_ratio_high: float = Field(4e-4, gt=0, description="how far above 1 the sequence's ratio may go")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Computes the clipped surrogate with the ratio of the whole response; see `PolicyLossBase.token_losses`."""
        log_ratio = log_probs - old_log_probs
        sequence = sequence_sum(log_ratio, mask) / mask.sum(-1).clamp(min=1.0)
        # the number is the sequence's ratio, the gradient that of the token
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

    To keep the policy near the reference, add the KL term to the loss (``kl.in_loss``).
    """

    type: Literal["gpg"] = "gpg"
    needs: ClassVar[tuple[str, ...]] = ()

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Computes the REINFORCE loss, without old log-probs and metrics; see `PolicyLossBase.token_losses`."""
        return -log_probs * advantages, {}


class CISPO(TokenLoss):
    r"""CISPO (arXiv 2506.13585): clips the importance-sampling weight, so every token keeps its gradient.

    .. math::
        L = -\operatorname{sg}\left[\operatorname{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high})\right] A \log\pi

    sg stops the gradient.
    """

    type: Literal["cispo"] = "cispo"
    clip_ratio_low: float = Field(1.0, gt=0, description="how far below 1 the weight may go; 1 or more: down to 0")
    clip_ratio_high: float = Field(0.2, gt=0, description="how far above 1 the weight may go")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Weights the REINFORCE loss by the clipped, detached ratio; see `PolicyLossBase.token_losses`."""
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        return -weight * advantages * log_probs, {
            "pg_clipfrac": ratio != weight,
            "pg_clipfrac_lower": mask.new_zeros(mask.shape),
            "ppo_kl": -log_ratio,
        }


class GMPO(SequenceLoss):
    r"""Geometric-mean policy optimization (arXiv 2507.20673): clips the log-ratio of each token, then averages.

    .. math::
        \ell_t = \operatorname{sgn}(A) \min\left(\operatorname{sgn}(A) \log\rho_t,\; \operatorname{sgn}(A)
        \operatorname{clip}(\log\rho_t, -\epsilon_{low}, \epsilon_{high})\right), \qquad
        L = -\bar A \exp\left(\tfrac{1}{|y|}\sum_t \ell_t\right)

    averaged over trajectories. Rollout weights enter as their geometric mean.
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
        """Computes the loss from the geometric mean of the clipped ratios; see `PolicyLossBase.__call__`."""
        exponents, metrics = self.token_losses(log_probs, old_log_probs, advantages, mask)
        loss = -sequence_mean(advantages, mask) * sequence_mean(exponents, mask).exp()
        if rollout_is_weights is not None:
            loss = loss * sequence_mean((rollout_is_weights + 1e-10).log(), mask).exp()
        return loss.sum() / max(normalizers.sequences, 1), means(metrics, mask, normalizers)

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        r"""Computes the exponents :math:`\ell_t` in place of losses; see `PolicyLossBase.token_losses`."""
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
    tau_neg: float = Field(1.05, gt=0, description="the same where the advantage is not positive")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Weights the advantages by the gate; the clip metrics are always 0; see `PolicyLossBase.token_losses`."""
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        tau = mask.new_full(mask.shape, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        gate = (tau * (log_ratio.exp() - 1.0)).sigmoid() * (4.0 / tau)
        never = mask.new_zeros(mask.shape)
        return -gate * advantages, {"pg_clipfrac": never, "pg_clipfrac_lower": never, "ppo_kl": -log_ratio}


class VESPO(TokenLoss):
    r"""Variational sequence-level soft policy optimization (VESPO, arXiv 2602.10693): weights each response by a smooth
    function of its ratio, which is the product of those of its tokens.

    .. math::
        W = \prod_t \rho_t, \qquad \phi(W) = W^k e^{\lambda (1 - W)}, \qquad
        L_t = -\operatorname{sg}[\phi(W)]\, A \log\pi_t

    sg stops the gradient. k and :math:`\lambda` depend on the sign of A; log W is clamped to [log 1e-8, 20]. For the
    paper's ratio to the policy that drew the response, set ``rollout_correction.bypass``.
    """

    type: Literal["vespo"] = "vespo"
    k_pos: float = Field(
        2.0, gt=0, description="how sharply the weight falls below a ratio of 1, where A is not negative"
    )
    lambda_pos: float = Field(3.0, gt=0, description="how sharply it falls above a ratio of 1, where A is not negative")
    k_neg: float = Field(3.0, gt=0, description="how sharply it falls below a ratio of 1, where A is negative")
    lambda_neg: float = Field(2.0, gt=0, description="how sharply it falls above a ratio of 1, where A is negative")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Weights the REINFORCE loss by the response's detached weight; see `PolicyLossBase.token_losses`.

        The metrics are `ppo_kl`, in nats, and `vespo_weight`.
        """
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_w = sequence_sum(log_ratio.detach(), mask).clamp(math.log(1e-8), MAX_LOG_RATIO)[:, None]
        negative = advantages < 0
        k = mask.new_full(mask.shape, self.k_pos).masked_fill(negative, self.k_neg)
        lam = mask.new_full(mask.shape, self.lambda_pos).masked_fill(negative, self.lambda_neg)
        weight = (k * log_w + lam * (1.0 - log_w.exp())).exp()
        return -weight * advantages * log_probs, {"ppo_kl": -log_ratio, "vespo_weight": weight}


class DPPO(TokenLoss):
    """Base class of the two divergence losses.

    Tokens that are outside the trust region, on the side that the advantage pushes to, get no gradient. The other
    tokens are weighted by their truncated ratio.
    """

    clip_ratio_c: float = Field(20.0, gt=1, description="truncation of the ratio")
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the squared log-ratio, which every token adds to its loss (prime-rl's kl_tau)"
    )

    @abstractmethod
    def inside(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens) -> Flags:
        """Finds the tokens that keep their gradient: inside the trust region, or pushed back to it by the advantage."""

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Computes the loss with truncated ratios, 0 where not `inside`; see `PolicyLossBase.token_losses`."""
        log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.detach().exp()
        inside = self.inside(log_probs.detach(), old_log_probs, advantages)
        losses = -advantages * ratio.clamp(max=self.clip_ratio_c) * log_probs * inside
        return losses + self.kl_coef * log_ratio.square(), {
            "pg_clipfrac": ~inside,
            "pg_clipfrac_lower": (ratio > self.clip_ratio_c) & inside,
            "ppo_kl": -log_ratio,
        }


class DPPOTV(DPPO):
    r"""Divergence PPO with total variation (arXiv 2602.04879): the trust region bounds probabilities, not ratios.

    .. math::
        L = -\operatorname{sg}\left[\min(\rho, c)\right] A \log\pi \cdot M, \qquad
        M = \begin{cases} \pi - \pi_{old} \le \epsilon_{high} & A > 0 \\ \pi - \pi_{old} \ge -\epsilon_{low} &
        \text{else} \end{cases}
    """

    type: Literal["dppo_tv"] = "dppo_tv"
    clip_ratio_low: float = Field(0.15, gt=0, description="how far the probability may fall")
    clip_ratio_high: float = Field(0.15, gt=0, description="how far the probability may rise")

    def inside(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens) -> Flags:
        """Bounds the change of each token's probability; see `DPPO.inside`."""
        moved = log_probs.exp() - old_log_probs.exp()
        return (moved <= self.clip_ratio_high).where(advantages > 0, moved >= -self.clip_ratio_low)


class DPPOKL(DPPO):
    r"""Divergence PPO with the binary KL divergence (arXiv 2602.04879) of the token against all other tokens.

    .. math::
        D = \pi_{old}\log\frac{\pi_{old}}{\pi} + (1 - \pi_{old})\log\frac{1 - \pi_{old}}{1 - \pi}, \qquad
        M = \begin{cases} D \le \epsilon_{high} \text{ or } \pi \le \pi_{old} & A > 0 \\
        D \le \epsilon_{low} \text{ or } \pi \ge \pi_{old} & \text{else} \end{cases}

    and the loss of `dppo_tv`.
    """

    type: Literal["dppo_kl"] = "dppo_kl"
    clip_ratio_low: float = Field(0.05, gt=0, description="largest divergence, in nats, where the probability falls")
    clip_ratio_high: float = Field(0.05, gt=0, description="largest divergence, in nats, where the probability rises")

    def inside(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens) -> Flags:
        """Bounds the binary KL divergence of each token; see `DPPO.inside`."""
        prob, old = log_probs.exp(), old_log_probs.exp()
        others = ((1.0 - old + EPSILON) / (1.0 - prob + EPSILON)).log()
        divergence = old * (old_log_probs - log_probs) + (1.0 - old) * others
        rising = (divergence <= self.clip_ratio_high) | (prob <= old)
        falling = (divergence <= self.clip_ratio_low) | (prob >= old)
        return rising.where(advantages > 0, falling)


class ClipCov(SelectingLoss):
    r"""Clip-Cov (arXiv 2505.22617): some tokens with a high covariance of log-prob and advantage get no gradient.

    .. math:: \operatorname{cov}_t = (A_t - \bar A)(\log\pi_t - \overline{\log\pi})

    The tokens are drawn at random among those that PPO would not clip and whose covariance is between the two bounds.
    Their number is `clip_cov_ratio` times the number of all tokens, at least 1.
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
    ) -> tuple[Tokens, Metrics]:
        """Computes PPO's clipped surrogate, without the dual clip; see `PolicyLossBase.token_losses`."""
        log_ratio = log_probs - old_log_probs
        plain, clipped = self._surrogates(log_ratio, advantages)
        return plain.maximum(clipped), {"ppo_kl": -log_ratio}

    def select(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens, noise: Tokens
    ) -> Flags:
        """Draws tokens by `noise` among those that qualify by covariance; see `SelectingLoss.select`."""
        plain, clipped = self._surrogates(log_probs - old_log_probs, advantages)
        cov = covariance(log_probs, advantages, mask)
        candidates = (mask > 0) & (clipped <= plain) & (cov > self.clip_cov_lb) & (cov < self.clip_cov_ub)
        return largest(noise, candidates, max(int(self.clip_cov_ratio * mask.sum().item()), 1))

    def treat(self, loss: Tokens, metrics: Metrics, log_ratio: Tokens, selected: Flags) -> tuple[Tokens, Metrics]:
        """Sets the loss of the selected tokens to 0; their share is `pg_clipfrac`; see `SelectingLoss.treat`."""
        return loss.where(~selected, 0.0), {**metrics, "pg_clipfrac": selected}

    def _surrogates(self, log_ratio: Tokens, advantages: Tokens) -> tuple[Tokens, Tokens]:
        ratio = ratio_of(log_ratio)
        return -ratio * advantages, -ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high) * advantages


class KLCov(SelectingLoss):
    r"""KL-Cov (arXiv 2505.22617): a KL penalty holds the tokens of largest covariance near the old policy.

    .. math::
        L = -\rho A + \beta\,|\log\rho| \text{ where } \operatorname{cov}_t \text{ is among the largest, else } -\rho A

    The covariance is that of `clip_cov`.
    """

    type: Literal["kl_cov"] = "kl_cov"
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1, description="share of all tokens that gets the KL term")
    ppo_kl_coef: float = Field(1.0, ge=0, description="weight of the KL term")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Computes the surrogate without clipping. `ppo_kl` is the absolute log-ratio."""
        log_ratio = log_probs - old_log_probs
        return -ratio_of(log_ratio) * advantages, {"ppo_kl": log_ratio.abs()}

    def select(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens, noise: Tokens
    ) -> Flags:
        """Selects the tokens of largest covariance; `noise` is not used; see `SelectingLoss.select`."""
        count = max(int(self.kl_cov_ratio * mask.sum().item()), 1)
        return largest(covariance(log_probs, advantages, mask), mask > 0, count)

    def treat(self, loss: Tokens, metrics: Metrics, log_ratio: Tokens, selected: Flags) -> tuple[Tokens, Metrics]:
        """Adds the KL term to the loss of the selected tokens; see `SelectingLoss.treat`."""
        return (loss + self.ppo_kl_coef * log_ratio.abs()).where(selected, loss), metrics


class DRO(TokenLoss):
    r"""Direct reward optimization (arXiv 2405.19107): a quadratic penalty on the log-ratio, no clipping.

    .. math:: L = -\left(A \log\pi - \tfrac{\beta}{2} (\log\rho)^2\right)
    """

    type: Literal["dro"] = "dro"
    dro_beta: float = Field(0.1, gt=0, description="weight of the penalty")

    def token_losses(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, mask: Tokens
    ) -> tuple[Tokens, Metrics]:
        """Computes the REINFORCE loss plus the quadratic penalty on the log-ratio."""
        log_ratio = log_probs - old_log_probs
        return 0.5 * self.dro_beta * log_ratio.square() - log_probs * advantages, {"ppo_kl": -log_ratio}


def covariance(log_probs: Tokens, advantages: Tokens, mask: Tokens) -> Tokens:
    """Computes each token's term of the covariance of log-prob and advantage over the mini-batch.

    It is the product of their deviations from their means.
    """
    log_probs, normalizers = log_probs.detach(), LossNormalizers.of(mask)
    return (advantages - masked_mean(advantages, mask, normalizers)) * (
        log_probs - masked_mean(log_probs, mask, normalizers)
    )


def largest(x: Tokens, candidates: Flags, count: int) -> Flags:
    """Selects the `count` candidates with the largest values, or all of them if there are fewer."""
    chosen = candidates.new_zeros(candidates.numel())
    count = min(count, int(candidates.sum().item()))
    chosen[x.masked_fill(~candidates, float("-inf")).flatten().topk(count).indices] = True
    return chosen.view(candidates.shape)


PolicyLoss = Annotated[
    PPOClip | GSPO | GPGLoss | CISPO | GMPO | SAPO | DPPOTV | DPPOKL | ClipCov | KLCov | DRO | VESPO,
    Field(discriminator="type"),
]
