"""Converts a model's weights to the hub's layout, where it differs from that of the loaded model.

transformers fuses and renames weights when it loads a model: Qwen3-MoE and Mixtral keep all experts of a layer in one
parameter, while their files, vLLM and other tools have a tensor for each matrix of each expert. The conversion is
transformers' own; here it is reversed and described, so that a parameter can be written and read in parts.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models import lora

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightTransform

PROBE_ELEMENTS = 2**20
"""Size of the tensor on which a conversion is tried, in elements."""


@dataclass(frozen=True)
class HubTensor:
    """A tensor in a model's files on the hub."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def hub_layout(model: PreTrainedModel) -> dict[str, tuple[HubTensor, ...]]:
    """Describes the hub tensors of which each parameter consists.

    A flattened parameter equals its flattened hub tensors, one after the other. Most parameters are one tensor, often
    of the same name.

    Args:
        model: the model, before an engine shards it; it may be on the meta device. If it has adapters, the names are
            PEFT's.

    Returns:
        The hub tensors of each parameter and each buffer that a checkpoint contains, by its name in the model.

    Raises:
        UserError: the conversion does more than rename, split and reorder whole runs of elements.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    shapes = _shapes(model)
    if lora.has(model):
        return {name: (HubTensor(lora.stored_name(name), shape),) for name, shape in shapes.items()}
    reversals = [transform.reverse_transform() for transform in reversed(_conversions(model))]
    renamings = [transform for transform in reversals if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in reversals if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    orders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    layout: dict[str, tuple[HubTensor, ...]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, reverse=True)
        shape = shapes[name]
        if pattern is None:
            layout[name] = (HubTensor(renamed, shape),)
            continue
        conversion = _Conversion(model, by_pattern[pattern], pattern, name, renamed)
        if (pattern, shape) not in orders:
            orders[pattern, shape] = conversion.order(shape)
        hub = [HubTensor(key, tuple(tensor.shape)) for key, tensor in conversion(torch.empty(shape, device="meta"))]
        layout[name] = tuple(hub[number] for number in orders[pattern, shape])
    names = sorted(tensor.name for tensors in layout.values() for tensor in tensors)
    for name, following in pairwise(names):
        if name == following:  # several parameters become one tensor
            raise _unsupported(model, name)
    return layout


def split(parameter: Tensor, hub: Sequence[HubTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and values of a parameter's hub tensors; they share the memory of a contiguous parameter."""
    values = torch.split(parameter.reshape(-1), [tensor.elements for tensor in hub])
    for tensor, part in zip(hub, values, strict=True):
        yield tensor.name, part.view(tensor.shape)


def hub_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of an unsharded model, named as in its files; they share the model's memory."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, hub in hub_layout(model).items():
        yield from split(held[name].detach(), hub)


def copy_weights(weights: Iterable[tuple[str, Tensor]], model: PreTrainedModel) -> int:
    """Copies weights, named as in a checkpoint, into an unsharded model in place; returns the number of bytes.

    The model must already have its adapters, if any.
    """
    targets = dict(model.named_parameters()) | dict(model.named_buffers()) | dict(hub_weights(model))
    copied = 0
    with torch.no_grad():
        for name, tensor in weights:
            targets[name].copy_(tensor)
            copied += tensor.nbytes
    return copied


@dataclass(frozen=True)
class _Conversion:
    """The conversion of one parameter to the tensors on the hub."""

    model: PreTrainedModel
    converter: WeightConverter
    pattern: str
    name: str
    renamed: str

    def __call__(self, parameter: Tensor) -> list[tuple[str, Tensor]]:
        """Converts a parameter; its shape may differ from the model's in all but the first dimension."""
        converter = deepcopy(self.converter)
        converter.add_tensor(self.renamed, self.name, self.pattern, parameter)
        try:
            converted = converter.convert(self.renamed, model=self.model, config=self.model.config)
        except (ValueError, RuntimeError, AttributeError):  # the operation expects other parameters or another shape
            raise _unsupported(self.model, self.name) from None
        return [(name, held[0] if isinstance(held, list) else held) for name, held in converted.items()]

    def order(self, shape: tuple[int, ...]) -> list[int]:
        """Finds the order in which the converted tensors make up the parameter, from numbered elements."""
        probe = list(shape)
        # the first dimension counts the experts, into which a conversion splits: only the others may shrink
        while torch.Size(probe).numel() > PROBE_ELEMENTS and max(probe[1:], default=0) > 4:
            widest = max(range(1, len(probe)), key=probe.__getitem__)
            probe[widest] //= 2
        numbered = torch.arange(torch.Size(probe).numel(), device="cpu")
        converted = [tensor.flatten() for _, tensor in self(numbered.reshape(probe))]
        order = sorted(range(len(converted)), key=lambda number: int(converted[number][0]))
        if not torch.equal(torch.cat([converted[number] for number in order]), numbered):
            raise _unsupported(self.model, self.name)
        return order


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Returns the conversions of a model's class, even if the folder it was loaded from did not need them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used = {
        repr(transform)
        for transform in getattr(model, "_weight_conversions", None) or []
        if isinstance(transform, PrefixChange)
    }
    # only added prefixes depend on the folder
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in known if not isinstance(transform, PrefixChange) or repr(transform) in used]


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters, of tied ones once, and of the buffers that a checkpoint contains."""
    parameters = dict(model.named_parameters())
    stored = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {name: tuple(tensor.shape) for name, tensor in (parameters | buffers).items()}


def _unsupported(model: PreTrainedModel, name: str) -> UserError:
    return UserError(
        f"{type(model).__name__}: its files on the hub hold {name} in a form that cannot be written by parts: "
        "choose a model of another architecture"
    )
