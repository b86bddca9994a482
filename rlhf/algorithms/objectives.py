"""Training objectives: the complete loss that an update minimizes, for any train engine.

An objective names the columns that it reads and computes loss and metrics of one micro-batch. Both are contributions to
those of the mini-batch (see `masked`), so an engine only has to add them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from jaxtyping import Float
from torch.nn.functional import logsigmoid

from ratchet.rlhf.algorithms.distillation import Distillation
from ratchet.rlhf.algorithms.kl import Estimator, kl_divergence
from ratchet.rlhf.algorithms.masked import Aggregation, LossNormalizers, aggregate, masked_mean, sequence_sum
from ratchet.rlhf.algorithms.policy_losses import PolicyLossBase, SelectingLoss
from ratchet.rlhf.algorithms.rollout_correction import RolloutCorrection
from ratchet.rlhf.algorithms.tensor import Tensor

Tokens = Float[Tensor, "batch response"]
TEACHER = "teacher_topk_ids", "teacher_topk_log_probs", "teacher_tail_log_probs"
"""Columns that describe the teacher's most likely tokens."""
Outputs = Mapping[str, Tokens]
Selection = Callable[[Outputs, Outputs], Tokens]
Share = tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]


class Objective(Protocol):
    """A loss that a train engine minimizes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the per-token columns of the batch that the objective reads, including `loss_mask`."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the model outputs that the objective reads: `log_probs`, `entropy`, `values` or `scores`; and
        `topk_log_probs` and `tail_log_probs` at the tokens of the column `teacher_topk_ids`."""
        ...

    @property
    def selection(self) -> Selection | None:
        """Computes the column `selected` of a whole mini-batch from its outputs and columns; None: no such column."""
        ...

    @property
    def together(self) -> int:
        """Number of consecutive rows that must be in the same micro-batch: 2 for pairs."""
        ...

    @property
    def prefix(self) -> str:
        """First part of the names of the metrics, and of those that the engine adds."""
        ...

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share:
        """Computes a micro-batch's contribution to the loss and metrics of its mini-batch.

        Args:
            outputs: per-token model outputs by name, float32, shape (micro-batch, response), or with the teacher's k
                tokens as a third dimension.
            batch: per-token columns by name, float32, same shapes.

        Returns:
            The loss and the metrics by name, scalars. They add up over the micro-batches of a mini-batch.
        """
        ...


