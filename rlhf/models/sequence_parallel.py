"""Sequence parallelism (Ulysses, arXiv 2309.14509): each process of a team has a share of a sequence's positions.

All layers except attention process positions independently. For attention, the processes exchange shares of positions
for shares of heads, and back. Every member computes the loss from the whole outputs, but sends gradients only through
its own positions; engines sum them over all processes, which gives the gradients of whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.rlhf.distributed import accelerator, ranks
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.prefix_sharing import attention_kinds

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from transformers import PreTrainedConfig, PreTrainedModel

    from ratchet.rlhf.models.segments import Segments

NAME = "ratchet_sequence_parallel"


@dataclass(frozen=True)
class OwnTokens:
    """Those of a micro-batch's response tokens that are in a process's share of the sequences."""

    tokens: Int[Tensor, " mine"]
    """Their numbers."""
    at: Int[Tensor, " mine"]
    """Their indices in the flattened share."""

    def to(self, device: torch.device) -> OwnTokens:
        """Returns them on a device."""
        return OwnTokens(accelerator.placed(self.tokens, device), accelerator.placed(self.at, device))


@dataclass(frozen=True)
class Team:
    """The processes that split each sequence."""

    size: int
    index: int
    """Index of this process in the team."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, size: int) -> Team:
        """Returns this process's team of `size` adjacent ranks; all processes must call this."""
        assert ranks.count() % size == 0
        index = ranks.rank() % size
        first = ranks.rank() - index
        return cls(size, index, ranks.group(range(first, first + size), "sequence_parallel"))

    def check(self, model: PreTrainedModel) -> None:
        """Raises UserError for a model with the wrong number of heads, or layers without full attention."""
        if reason := refusal(model.config, self.size):
            raise UserError(f"sequence_parallel {reason}")

    def adopt(self, model: PreTrainedModel) -> None:
        """Makes the attention of a model that passed `check` exchange shares between the members, in place."""
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, _attention)
        model.set_attn_implementation(NAME)

    def share(self, whole: Int[Tensor, "sequences time"]) -> Int[Tensor, "sequences share"]:
        """Returns this process's positions, shape (sequences, time / size), of a tensor of shape (sequences, time)."""
        return whole[:, self.index * self._width(whole) : (self.index + 1) * self._width(whole)]

    def padded(self, input_ids: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Pads sequences on the right to a multiple of `size`; `position_ids` None: counted from the left."""
        missing = -input_ids.shape[1] % self.size
        ids = torch.nn.functional.pad(input_ids, (0, missing))
        if position_ids is None:
            return ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return ids, torch.nn.functional.pad(position_ids, (0, missing))

    def own(self, at: Int[Tensor, " tokens"], time: int) -> OwnTokens:
        """Finds tokens in this process's share by their indices in the flattened sequences of `time` tokens.

        The indices are on the host: how many tokens a process has would be a number to wait for on a GPU.
        """
        width = -(-time // self.size)
        sequence, position = at // time, at % time
        tokens = (position // width == self.index).nonzero().flatten()
        return OwnTokens(tokens, (sequence * width + position % width)[tokens])

    def whole(self, values: Float[Tensor, "mine ..."], own: OwnTokens, count: int) -> Float[Tensor, "tokens ..."]:
        """Combines the values of all members, of so many tokens; gradients flow only to this process's values."""
        return self.summed(values.new_zeros((count, *values.shape[1:])).index_copy(0, own.tokens, values))

    def summed(self, local: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Sums a tensor over the members; gradients flow only to this process's share."""
        total = local.detach().clone()
        dist.all_reduce(total, group=self.group)
        return local + (total - local.detach())

    def _width(self, whole: Tensor) -> int:
        return whole.shape[1] // self.size


def refusal(config: PreTrainedConfig, size: int) -> str | None:
    """Returns why a team of this size cannot split the sequences of a model; None if it can."""
    kinds = attention_kinds(config)
    if kinds != {"full_attention"}:
        return f"needs full attention in every layer, but the model has {sorted(kinds)}"
    heads = config.get_text_config().num_attention_heads
    if heads % size:
        return f"is {size}, which does not divide the model's {heads} attention heads"
    return None


class _Exchange(torch.autograd.Function):
    """Sends slice i of the first dimension to member i and receives one slice from each; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, slices: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        slices = slices.contiguous()
        received = torch.empty_like(slices)
        dist.all_to_all_single(received, slices, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        received: Tensor = _Exchange.apply(gradients[0], ctx.group)  # type: ignore[no-untyped-call]
        return received, None


def _by_heads(shares: Tensor, team: Team) -> Tensor:
    """[sequences, heads, share, dim] -> [sequences, heads / team, time, dim]"""
    sequences, heads, width, dim = shares.shape
    slices = shares.view(sequences, team.size, heads // team.size, width, dim).transpose(0, 1)
    received: Tensor = _Exchange.apply(slices, team.group)  # type: ignore[no-untyped-call]
    return received.permute(1, 2, 0, 3, 4).reshape(sequences, heads // team.size, team.size * width, dim)


def _by_positions(shares: Tensor, team: Team) -> Tensor:
    """[sequences, heads / team, time, dim] -> [sequences, heads, share, dim]"""
    sequences, heads, time, dim = shares.shape
    slices = shares.view(sequences, heads, team.size, time // team.size, dim).permute(2, 0, 1, 3, 4)
    received: Tensor = _Exchange.apply(slices, team.group)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).reshape(sequences, heads * team.size, time // team.size, dim)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    team: Team,
    segments: Segments | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if softcap is not None or s_aux is not None:
        raise UserError("sequence_parallel does not support this model's attention: leave it out")
    groups = query.shape[1] // key.shape[1]
    if key.shape[1] % team.size:  # key heads cannot be split evenly, so repeat them for each query head
        key, value = (shares.repeat_interleave(groups, dim=1) for shares in (key, value))
        groups = 1
    query, key, value = (_by_heads(shares, team) for shares in (query, key, value))
    if segments is not None:
        real = (heads[0, :, : segments.tokens].transpose(0, 1) for heads in (query, key, value))
        packed = segments.attend(*real, scaling).transpose(0, 1)[None]
        attended = torch.nn.functional.pad(packed, (0, 0, 0, query.shape[2] - segments.tokens))
        return _by_positions(attended, team).transpose(1, 2), None
    if groups > 1:
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return _by_positions(attended, team).transpose(1, 2), None
