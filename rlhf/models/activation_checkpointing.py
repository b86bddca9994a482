"""Gradient checkpointing: recomputes activations in the backward pass instead of keeping them.

The backward pass of a decoder layer needs the inputs of all its operations. For Qwen2.5-7B in bfloat16 that is about
200 kB per token and layer: 100 GB for 16,384 tokens. Full checkpointing keeps the input of each layer (3 GB), and
computes everything else twice. Selective checkpointing also keeps the outputs of attention, whose cost grows with the
sequence's length, and of every second matrix product (together 31 GB), as torchtitan does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from ratchet.rlhf.distributed import accelerator

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from transformers import PreTrainedModel

Checkpointing = bool | Literal["selective"]

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}
VARLEN = "torch_attn"
"""Namespace of PyTorch's variable-length attention, which registers its operations on first use."""
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def chosen(setting: Checkpointing | None, device: torch.device) -> Checkpointing:
    """Returns the kind of checkpointing for a setting; None means selective on a GPU, none on the CPU."""
    if setting is None:
        return "selective" if accelerator.is_gpu(device) else False
    return setting


def enable(model: PreTrainedModel, kind: Literal[True, "selective"]) -> None:
    """Turns full (True) or selective checkpointing on; it takes effect while the model is in training mode."""
    # nothing in a model is random, so no generator state has to be kept: reading it would synchronize the GPU
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
    """Decides whether to keep an operation's outputs; `counts` are the products so far, forward and recomputed."""
    is_kept = operation in ATTENTION or getattr(operation, "namespace", None) == VARLEN
    if operation in PRODUCTS:
        counts[context.is_recompute] += 1
        is_kept = counts[context.is_recompute] % 2 == 1
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
