"""The router's auxiliary loss of a mixture of experts, which keeps the load of the experts balanced (arXiv 2101.03961).

It is computed if the model's `config.json` asks for it, as in transformers: `output_router_logits: true`, with
`router_aux_loss_coef`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel

NAME = "router_aux_loss"


@dataclass(frozen=True)
class RouterLoss:
    """Settings of the loss."""

    coefficient: float
    top_k: int
    """Number of experts per token."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> RouterLoss | None:
        """Reads the settings from a model's config, None if it does not ask for the loss. Raises UserError if the model
        has none."""
        config = model.config.get_text_config()
        if not getattr(config, "output_router_logits", False):
            return None
        coefficient, top_k = (getattr(config, key, None) for key in ("router_aux_loss_coef", "num_experts_per_tok"))
        records = getattr(model.base_model, "_can_record_outputs", None) or {}
        if coefficient is None or top_k is None or "router_logits" not in records:
            raise UserError(
                f"output_router_logits is true in the model's config.json, but {type(model).__name__} has no auxiliary "
                "loss: set it to false"
            )
        return cls(float(coefficient), int(top_k))

    def __call__(
        self,
        router_logits: Sequence[Float[Tensor, "tokens experts"]],
        copies: Int[Tensor, " tokens"],
        summed: Callable[[Tensor], Tensor] = lambda local: local,
    ) -> Float[Tensor, ""]:
        r"""Computes :math:`E \sum_e f_e P_e` over the tokens of all layers.

        f is the share of tokens routed to expert e, and P its mean probability.

        Args:
            copies: weight of each token: the number of sequences that contain it, 0 for padding.
            summed: sums a tensor over the processes that have other tokens of the same sequences.

        Returns:
            The loss before `coefficient`, float32.
        """
        weights = copies[:, None].float()
        experts = router_logits[0].shape[-1]
        chosen, probabilities = (weights.new_zeros(experts) for _ in range(2))
        for logits in router_logits:
            routing = logits.float().softmax(-1)
            top = routing.detach().topk(self.top_k, dim=-1).indices
            chosen = chosen + torch.zeros_like(routing).scatter_(-1, top, 1.0).mul(weights).sum(0)
            probabilities = probabilities + (routing * weights).sum(0)
        count = len(router_logits) * summed(weights.sum()).clamp(min=1.0)
        loss: Tensor = experts * (summed(chosen) * summed(probabilities)).sum() / count.square()
        return loss
