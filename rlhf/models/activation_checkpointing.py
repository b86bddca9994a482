"""Gradient checkpointing: activations that the backward pass computes again instead of keeping them.

The backward pass of a decoder layer needs the inputs of all its operations. For Qwen2.5-7B in bfloat16 that is about
200 kB per token and layer: 100 GB for 16,384 tokens. Full checkpointing keeps the input of each layer (3 GB), and
computes everything else twice. Selective checkpointing also keeps the outputs of attention, whose cost grows with the
length of the sequence, and of every second matrix product (together 31 GB), as torchtitan does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from transformers import PreTrainedModel

Checkpointing = bool | Literal["selective"]

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}
VARLEN = "torch_attn"
"""Namespace of PyTorch's attention for variable lengths, which registers its operations when it is first used."""
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def chosen(setting: Checkpointing | None, device: torch.device) -> Checkpointing:
    """The kind of checkpointing that a setting stands for.

    Args:
        setting: the setting; None: selective on a GPU, none on the CPU.
        device: the device that trains.
    """
    if setting is None:
        return "selective" if device.type == "cuda" else False
    return setting


def enable(model: PreTrainedModel, kind: Literal[True, "selective"]) -> None:
    """Turn checkpointing on; it takes effect while the model is in training mode.

    Args:
        model: the model.
        kind: True: full; or selective.
    """
    # nothing in a model is random here, so no state of a generator has to be kept, which would stop a GPU
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        options["context_fn"] = _contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _contexts() -> Any:
    counts = {False: 0, True: 0}
    return create_selective_checkpoint_contexts(partial(_policy, counts))  # type: ignore[no-untyped-call]


def _policy(
    counts: dict[bool, int],
    context: SelectiveCheckpointContext,
    operation: OpOverload,
    *args: object,
    **options: object,
) -> CheckpointPolicy:
    """Whether to keep the outputs of an operation; `counts` has the number of products so far, forward and again."""
    is_kept = operation in ATTENTION or getattr(operation, "namespace", None) == VARLEN
    if operation in PRODUCTS:
        counts[context.is_recompute] += 1
        is_kept = counts[context.is_recompute] % 2 == 1
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
