"""Skeletons: models without weights, and the places where their weights are stored.

A whole model may fit neither on a device nor, once per process, in host memory. So it is built without memory for its
parameters, an engine shards it, and each rank then reads only its own elements.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.modeling_utils import ModuleUtilsMixin

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.hub_layout import hub_layout
from ratchet.rlhf.weights.stored_state import Held, StoredState, StoredTensor
from ratchet.rlhf.weights.tensor_shards import TensorShard

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.weights.stored_state import RangeReader


@dataclass(frozen=True)
class Skeleton:
    """A model, and where its weights are stored."""

    model: PreTrainedModel
    """Its parameters are on the meta device; buffers that are not stored, such as rotary frequencies, are real."""
    sources: Mapping[str, RangeReader]
    """Source of each parameter and stored buffer, by name. Empty: the model already has its weights."""

    @classmethod
    def of(cls, model: PreTrainedModel | Skeleton) -> Skeleton:
        """Wraps a model that already has its weights; returns a skeleton as it is."""
        return model if isinstance(model, Skeleton) else cls(model, {})

    def emptied(self) -> Skeleton:
        """Returns the same model without memory for its parameters.

        Weights that it already has stay in host memory, as their own sources.
        """
        if self.sources:
            return self
        held: dict[str, RangeReader] = {
            name: Held(parameter.detach()) for name, parameter in self.model.named_parameters()
        }
        _replace(self.model, lambda old: old.detach().to("meta"))
        return Skeleton(self.model, held)

    def load(self) -> PreTrainedModel:
        """Reads all weights into host memory; returns the complete model."""
        if self.sources:
            materialize(self.model, torch.device("cpu"))
            self.read_buffers()
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    TensorShard.flat(parameter.data).fill(self.sources[name])
        return self.model

    def frozen_as_buffers(self) -> None:
        """Makes buffers of parameters that are never trained, such as the bias of a router, or a frozen vision tower:
        engines train parameters, and save and copy buffers as they are."""
        assert any(parameter.requires_grad for parameter in self.model.parameters()), "somebody froze the whole model"
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    delattr(module, name)
                    held = torch.empty_like(parameter, device="cpu") if parameter.is_meta else parameter.detach()
                    module.register_buffer(name, held)
        for module in self.model.modules():
            if isinstance(module, ModuleUtilsMixin) and next(module.parameters(), None) is None:
                module.__class__ = _without_parameters(type(module))

    def read_buffers(self) -> None:
        """Reads the stored buffers."""
        for name, buffer in self.model.named_buffers():
            if name in self.sources:
                buffer.copy_(self.sources[name].whole())


@cache
def _without_parameters(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Returns a class of a part of a model that knows its type without parameters, in which transformers looks."""

    def dtype(self: torch.nn.Module) -> torch.dtype:
        return next(buffer.dtype for name, buffer in self.named_buffers() if name in self.state_dict())

    # transformers looks up by the class's name what a part can return
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"dtype": property(dtype), **named})


class Unreadable(Exception):
    """The files of a model cannot be read by range: transformers computes its weights from them."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Builds models with parameters on the meta device. Buffers are real, because they may be derived."""
    register = torch.nn.Module.register_parameter
    on_meta: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    def register_on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in on_meta:
                on_meta[param] = torch.nn.Parameter(param.data.to("meta"), param.requires_grad)
            param = on_meta[param]
        register(self, name, param)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(
    module: torch.nn.Module,
    device: torch.device,
    dtype: torch.dtype | None = None,
    then: Callable[[torch.nn.Parameter], None] | None = None,
) -> None:
    """Gives memory to the parameters on the meta device, and moves the rest; tied parameters stay tied.

    Args:
        dtype: type of the parameters that get memory; None: they keep theirs.
        then: called with each of these parameters before the next one gets memory; buffers then stay where they are.
    """
    real: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                if parameter not in real:
                    memory = torch.zeros(parameter.shape, dtype=dtype or parameter.dtype, device=device)
                    real[parameter] = torch.nn.Parameter(memory, parameter.requires_grad)
                    if then is not None:
                        then(real[parameter])
                child.register_parameter(name, real[parameter])
    if then is None:
        module.to(device)


