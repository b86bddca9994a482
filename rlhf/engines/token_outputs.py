"""A model that is asked about some of its tokens: their log-probs and entropy, their values, or the scores of what they
end.

Logits are made for those tokens alone, so many at a time that all of them (tokens x vocabulary) are never in memory;
where gradients flow, they are made again in the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from rlhf.engines import ranks
from rlhf.engines.sequence_parallel import Team, visible
from rlhf.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel

Head = Literal["policy", "value", "reward"]
LOGITS_BYTES = 2**28
"""Largest piece of float32 logits."""


class TokenOutputs(torch.nn.Module):
    """What an engine shares out, compiles and calls; the model keeps its own names."""

    def __init__(self, model: PreTrainedModel, head: Head, *, team: Team | None = None, packing: bool = False) -> None:
        """`team`: the processes that share each sequence between them. Raises `UserError` for a model of which that,
        `packing`, or its log-probs would come out wrong."""
        super().__init__()
        self.model = model
        self.head = head
        self.team = team
        self.in_step = False
        """Whether all ranks call the head equally often: where that is when they gather its weights."""
        self._check(packing)

    def forward(
        self,
        input_ids: Int[Tensor, "sequences time"],
        position_ids: Int[Tensor, "sequences time"] | None,
        at: Int[Tensor, " tokens"],
        targets: Int[Tensor, " tokens"],
        temperature: float,
        outputs: tuple[str, ...],
    ) -> dict[str, Float[Tensor, " tokens"]]:
        """`at`: the places (in the flattened `input_ids`) that predict the `targets`."""
        if self.team is None:
            return self._of_tokens(input_ids, position_ids, at, targets, temperature, outputs)
        team = self.team
        before = input_ids.shape[1]
        input_ids, positions = team.padded(input_ids, position_ids)
        time = input_ids.shape[1]
        is_mine, mine = team.mine(at // before * time + at % before, time)
        attend = {"team": team, "visible": visible(positions)}
        found = self._of_tokens(
            team.share(input_ids), team.share(positions), mine, targets[is_mine], temperature, outputs, **attend
        )
        return {name: team.whole(values, is_mine) for name, values in found.items()}

    def _of_tokens(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        at: Tensor,
        targets: Tensor,
        temperature: float,
        outputs: tuple[str, ...],
        **attend: Any,
    ) -> dict[str, Tensor]:
        inputs = {"input_ids": input_ids, "position_ids": position_ids, **attend}
        if self.head == "value":
            values = self.model(**inputs, use_cache=False).logits
            return {"values": values.flatten().index_select(0, at).float()}
        hidden = self._hidden(**inputs).flatten(0, 1).index_select(0, at)
        if self.head == "reward":
            return {"scores": self.model.score(hidden)[:, 0].float()}
        return self._of_policy(hidden, targets, temperature, outputs)

    def _of_policy(
        self, hidden: Tensor, targets: Tensor, temperature: float, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        size = max(1, LOGITS_BYTES // (4 * self.model.config.get_text_config().vocab_size))
        count = -(-len(targets) // size)
        if self.in_step:
            count = ranks.largest(count)
        if count <= 1:
            return self._piece(hidden, targets, temperature, outputs)
        pieces = [
            checkpoint(self._piece, *piece, temperature, outputs, use_reentrant=False)
            for piece in zip(torch.tensor_split(hidden, count), torch.tensor_split(targets, count), strict=True)
        ]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def _piece(
        self, hidden: Tensor, targets: Tensor, temperature: float, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        log_probs, entropy = log_probs_and_entropy(
            self._logits(hidden), targets, temperature, entropy="entropy" in outputs
        )
        return {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(config, "logit_scale", None)) is not None:
            logits = logits * factor
        return logits

    @torch.no_grad()
    def _check(self, packing: bool) -> None:
        """Try on a few tokens what an architecture may not do as others do, before anything is trained wrongly."""
        name, attention = type(self.model).__name__, self.model.config._attn_implementation
        plain = attention in ("sdpa", "eager")  # they compute everywhere, and in float32
        if not plain:
            self.model.set_attn_implementation("sdpa")
        ids = torch.arange(4 * (self.team.size if self.team is not None else 1), device=self.model.device)[None]
        alone = self._hidden(ids)
        if self.head == "policy" and _differ(self._logits(alone), self.model(input_ids=ids, use_cache=False).logits):
            raise UserError(
                f"{name} changes the logits of its head in a way that is not known here: its log-probs would be "
                "wrong; choose a model of another architecture"
            )
        if self.head == "reward" and not hasattr(self.model, "score"):
            raise UserError(f"{name} does not score a conversation by its last token: choose a decoder")
        if packing:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            twice = self._hidden(ids.repeat(1, 2), position_ids=positions.repeat(1, 2))
            if _differ(twice[:, ids.shape[1] :], alone):
                raise UserError(f"{name} does not tell packed sequences apart: leave packing out")
        if self.team is not None:
            self.team.adopt(self.model)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            share = [self.team.share(each) for each in (ids, positions)]
            mine = self._hidden(share[0], position_ids=share[1], team=self.team, visible=None)
            if ranks.largest(int(_differ(mine, self.team.share(alone)))):
                raise UserError(f"{name} does not attend over shares of a sequence: leave sequence_parallel out")
        elif not plain:
            self.model.set_attn_implementation(attention)

    def _hidden(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return self.model.base_model(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state  # type: ignore[no-any-return]


def _differ(found: Tensor, expected: Tensor) -> bool:
    size = max(1.0, float(expected.abs().max()))
    return not torch.allclose(found.float(), expected.float(), rtol=0, atol=1e-3 * size)


def log_probs_and_entropy(
    logits: Float[Tensor, "*tokens vocab"], targets: Int[Tensor, "*tokens"], temperature: float, *, entropy: bool
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"] | None]:
    r""":math:`\log\pi(y) = z_y - lse(z)` and :math:`H = lse(z) - \sum_v \pi_v z_v` of the temperature-scaled
    logits z, in float32; lse is the log of the sum of exponentials."""
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    normalizer = scaled.logsumexp(-1)
    log_probs = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
    if not entropy:
        return log_probs, None
    return log_probs, normalizer - ((scaled - normalizer.unsqueeze(-1)).exp() * scaled).sum(-1)
