"""LoRA (arXiv 2106.09685): beside frozen weights W, adapters A and B of low rank learn; a layer computes
W x + alpha/r B A x. B starts at zero, so that the first actor is the base. PEFT has the layers and the file format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlhf import seeding
from rlhf.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from rlhf.config import LoRAConfig

ADAPTER = "default"
HEADS = ("score", "classifier")
"""What a critic has on top; it is new, and learns as a whole."""


def add(model: PreTrainedModel, lora: LoRAConfig, seed: int) -> None:
    """Put adapters into a model, in place; nothing but them and a critic's head learns. Raises `UserError`."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    all_linear = lora.target_modules == ("all-linear",)
    heads = [head for head in HEADS if hasattr(model, head)]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules="all-linear" if all_linear else list(lora.target_modules),
        exclude_modules=heads or None,
        modules_to_save=heads or None,
        base_model_name_or_path=model.name_or_path,
    )
    saved, config.modules_to_save = config.modules_to_save, None  # it is trained where it is, not in a copy
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


def has(model: PreTrainedModel) -> bool:
    return hasattr(model, "peft_config")


@contextmanager
def off(model: PreTrainedModel) -> Iterator[None]:
    """The base as it is, adapters left out."""
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
    """A parameter's name in PEFT's files."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def config_json(model: PreTrainedModel) -> bytes:
    config = model.peft_config[ADAPTER].to_dict() | {"inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return json.dumps(plain, sort_keys=True, indent=1).encode()


def merged(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters of the plain model that computes the same: W + alpha/r B A."""
    from peft.tuners.lora import LoraLayer

    found = {name: parameter.detach() for name, parameter in model.named_parameters() if "lora_" not in name}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            found[f"{name}.base_layer.weight"] = found[f"{name}.base_layer.weight"] + module.get_delta_weight(ADAPTER)
    return {name.replace(".base_layer.", "."): tensor.contiguous() for name, tensor in found.items()}
