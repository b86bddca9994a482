"""LoRA (arXiv 2106.09685): low-rank adapters A and B are trained in addition to frozen weights W.

A layer computes W x + alpha/r B A x. B starts at zero, so that the initial actor equals the base model. The layers and
the file format are PEFT's.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from ratchet.rlhf import seeding
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.modalities import decoder_prefix

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.config import LoRAConfig

ADAPTER = "default"
HEADS = ("score", "classifier")
"""Names of classifier heads. A head is new, so all its weights are trained."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum adapter ranks that vLLM accepts."""


def add(model: PreTrainedModel, lora: LoRAConfig, seed: int) -> None:
    """Adds adapters, with random weights, to a model in place. Only they and a classifier head stay trainable."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    unfit = check(model, lora)
    all_linear = lora.target_modules == ("all-linear",)
    heads = [head for head in HEADS if hasattr(model, head)]
    excluded: str | list[str] | None = heads or None
    if (decoder := decoder_prefix(model)) is not None:  # a pattern of whole names
        excluded = rf"(?!{re.escape(decoder)}).*"
    targets: str | list[str] = "all-linear" if all_linear else list(lora.target_modules)
    if all_linear and unfit:  # PEFT would include them, or refuse
        linear = {
            _end(name)
            for name, part in model.named_modules()
            if isinstance(part, torch.nn.Linear) and part is not model.get_output_embeddings()
        }
        targets = sorted(linear - unfit.keys())
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=targets,
        exclude_modules=excluded,
        modules_to_save=heads or None,
        base_model_name_or_path=model.name_or_path,
    )
    saved, config.modules_to_save = config.modules_to_save, None  # train the head itself, not a copy of it
    # leaves the process's own generator as it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(seeding.generator(seed, "lora").integers(2**63)))
        try:
            inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:
            raise UserError(f"model.lora.target_modules: {str(error).splitlines()[0]}") from None
    config.modules_to_save = saved
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(part, BaseTunerLayer):
            raise UserError("model.lora.target_modules names embeddings or the head: leave them out")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith(HEADS))


def check(model: PreTrainedModel, lora: LoRAConfig) -> dict[str, str]:
    """Raises UserError if the settings name layers that cannot have adapters.

    Returns:
        The last parts of the names of such layers (``gate_proj``, ``w1``), each with what they are.
    """
    unfit = _unfit(model)
    if named := sorted({name.rpartition(".")[2] for name in lora.target_modules} & unfit.keys()):
        raise UserError(
            f"model.lora.target_modules names {', '.join(named)}, but {unfit[named[0]]} cannot have adapters: name "
            "layers of attention, or leave target_modules out"
        )
    return unfit


def _unfit(model: PreTrainedModel) -> dict[str, str]:
    import torch

    from ratchet.rlhf.models.hub_layout import hub_layout

    unfit = {
        tensor.name.split(".")[-2]: "experts" for hub in hub_layout(model).values() if len(hub) > 1 for tensor in hub
    }
    owners: dict[int, torch.nn.Linear] = {}
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear):
            if owners.setdefault(id(part.weight), part) is not part:  # adapters of their own could not be merged
                unfit[_end(name)] = "a layer that shares its weights with another"
            if not _maps_vectors(part):
                unfit[_end(name)] = f"a {type(part).__name__}"
        for layer in _read_directly(part.__class__):
            if isinstance(getattr(part, layer, None), torch.nn.Linear):
                unfit[layer] = f"a layer whose weights a {type(part).__name__} reads itself"
    return unfit


def _end(name: str) -> str:
    """Returns the end of a layer's name, by which PEFT finds layers; in a list, the list's name and a number."""
    return re.sub(r"^.*?([^.]+(\.\d+)?)$", r"\1", name)


@cache
def _read_directly(module: type[torch.nn.Module]) -> frozenset[str]:
    """Returns the names of layers whose weights a module reads without calling them, so that adapters have no effect.

    Mamba passes the weights of some layers to its kernels.
    """
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return frozenset()
    return frozenset(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|data)\b)", source))


def _maps_vectors(layer: torch.nn.Linear) -> bool:
    """Returns True if a layer maps each vector to a vector; some split it into groups, or return more."""
    import torch

    if type(layer).forward is torch.nn.Linear.forward:
        return True
    weights = {name: torch.empty_like(parameter, device="meta") for name, parameter in layer.named_parameters()}
    vectors = torch.empty(2, 3, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        mapped = torch.func.functional_call(layer, weights, (vectors,))
    except Exception:  # layers fail in their own ways
        return False
    return isinstance(mapped, torch.Tensor) and mapped.shape == (2, 3, layer.out_features)


def served_rank(r: int) -> int:
    """Returns the smallest maximum rank that vLLM accepts for adapters of rank r."""
    return min((rank for rank in VLLM_RANKS if rank >= r), default=r)


def has(model: PreTrainedModel) -> bool:
    """Returns True if a model has adapters."""
    return hasattr(model, "peft_config")


@contextmanager
def off(model: PreTrainedModel) -> Iterator[None]:
    """Turns the adapters off, so that the model computes the base model."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def stored_name(name: str) -> str:
    """Returns the name of a parameter in PEFT's files."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def base_name(name: str) -> str:
    """Returns the name of a parameter in the model without adapters."""
    return name.replace(".base_layer.", ".")


def config_json(model: PreTrainedModel) -> bytes:
    """Returns the content of PEFT's adapter_config.json."""
    config = model.peft_config[ADAPTER].to_dict() | {"inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return json.dumps(plain, sort_keys=True, indent=1).encode()


def merged(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the weights of an equivalent model without adapters, as in files: W + alpha/r B A."""
    from peft.tuners.lora import LoraLayer

    stored = model.state_dict().keys()  # of the buffers, files have only some
    weights = {name: parameter.detach() for name, parameter in model.named_parameters() if "lora_" not in name}
    weights |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            key = f"{name}.base_layer.weight"
            weights[key] = weights[key] + module.get_delta_weight(ADAPTER)
    return {base_name(name): tensor.contiguous() for name, tensor in weights.items()}
