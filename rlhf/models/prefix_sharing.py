"""Prefix sharing: the tokens of a prompt are computed once for all its responses (arXiv 2506.05433).

Sequences are cut at the end of their prompts, and the pieces are concatenated without padding: each prompt once, then
all responses. All layers except attention process tokens independently. In attention, prompts attend to themselves, and
a response attends to its prompt and to itself. In the backward pass, a prompt's gradients are summed over its
responses. The result is that of whole sequences, except for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.models import segments
from ratchet.rlhf.models.segments import Segments

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from ratchet.rlhf.models.kv_cache import CachedPrompts

NAME = "ratchet_prefix_sharing"


@dataclass(frozen=True)
class AttentionBlock:
    """Pieces of similar length, which attention computes together; indices are into the concatenated tokens."""

    queries: Int[Tensor, "pieces query"]
    """The tokens that attend; padded on the right with any token."""
    keys: Int[Tensor, "pieces key"]
    """The tokens that they attend to."""
    visible: Bool[Tensor, "pieces 1 query key"] | None
    """True where a query attends to a key; the first dimension is 1 if all pieces share the mask.

    None: the keys are the queries, and attention is causal.
    """

    def to(self, device: torch.device) -> AttentionBlock:
        """Returns the block on a device."""
        visible = None if self.visible is None else accelerator.placed(self.visible, device)
        return AttentionBlock(accelerator.placed(self.queries, device), accelerator.placed(self.keys, device), visible)


@dataclass(frozen=True)
class SharedPrompts:
    """How the concatenated tokens attend to each other."""

    blocks: tuple[AttentionBlock, ...]
    order: Int[Tensor, " tokens"]
    """For each token, its index in the flattened queries of all blocks, one after the other."""

    @classmethod
    def of(cls, prompts: np.ndarray, responses: np.ndarray, prompt_of: np.ndarray) -> SharedPrompts:
        """Describes the concatenation of prompts, and then of their responses, on the CPU.

        Args:
            prompts: length of each prompt in tokens, shape (prompts,).
            responses: number of tokens of each response, shape (responses,).
            prompt_of: number of each response's prompt, shape (responses,).
        """
        starts = np.cumsum(prompts) - prompts
        response_starts = prompts.sum() + np.cumsum(responses) - responses
        blocks: list[AttentionBlock] = []
        order = np.zeros(prompts.sum() + responses.sum(), dtype=np.int64)

        def add(queries: np.ndarray, real: np.ndarray, keys: np.ndarray, visible: np.ndarray | None) -> None:
            order[queries[real]] = sum(block.queries.numel() for block in blocks) + np.flatnonzero(real)
            mask = None if visible is None else torch.from_numpy(visible[:, None])
            blocks.append(AttentionBlock(torch.from_numpy(queries), torch.from_numpy(keys), mask))

        for pieces in _similar(prompts):
            queries, real = _indices(starts[pieces], prompts[pieces])
            add(queries, real, queries, None)
        for pieces in _similar(responses, prompts[prompt_of]):
            queries, real = _indices(response_starts[pieces], responses[pieces])
            before, is_prompt = _indices(starts[prompt_of[pieces]], prompts[prompt_of[pieces]])
            width, longest = before.shape[1], queries.shape[1]
            visible = np.tri(longest, width + longest, width, dtype=bool)[None]
            if not is_prompt.all():
                visible = visible & np.pad(is_prompt, ((0, 0), (0, longest)), constant_values=True)[:, None]
            add(queries, real, np.concatenate([before, queries], axis=1), visible)
        return cls(tuple(blocks), torch.from_numpy(order))

    def to(self, device: torch.device) -> SharedPrompts:
        """Returns the layout on a device."""
        return SharedPrompts(tuple(block.to(device) for block in self.blocks), accelerator.placed(self.order, device))


def has_kernel(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if PyTorch has a kernel for `Segments` of this model's heads, on this device, in this type."""
    if attention_kinds(model.config) != {"full_attention"}:  # only such layers use it, and others may have no heads
        return False
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    latent = getattr(config, "kv_lora_rank", None) is not None  # keys and values then differ in size
    return segments.has_kernel(dim, device, dtype) and not latent


def _similar(*lengths: np.ndarray) -> list[np.ndarray]:
    """Groups pieces whose lengths have the same power of two, so that padding at most doubles a length.

    Pieces whose first length is 0 are left out.
    """
    real = np.flatnonzero(lengths[0])
    # the exponent of the smallest power of two that is not less than the length
    powers = np.stack([np.frexp(length[real] - 0.5)[1] for length in lengths])
    kinds, kind_of = np.unique(powers, axis=1, return_inverse=True)
    return [real[kind_of.ravel() == kind] for kind in range(kinds.shape[1])]