@dataclass(frozen=True)
class ActorObjective:
    r"""The actor's objective, :math:`L_{policy} - c_H H + \beta KL(\pi\|\pi_{ref}) + c D(\pi, \pi_T)`.

    The entropy and the divergences from reference and teacher are aggregated like the policy loss.
    """

    policy_loss: PolicyLossBase
    kl_in_loss: float | None
    kl_estimator: Estimator
    entropy_coef: float
    on_policy: bool
    """True if there are no old log-probs: the update is a single pass over a single mini-batch, starting from the actor
    that generated it. The ratio is then 1 and only its gradient matters."""
    weighted: bool = False
    """True if the batch has token weights from rollout correction."""
    correction: RolloutCorrection | None = None
    """The rollout correction with `bypass`, which compares the current log-probs with the rollout's, given as the old
    ones; None: what it says is in `weighted` and the mask already."""
    distillation: Distillation | None = None
    """The teacher's term of the loss; None: there is no teacher, or it is in the advantages."""
    horizon: int | None = None
    """Maximum response length in tokens, for `seq-mean-token-sum-norm`; None: the longest of the mini-batch."""
    together: int = 1
    prefix: str = "actor"

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Objective.columns`."""
        needs = [name for name in self.policy_loss.needs if name != "old_log_probs" or not self.on_policy]
        if self.correction is not None and "old_log_probs" not in needs:
            needs += self.correction.needs
        ref = ("ref_log_probs",) if self.kl_in_loss is not None else ()
        teacher = TEACHER if self.distillation is not None else ()
        return ("loss_mask", "advantages", *needs, *ref, *teacher, *(("rollout_is_weights",) if self.weighted else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        """See `Objective.outputs`."""
        entropy = ("entropy",) if self.entropy_coef else ()
        return ("log_probs", *entropy, *(("topk_log_probs", "tail_log_probs") if self.distillation is not None else ()))

    @property
    def selection(self) -> Selection | None:
        """The selection of a `SelectingLoss`; None for other losses; see `Objective.selection`."""
        return self._select if isinstance(self.policy_loss, SelectingLoss) else None

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share:
        """Computes the actor's loss and metrics of a micro-batch; see `Objective.__call__`.

        A `SelectingLoss` also reads the column `selected`; without it, it selects by comparing the micro-batch's tokens
        only.
        """
        mask, log_probs, how = batch["loss_mask"], outputs["log_probs"], self.policy_loss.how
        if self.horizon is not None:
            normalizers = replace(normalizers, horizon=self.horizon)
        options = {"selected": batch["selected"] > 0} if "selected" in batch else {}
        if self.weighted:
            options["rollout_is_weights"] = batch["rollout_is_weights"]
        old, kept = self._old(log_probs, batch), mask
        corrected: dict[str, Float[Tensor, ""]] = {}
        if self.correction is not None:
            kept, corrected = self._kept(log_probs, old, mask, normalizers)
            if self.correction.weights is not None:
                options["rollout_is_weights"] = weights = self.correction.weights(log_probs.detach(), old, mask)
                corrected["rollout_is_mean"] = masked_mean(weights, mask, normalizers)
        loss, metrics = self.policy_loss(log_probs, old, batch["advantages"], kept, normalizers, **options)
        metrics = {f"actor/{name}": value for name, value in metrics.items()} | {"actor/pg_loss": loss}
        metrics |= {f"rollout_corr/{name}": value for name, value in corrected.items()}
        if self.entropy_coef:
            metrics["actor/entropy_loss"] = entropy = aggregate(outputs["entropy"], mask, how, normalizers)
            loss = loss - self.entropy_coef * entropy
        if self.kl_in_loss is not None:
            kl = kl_divergence(log_probs, batch["ref_log_probs"], self.kl_estimator)
            metrics["actor/kl_loss"] = aggregate(kl, mask, how, normalizers)
            loss = loss + self.kl_in_loss * metrics["actor/kl_loss"]
        if self.distillation is not None:
            top, tail = outputs["topk_log_probs"], outputs["tail_log_probs"]
            teacher = batch["teacher_topk_log_probs"], batch["teacher_tail_log_probs"]
            divergence = self.distillation.of_tokens(top, tail, *teacher)
            metrics["actor/distillation_loss"] = aggregate(divergence, mask, how, normalizers)
            loss = loss + self.distillation.coef * metrics["actor/distillation_loss"]
        return loss, metrics

    def _kept(
        self, log_probs: Tokens, old: Tokens, mask: Tokens, normalizers: LossNormalizers
    ) -> tuple[Tokens, dict[str, Float[Tensor, ""]]]:
        """Returns the mask without the tokens that the correction rejects, and their share of all by name.

        The rejected tokens still count in the normalizers, as in verl.
        """
        assert self.correction is not None
        kept, rejected = mask, {}
        for rejection in self.correction.rejection:
            passing = rejection(log_probs.detach(), old, mask)
            rejected[f"rollout_rs_{rejection.statistic}_masked_fraction"] = masked_mean(
                1.0 - passing, mask, normalizers
            )
            kept = kept * passing
        return kept, rejected

    def _select(self, outputs: Outputs, batch: Outputs) -> Tokens:
        assert isinstance(self.policy_loss, SelectingLoss)
        mask, log_probs = batch["loss_mask"], outputs["log_probs"]
        noise = batch.get("selection_noise", log_probs)  # losses that do not need noise ignore it
        selected = self.policy_loss.select(log_probs, self._old(log_probs, batch), batch["advantages"], mask, noise)
        return selected.to(mask.dtype)

    def _old(self, log_probs: Tokens, batch: Outputs) -> Tokens:
        """Returns the old log-probs; on policy, or for a loss without a ratio, the current ones."""
        return batch.get("old_log_probs", log_probs.detach())


@dataclass(frozen=True)
class CriticObjective:
    r"""The clipped value loss of PPO's reference code (arXiv 1707.06347; arXiv 2005.12729 measures its effect):

    .. math::
        \tfrac12 \max\left((V - R)^2, (\operatorname{clip}(V, V_{old} - \epsilon, V_{old} + \epsilon) - R)^2\right)

    If `cliprange_value` is None, values are not clipped.
    """

    cliprange_value: float | None
    aggregate: Aggregation = "token-mean"
    columns: tuple[str, ...] = ("loss_mask", "returns", "values")
    outputs: tuple[str, ...] = ("values",)
    selection: None = None
    together: int = 1
    prefix: str = "critic"

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share:
        """Computes the loss from `values` before the update and current ones; see `Objective.__call__`."""
        mask, predicted = batch["loss_mask"], outputs["values"]
        error = squared = (predicted - batch["returns"]).square()
        if self.cliprange_value is not None:
            low, high = batch["values"] - self.cliprange_value, batch["values"] + self.cliprange_value
            error = squared.maximum((predicted.clamp(low, high) - batch["returns"]).square())
        loss = 0.5 * aggregate(error, mask, self.aggregate, normalizers)
        return loss, {
            f"{self.prefix}/vf_loss": loss,
            f"{self.prefix}/vf_clipfrac": masked_mean((error > squared).to(loss.dtype), mask, normalizers),
            f"{self.prefix}/vpred_mean": masked_mean(predicted, mask, normalizers),
        }


@dataclass(frozen=True)
class SupervisedObjective:
    """Supervised fine-tuning: the negative log-likelihood of the responses in nats, averaged over tokens."""

    columns: tuple[str, ...] = ("loss_mask",)
    outputs: tuple[str, ...] = ("log_probs",)
    selection: None = None
    together: int = 1
    prefix: str = "actor"

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share:
        """Computes the loss of a micro-batch, in nats per token; see `Objective.__call__`."""
        loss = aggregate(-outputs["log_probs"], batch["loss_mask"], "token-mean", normalizers)
        return loss, {"sft/loss": loss}


@dataclass(frozen=True)
class PreferenceObjective:
    r"""The Bradley-Terry preference loss: the negative log-likelihood that the first response of each pair is preferred
    to the second (arXiv 1706.03741, 2203.02155),

    .. math::
        -\log \sigma(r_{chosen} - r_{rejected})

    averaged over the pairs. A pair is two consecutive rows with one score each.
    """

    columns: tuple[str, ...] = ("loss_mask",)
    outputs: tuple[str, ...] = ("scores",)
    selection: None = None
    together: int = 2
    prefix: str = "reward"

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share:
        """Computes the loss and metrics of a micro-batch of pairs, the chosen response first; see `Objective.__call__`.

        `normalizers.sequences` is twice the number of pairs.
        """
        scores = sequence_sum(outputs["scores"], batch["loss_mask"])
        margin, pairs = scores[0::2] - scores[1::2], normalizers.sequences / 2
        loss = -logsigmoid(margin).sum() / pairs
        return loss, {
            "reward/loss": loss,
            "reward/accuracy": (margin > 0).to(loss.dtype).sum() / pairs,
            "reward/margin": margin.sum() / pairs,
        }