def folder_state(folder: Path) -> StoredState:
    """Opens the safetensors files of a model folder, to be read by range, by their tensors' names in the files.

    Raises Unreadable if the folder has none under their usual names, or they are quantized.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        names = {"model.safetensors"}
    elif index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    else:
        raise Unreadable("its files are not called model.safetensors")
    if not all(name.startswith("model") for name in names):
        raise Unreadable("its files are not called model-*.safetensors")
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        raise Unreadable("its weights are quantized")

    def read(name: str, first: int, last: int) -> bytes:
        with (folder / name).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), last - first, first)

    try:
        return StoredState({name: (folder / name).stat().st_size for name in sorted(names)}, read)
    except KeyError as error:
        raise Unreadable(f"it has weights of type {error.args[0]}") from None


def sources(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> dict[str, RangeReader]:
    """Finds the stored tensor of each parameter and buffer that the files have, renaming tensors as transformers does.

    Args:
        model: the model; parameters that it ties are untied if the files have different weights for them.

    Raises:
        Unreadable: a parameter does not consist of stored tensors, one after the other.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
    converters = [change for change in mapping if isinstance(change, WeightConverter)]
    state = model.state_dict()
    found: dict[str, RangeReader] = {}
    converted: set[str] = set()
    for key in sorted(stored, key=dot_natural_key):
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        # the file already has the model's own name
        if name not in state and key in state:
            name, converter = rename_source_key(key, [], [], model.base_model_prefix, state)
        if name in state and converter is None:
            found[name] = stored[key]
        elif name in state:
            converted.add(name)
    model._weight_conversions = [change for change in mapping if change.was_used()]  # as from_pretrained does
    if converted:
        found |= _joined(model, stored, converted)
    _settle_ties(model, found)
    return found


def _joined(model: PreTrainedModel, stored: Mapping[str, StoredTensor], names: Iterable[str]) -> dict[str, RangeReader]:
    """Finds the stored tensors of which parameters consist, such as the matrices of experts."""
    try:
        layout = hub_layout(model)
    except UserError as error:
        raise Unreadable(str(error)) from None
    state = model.state_dict()
    joined: dict[str, RangeReader] = {}
    for name in names:
        keys = [tensor.name for tensor in layout[name]]
        if not stored.keys() >= set(keys):
            raise Unreadable(f"transformers computes {name} from other tensors than it writes")
        joined[name] = StoredTensor.joined([stored[key] for key in keys], tuple(state[name].shape))
    return joined


def _settle_ties(model: PreTrainedModel, found: dict[str, RangeReader]) -> None:
    """Leaves one name of each tied parameter in `found`. If both are stored and differ, the model unties them."""
    first_names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        first = first_names.setdefault(parameter, name)
        if name == first or name not in found:
            continue
        if first not in found:
            found[first] = found.pop(name)
        elif _equal(found[first], found[name]):
            del found[name]
        else:
            owner, _, attribute = name.rpartition(".")
            untied = torch.nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            model.get_submodule(owner).register_parameter(attribute, untied)
            for tied in (name, first):
                model.all_tied_weights_keys.pop(tied, None)


def _equal(first: RangeReader, second: RangeReader, at_once: int = 2**22) -> bool:
    if first.shape != second.shape:
        return False
    count = torch.Size(first.shape).numel()
    bounds = ((start, min(start + at_once, count)) for start in range(0, count, at_once))
    return all(torch.equal(first.flat(*bound), second.flat(*bound)) for bound in bounds)


def extended(
    skeleton: Skeleton, extend: Callable[[PreTrainedModel], None], name_in_base: Callable[[str], str]
) -> Skeleton:
    """Adds parameters to a skeleton, such as adapters. Their values are kept in memory.

    Args:
        extend: adds the parameters to the model, whose parameters are then on the CPU, but take no memory.
        name_in_base: returns the name that a parameter had before.
    """
    model = skeleton.model
    # one element, repeated: new parameters get the device and type of those that are there
    _replace(model, lambda old: torch.zeros((), dtype=old.dtype).expand(old.shape))
    extend(model)
    complete: dict[str, RangeReader] = {
        name: skeleton.sources[name] for name, _ in model.named_buffers() if name in skeleton.sources
    }
    for name, parameter in model.named_parameters():
        base = name_in_base(name)
        complete[name] = skeleton.sources[base] if base in skeleton.sources else Held(parameter.detach())
    _replace(model, lambda old: old.detach().to("meta"))
    return Skeleton(model, complete)


def _replace(module: torch.nn.Module, new: Callable[[torch.nn.Parameter], Tensor]) -> None:
    """Replaces all parameters; tied ones stay tied."""
    replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for child in module.modules():
        for name, old in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in replaced:
                replaced[old] = torch.nn.Parameter(new(old), old.requires_grad)
            child.register_parameter(name, replaced[old])


def say_whole(path: str, reason: Unreadable) -> None:
    """Warns that every process loads a whole model."""
    warnings.warn(f"{path} is loaded whole by every process: {reason}", stacklevel=2)