def _indices(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indexes the tokens of pieces, shape (pieces, longest), padded with index 0; also returns the mask."""
    at = np.arange(int(lengths.max()))
    real = at[None, :] < lengths[:, None]
    return np.where(real, starts[:, None] + at, 0), real


def attention_kinds(config: PreTrainedConfig) -> set[str]:
    """Returns the kinds of a model's layers, by transformers' names, such as `full_attention`, `linear_attention`."""
    text = config.get_text_config()
    if getattr(text, "num_attention_heads", None) is None and getattr(text, "layer_types", None) is None:
        return {"no attention"}
    window = "full_attention" if getattr(text, "sliding_window", None) is None else "sliding_attention"
    return set(getattr(text, "layer_types", None) or [window])


@torch.no_grad()
def adopt(model: PreTrainedModel) -> bool:
    """Makes a model's attention follow `SharedPrompts` or `CachedPrompts`; returns True if the model supports that.

    Without any, the model computes as before. All its layers must attend to all earlier tokens, by PyTorch's own
    attention; a trial on a few tokens checks that nothing else depends on other tokens.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    implementation = model.config.get_text_config()._attn_implementation
    if attention_kinds(model.config) != {"full_attention"} or implementation not in ("sdpa", NAME):
        return False
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    prompt, responses = torch.arange(3), torch.arange(3, 7).view(2, 2)
    whole = torch.cat([prompt.expand(2, 3), responses], dim=1)
    alone = _hidden(model, whole)[:, 3:].flatten(0, 1)
    shared = SharedPrompts.of(np.array([3]), np.array([2, 2]), np.array([0, 0])).to(model.device)
    row, positions = torch.cat([prompt, responses.flatten()])[None], torch.tensor([[0, 1, 2, 3, 4, 3, 4]])
    follow(model)
    together = _hidden(model, row, position_ids=positions.to(model.device), **inputs(shared))[0, 3:]
    return agree(together, alone)


def follow(model: PreTrainedModel) -> None:
    """Gives the decoder of a model the attention of `adopt`. A vision tower keeps its own."""
    # by the name of the part, where a model has several
    parts = [name for name in model.config.sub_configs if model.config.get_text_config() is getattr(model.config, name)]
    model.set_attn_implementation(dict.fromkeys(parts, NAME) if parts else NAME)


def agree(actual: Tensor, expected: Tensor) -> bool:
    """Returns True if two results of a model differ by at most a thousandth of the largest output."""
    size = max(1.0, float(expected.abs().max()))
    return torch.allclose(actual.float(), expected.float(), rtol=0, atol=1e-3 * size)


def _hidden(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Tensor:
    hidden: Tensor = model.base_model(
        input_ids=input_ids.to(model.device), use_cache=False, **options
    ).last_hidden_state
    return hidden


def inputs(prompts: SharedPrompts | Segments | CachedPrompts | None) -> dict[str, Any]:
    """Returns the arguments of a model's forward that it passes on to its attention. None: each row is a sequence."""
    # its four dimensions keep the model from building a mask of its own, for which it would wait for the GPU
    name = "shared" if prompts is None or isinstance(prompts, SharedPrompts | Segments) else "prompts"
    return {name: prompts, "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool)}


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared: SharedPrompts | Segments | None = None,
    prompts: CachedPrompts | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if prompts is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return prompts.attend(module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]
    if shared is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # a single element is that of `inputs`, or hides nothing from the only token
        mask = None if attention_mask is not None and attention_mask.numel() == 1 else attention_mask
        attended, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
        return attended, None
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))  # [tokens, heads, dim]
    if isinstance(shared, Segments):
        return shared.attend(query, key, value, scaling)[None], None
    return _attend_by_blocks(shared, query, key, value, scaling)[None], None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each number of blocks would compile another program
def _attend_by_blocks(
    shared: SharedPrompts, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """[tokens, heads, dim] -> [tokens, heads, dim]"""
    groups = query.shape[1] // key.shape[1]

    def attend(block: AttentionBlock) -> Tensor:
        keys, values = _pieces(key, block.keys), _pieces(value, block.keys)
        # no fast kernel takes a mask and groups
        repeats = groups > 1 and block.visible is not None and accelerator.is_gpu(key.device)
        if repeats:
            keys, values = (heads.repeat_interleave(groups, dim=1) for heads in (keys, values))
        attended = scaled_dot_product_attention(
            _pieces(query, block.queries),
            keys,
            values,
            attn_mask=block.visible,
            is_causal=block.visible is None,
            scale=scaling,
            enable_gqa=groups > 1 and not repeats,
        )
        return attended.transpose(1, 2).flatten(0, 1)

    attended = torch.cat([attend(block) for block in shared.blocks])
    return attended.index_select(0, shared.order)


def _pieces(tokens: Tensor, at: Tensor) -> Tensor:
    """[tokens, heads, dim] at [pieces, width] -> [pieces, heads, width, dim]"""
    return tokens.index_select(0, at.flatten()).view(*at.shape, *tokens.shape[1:]).transpose(1, 2)
