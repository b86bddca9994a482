"""What an update minimizes: the whole objective of the actor and of the critic, for any train engine.

An objective names the columns it reads and turns one micro-batch into a loss and metrics. Both are shares of the
mini-batch's (see `masked`), so an engine only has to add them up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch.nn.functional import logsigmoid

from rlhf.algorithms import PolicyLoss
from rlhf.algorithms.kl import Estimator, kl_divergence
from rlhf.algorithms.masked import Aggregation, LossNormalizers, aggregate, masked_mean, sequence_sum
from rlhf.algorithms.policy_losses import SelectingLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Float
    from torch import Tensor

    Tokens = Float[Tensor, "batch response"]
    Outputs = Mapping[str, Tokens]
    Selection = Callable[[Outputs, Outputs], Tokens]
    Share = tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]


class Objective(Protocol):
    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns of the batch that the objective reads, `loss_mask` among them."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """What it asks of the model's forward pass: `log_probs`, `entropy` or `values`."""
        ...

    @property
    def selection(self) -> Selection | None:
        """From a whole mini-batch to a column, `selected`, that its micro-batches are then given besides."""
        ...

    @property
    def together(self) -> int:
        """So many rows, one after the other, come into the same micro-batch: 2 for pairs."""
        ...

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share: ...


@dataclass(frozen=True)
class ActorObjective:
    r""":math:`L_{policy} - c_H H + \beta KL(\pi\|\pi_{ref})`, each aggregated as the policy loss says.

    `on_policy`: there are no old log-probs, because one pass over one mini-batch starts from the actor that
    generated; the ratio is 1 and only its gradient matters.
    """

    policy_loss: PolicyLoss
    kl_in_loss: float | None
    kl_estimator: Estimator
    entropy_coef: float
    on_policy: bool
    weighted: bool = False
    """Whether rollout correction gave the tokens weights."""
    horizon: int | None = None
    """The longest that a response may be, for `seq-mean-token-sum-norm`; None: the longest of the mini-batch."""
    together: int = 1

    @property
    def columns(self) -> tuple[str, ...]:
        needs = [name for name in self.policy_loss.needs if name != "old_log_probs" or not self.on_policy]
        ref = ("ref_log_probs",) if self.kl_in_loss is not None else ()
        return ("loss_mask", "advantages", *needs, *ref, *(("rollout_is_weights",) if self.weighted else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("log_probs", "entropy") if self.entropy_coef else ("log_probs",)

    @property
    def selection(self) -> Selection | None:
        return self._select if isinstance(self.policy_loss, SelectingLoss) else None

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share:
        mask, log_probs, how = batch["loss_mask"], outputs["log_probs"], self.policy_loss.how
        if self.horizon is not None:
            normalizers = replace(normalizers, horizon=self.horizon)
        more = {"selected": batch["selected"] > 0} if "selected" in batch else {}
        if self.weighted:
            more["rollout_is_weights"] = batch["rollout_is_weights"]
        old = self._old(log_probs, batch)
        loss, metrics = self.policy_loss(log_probs, old, batch["advantages"], mask, normalizers, **more)
        metrics = {f"actor/{name}": value for name, value in metrics.items()} | {"actor/pg_loss": loss}
        if self.entropy_coef:
            metrics["actor/entropy_loss"] = entropy = aggregate(outputs["entropy"], mask, how, normalizers)
            loss = loss - self.entropy_coef * entropy
        if self.kl_in_loss is not None:
            kl = kl_divergence(log_probs, batch["ref_log_probs"], self.kl_estimator)
            metrics["actor/kl_loss"] = aggregate(kl, mask, how, normalizers)
            loss = loss + self.kl_in_loss * metrics["actor/kl_loss"]
        return loss, metrics

    def _select(self, outputs: Outputs, batch: Outputs) -> Tokens:
        assert isinstance(self.policy_loss, SelectingLoss)
        mask, log_probs = batch["loss_mask"], outputs["log_probs"]
        noise = batch.get("selection_noise", log_probs)  # only a loss that needs noise looks at it
        found = self.policy_loss.select(log_probs, self._old(log_probs, batch), batch["advantages"], mask, noise)
        return found.to(mask.dtype)

    def _old(self, log_probs: Tokens, batch: Outputs) -> Tokens:
        """The old log-probs; on policy, and for a loss without a ratio, the current ones."""
        return batch.get("old_log_probs", log_probs.detach())


@dataclass(frozen=True)
class CriticObjective:
    r"""The clipped value loss (PPO's reference code, arXiv 1707.06347; arXiv 2005.12729 measures it):

    .. math::
        \tfrac12 \max\left((V - R)^2, (\operatorname{clip}(V, V_{old} - \epsilon, V_{old} + \epsilon) - R)^2\right)

    `cliprange_value` None leaves the clipping out.
    """

    cliprange_value: float | None
    aggregate: Aggregation = "token-mean"
    columns: tuple[str, ...] = ("loss_mask", "returns", "values")
    outputs: tuple[str, ...] = ("values",)
    selection: None = None
    together: int = 1

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share:
        mask, predicted = batch["loss_mask"], outputs["values"]
        error = squared = (predicted - batch["returns"]).square()
        if self.cliprange_value is not None:
            low, high = batch["values"] - self.cliprange_value, batch["values"] + self.cliprange_value
            error = squared.maximum((predicted.clamp(low, high) - batch["returns"]).square())
        loss = 0.5 * aggregate(error, mask, self.aggregate, normalizers)
        return loss, {
            "critic/vf_loss": loss,
            "critic/vf_clipfrac": masked_mean((error > squared).to(loss.dtype), mask, normalizers),
            "critic/vpred_mean": masked_mean(predicted, mask, normalizers),
        }


@dataclass(frozen=True)
class SupervisedObjective:
    """The negative log-likelihood of the responses, per token: supervised fine-tuning."""

    columns: tuple[str, ...] = ("loss_mask",)
    outputs: tuple[str, ...] = ("log_probs",)
    selection: None = None
    together: int = 1

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share:
        loss = aggregate(-outputs["log_probs"], batch["loss_mask"], "token-mean", normalizers)
        return loss, {"sft/loss": loss}


@dataclass(frozen=True)
class PreferenceObjective:
    r"""Bradley and Terry's model of preferences: the negative log-likelihood that the first response of each pair is
    preferred to the second (arXiv 1706.03741, 2203.02155),

    .. math::
        -\log \sigma(r_{chosen} - r_{rejected})

    averaged over the pairs, which are two rows each, with one score each.
    """

    columns: tuple[str, ...] = ("loss_mask",)
    outputs: tuple[str, ...] = ("scores",)
    selection: None = None
    together: int = 2

    def __call__(self, outputs: Outputs, batch: Outputs, normalizers: LossNormalizers) -> Share:
        scores = sequence_sum(outputs["scores"], batch["loss_mask"])
        margin, pairs = scores[0::2] - scores[1::2], normalizers.sequences / 2
        loss = -logsigmoid(margin).sum() / pairs
        return loss, {
            "reward/loss": loss,
            "reward/accuracy": (margin > 0).to(loss.dtype).sum() / pairs,
            "reward/margin": margin.sum() / pairs,
        }
