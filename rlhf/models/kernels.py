"""`model.kernels`: the implementation of a model's layers: PyTorch's kernels, compiled ones, or Liger's.

`compile` fuses norms, rotary embeddings, activations and log-probs by `torch.compile`. `liger` replaces them by Liger's
Triton kernels (arXiv 2410.10989).
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

P = ParamSpec("P")
T = TypeVar("T")
LIGER = (0, 8, 2)
"""The first release of liger-kernel whose linear cross-entropy gives each token its own gradient."""

PROGRAMS = 64
"""Largest number of programs of a function: each model and layout of micro-batches needs a few, with gradients and
without. PyTorch's setting would hold only for the thread that makes it, and a GPU's own thread computes checkpointed
layers again."""


def check_liger(model_type: str) -> None:
    """Raises UserError if Liger is not installed, or has no kernels for an architecture, named as in transformers."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise UserError(
            f'model.kernels is liger: pip install "ratchet-rlhf[liger]" on a machine with GPUs ({error})'
        ) from None
    release = importlib.metadata.version("liger-kernel")
    if tuple(int(part) for part in release.split(".")[:3]) < LIGER:
        raise UserError(f"model.kernels is liger, and liger-kernel {release} has wrong gradients: upgrade it to 0.8.2")
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"model.kernels is liger, which has no kernels for {model_type}: set it to torch or compile")


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles each layer, in place, on its first forward pass; layers of one kind are compiled together."""
    for layer in layers(model):
        # `forward` only: hooks of a layer, such as those that gather its weights, stay outside
        layer.forward = compiled(layer.forward)


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function, which is compiled on its first call."""
    import torch

    result: Callable[P, T] = torch.compile(function, recompile_limit=PROGRAMS)  # type: ignore[call-overload]  # PyTorch's overloads lack it
    return result


def as_written(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Runs layers uncompiled, for generation, where each step would need another program."""
    import torch

    if not any(hasattr(layer.forward, "_torchdynamo_orig_callable") for layer in layers(model)):
        return nullcontext()
    eager: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return eager


def layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Returns the layers of a model: the modules that it declares as not to be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def apply_liger(model: PreTrainedModel) -> None:
    """Replaces norms, rotary embeddings and activations by Liger's kernels, in place.

    Rotary embeddings are replaced for all models of this architecture in the process.
    """
    check_liger(model.config.model_type)
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    architecture = sys.modules[type(model).__module__]
    classes = {name: value for name, value in vars(architecture).items() if isinstance(value, type)}
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    for name, value in classes.items():  # Liger also replaces the classes, for models that are built later
        setattr(architecture, name, value)


def liger_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Computes log-probs in nats from hidden states, in pieces, by Liger's linear cross-entropy.

    `weight` is the head's matrix, shape (vocab, hidden).
    """
    import torch
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    # gradients of pieces are summed in float32
    loss: Tensor = liger_fused_linear_cross_entropy(
        hidden, weight, targets, reduction="none", accum_dtype=torch.float32
    )
    return -loss.float()
