"""Maps weights between the hub's layout and Megatron's: a table of names and shapes, which reads both ways.

Megatron keeps the projections of attention in one matrix, ordered by groups of heads (the queries of a group, its key,
its value), and an MLP's gate and up projections in another. Tensor parallelism cuts matrices by rows or by columns,
pipeline parallelism gives each rank some of the layers, and expert parallelism some of the experts. Here every element
of a rank's parameters is traced to a parameter in transformers, so that weights, moments and digests are those of whole
tensors, in any layout; `hub_layout` knows their names in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal

import torch

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.weights.tensor_shards import TensorShard

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of whole tensors, by their names in transformers."""
Cut = Literal["whole", "rows", "columns", "gate", "groups", "experts"]
"""How ranks share a matrix: each has all of it, some rows, or some columns.

`gate`: rows of two matrices, one after the other. `groups`: rows of three, those of a group of heads together.
`experts`: some of a tensor's matrices, each of which is a parameter in Megatron.
"""

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
DIVIDED_BY_TENSORS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
LAYER = "model.layers.{}."
LOCAL_LAYER = "decoder.layers.{}."
EXPERTS = "mlp.experts."
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

FIRST: tuple[tuple[Cut, str, tuple[str, ...]], ...] = (("rows", "embedding.word_embeddings.weight", (EMBEDDING,)),)
"""Parameters of the first stage outside of layers: cut, name in Megatron, and their parameters in transformers."""
LAST: tuple[tuple[Cut, str, tuple[str, ...]], ...] = (
    ("whole", "decoder.final_layernorm.weight", ("model.norm.weight",)),
    ("rows", "output_layer.weight", (HEAD,)),
    ("whole", "output_layer.weight", ("score.weight",)),
    ("whole", "output_layer.bias", ("score.bias",)),
)
"""Parameters of the last stage outside of layers."""
LAYERS: tuple[tuple[Cut, str, tuple[str, ...]], ...] = (
    ("whole", "input_layernorm.weight", ("input_layernorm.weight",)),
    (
        "groups",
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    (
        "groups",
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
    ("whole", "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    ("whole", "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    ("columns", "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    ("whole", "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    ("gate", "mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ("columns", "mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    ("whole", "mlp.router.weight", ("mlp.gate.weight",)),
    ("experts", "mlp.experts.local_experts.{}.linear_fc1.weight", ("mlp.experts.gate_up_proj",)),
    ("experts", "mlp.experts.local_experts.{}.linear_fc2.weight", ("mlp.experts.down_proj",)),
)
"""Parameters of each layer, without the layer's name; a layer has an MLP or experts."""
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.experts.local_experts.{}.linear_fc1.weight": "mlp.experts.linear_fc1.weight{}",
    "mlp.experts.local_experts.{}.linear_fc2.weight": "mlp.experts.linear_fc2.weight{}",
}
"""Names with TransformerEngine, which fuses a norm with the following product, and all experts."""


@dataclass(frozen=True)
class Place:
    """A rank's place in a model that is split."""

    tensor: int = 0
    """Index among the ranks that share each matrix."""
    tensors: int = 1
    stage: int = 0
    """Index among the ranks that share the layers."""
    stages: int = 1
    expert: int = 0
    """Index among the ranks that share the experts of each layer."""
    experts: int = 1
    context: int = 0
    """Index among the ranks that share each sequence."""
    contexts: int = 1

    @property
    def is_first_stage(self) -> bool:
        """True if the rank has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if the rank has the head."""
        return self.stage == self.stages - 1


@dataclass(frozen=True)
class TensorBlock:
    """A block of a tensor of transformers, whose elements are contiguous in a rank's flattened parameter."""

    hub: str
    """The tensor's name."""
    whole: tuple[int, ...]
    """The tensor's shape."""
    offsets: tuple[int, ...]
    """Index of the block's first element in the tensor."""
    shape: tuple[int, ...]
    start: int
    """Position of the block's first element in the flattened parameter."""
    is_split: bool
    """True if the ranks that share matrices hold different elements."""
    is_first: bool
    """True on the first of the ranks of a copy of the model that hold these elements."""

    @property
    def end(self) -> int:
        """The position after its last element."""
        return self.start + prod(self.shape)


def local_layout(
    config: PreTrainedConfig, shapes: Shapes, place: Place, *, fused: bool = False
) -> dict[str, tuple[TensorBlock, ...]]:
    """Describes the blocks of which a rank's parameters consist, by their names in Megatron, in order.

    Args:
        config: the model's config; `refusal` must be None.
        shapes: shapes of all parameters of the model, by their names in transformers; a tied head is left out.

    Raises:
        UserError: the model has a tensor that Megatron has no place for.
    """
    known: set[str] = set()
    layout: dict[str, tuple[TensorBlock, ...]] = {}
    per_stage = config.num_hidden_layers // place.stages
    rows: list[tuple[bool, Cut, str, tuple[str, ...]]] = []
    rows += [(place.is_first_stage, *row) for row in FIRST]
    for layer in range(config.num_hidden_layers):
        stage, number = divmod(layer, per_stage)
        has_experts = LAYER.format(layer) + "mlp.gate.weight" in shapes
        for cut, name, hub in LAYERS:
            # no product follows the norm before experts
            is_fused = fused and not (has_experts and name == "pre_mlp_layernorm.weight")
            local = LOCAL_LAYER.format(number) + (FUSED.get(name, name) if is_fused else name)
            rows.append((stage == place.stage, cut, local, tuple(LAYER.format(layer) + part for part in hub)))
    rows += [(place.is_last_stage, *row) for row in LAST]
    for is_mine, cut, name, hub in rows:
        if shapes.keys() >= set(hub):
            known.update(hub)
            if is_mine and cut == "experts":
                count, *shape = shapes[hub[0]]
                for number in range(count // place.experts):
                    offset = place.expert * (count // place.experts) + number
                    is_split = place.experts > 1  # otherwise every rank has all experts
                    block = TensorBlock(
                        hub[0],
                        whole=(count, *shape),
                        offsets=(offset, 0, 0),
                        shape=(1, *shape),
                        start=0,
                        is_split=is_split,
                        is_first=is_split or place.tensor == 0,
                    )
                    layout[name.format(number)] = (block,)
            elif is_mine:
                layout[name] = _blocks(config, shapes, place, cut, hub)
    if HEAD not in shapes and "score.weight" not in shapes and place.is_last_stage and not place.is_first_stage:
        layout["output_layer.weight"] = _blocks(config, shapes, place, "rows", (EMBEDDING,), is_copy=True)
    if unknown := sorted(shapes.keys() - known):
        raise UserError(f"engine megatron: it has no place for the model's {unknown[0]}: use engine fsdp")
    return layout


def _blocks(
    config: PreTrainedConfig, shapes: Shapes, place: Place, cut: Cut, hub: Sequence[str], *, is_copy: bool = False
) -> tuple[TensorBlock, ...]:
    blocks: list[TensorBlock] = []

    def add(name: str, dim: int, first: int, size: int) -> None:
        whole = shapes[name]
        offsets, shape = [0] * len(whole), list(whole)
        offsets[dim], shape[dim] = first, size
        start = blocks[-1].end if blocks else 0
        is_first = not is_copy and (cut != "whole" or place.tensor == 0)
        blocks.append(TensorBlock(name, whole, tuple(offsets), tuple(shape), start, cut != "whole", is_first))

    if cut == "groups":
        groups = config.num_key_value_heads
        mine = groups // place.tensors
        for group in range(place.tensor * mine, (place.tensor + 1) * mine):
            for name in hub:
                size = shapes[name][0] // groups
                add(name, 0, group * size, size)
        return tuple(blocks)
    for name in hub:
        dim = 1 if cut == "columns" else 0
        size = shapes[name][dim] // (1 if cut == "whole" else place.tensors)
        add(name, dim, 0 if cut == "whole" else place.tensor * size, size)
    return tuple(blocks)


def parts_between(
    values: Tensor, first: int, blocks: Sequence[TensorBlock]
) -> Iterator[tuple[TensorBlock, TensorShard]]:
    """Yields the positions of some elements of a flattened parameter in their tensors on the hub.

    Args:
        values: contiguous elements of the flattened parameter, shape (elements,); the parts share their memory.
        first: position of the first of them in the parameter.
        blocks: all or some of the parameter's blocks.

    Yields:
        The block and its elements; several parts if they do not fill whole rows of the block.
    """
    last = first + len(values)
    for block in blocks:
        begin, end = max(first, block.start), min(last, block.end)
        if begin >= end:
            continue
        held = values[begin - first : end - first]
        begin, end = begin - block.start, end - block.start  # within the block
        width, row = prod(block.shape[1:]), prod(block.whole[1:])
        corner = sum(offset * prod(block.whole[dim + 1 :]) for dim, offset in enumerate(block.offsets))
        # the block has whole rows, so it is contiguous in the tensor
        if width == row:
            yield block, TensorShard.flat(held, corner + begin)
            continue
        # the rest of a row, whole rows, and the beginning of a row
        cuts = sorted({begin, min(end, -(-begin // width) * width), max(begin, end // width * width), end})
        done = 0
        for start, stop in pairwise(cuts):
            length = min(width, stop - start)
            count = (stop - start) // length
            numbers = torch.arange(start // width, start // width + count)
            part = TensorShard(
                held[done : done + stop - start].view(count, length), corner + numbers * row + start % width
            )
            done += stop - start
            yield block, part


def refusal(config: PreTrainedConfig, place: Place) -> str | None:
    """Returns why Megatron cannot train a model with this many `tensors`, `stages` and `experts`; None if it can."""
    if config.model_type not in MODEL_TYPES:
        return f"{config.model_type} is not supported yet by engine megatron ({', '.join(MODEL_TYPES)} are): use fsdp"
    experts = getattr(config, "num_experts", None)
    if place.experts > 1 and experts is None:
        return f"expert_parallel is {place.experts}, but {config.model_type} has no experts: remove it"
    for key, size, divided in (
        ("expert_parallel", place.experts, ["num_experts"] * (experts is not None)),
        ("tensor_parallel", place.tensors, DIVIDED_BY_TENSORS),
        ("pipeline_parallel", place.stages, ["num_hidden_layers"]),
    ):
        for name in divided:
            if (value := getattr(config, name)) % size:
                return f"{key} is {size}, which does not divide the model's {name} {value}: choose a divisor"
    is_mixed = getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    for feature, is_there in (
        ("layers with and without experts in a pipeline", place.stages > 1 and is_mixed),
        ("the router's auxiliary loss (output_router_logits)", getattr(config, "output_router_logits", False)),
        # Qwen2 has biases of queries, keys and values alone, without a key that says so
        ("attention_bias", getattr(config, "attention_bias", False)),
        ("mlp_bias", getattr(config, "mlp_bias", False)),
        (f"rope_type {rope}", rope not in ("default", "linear", "llama3")),
        ("sliding attention", layer_types != {"full_attention"}),
        (f"hidden_act {config.hidden_act}", config.hidden_act != "silu"),
    ):
        if is_there:
            return f"{feature}: not supported yet by engine megatron, use engine fsdp"
    return None
