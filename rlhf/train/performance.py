"""Measures the model FLOPs utilization and the memory of updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil

from ratchet.rlhf.distributed import accelerator, gpus, ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of a forward and a backward pass, without recomputation.

    A weight and a token take two FLOPs forwards and four backwards, or two if the weight is frozen. In attention, each
    pair of tokens that see each other takes as much for each element of queries and of values. Only the experts that a
    token is routed to count. The head computes response tokens only.
    """

    per_token: float
    per_response_token: float
    per_pair: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> TrainingFlops:
        """Counts the weights of a model, before an engine shards it."""
        config = model.config.get_text_config()
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        head_weight = None if head is None else head.weight
        top_k = getattr(config, "num_experts_per_tok", None)
        per_token = 0.0
        for parameter in model.parameters():
            if parameter.dim() < 2 or parameter is embeddings or parameter is head_weight:
                continue
            is_experts = parameter.dim() == 3 and top_k is not None
            used = parameter.numel() * (top_k / parameter.shape[0] if is_experts else 1.0)
            per_token += used * (6 if parameter.requires_grad else 4)
        attended = 0
        layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
        for layer in layers:
            heads = getattr(layer, "num_attention_heads", 0)  # a model without attention has none
            attended += heads * (getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0))
        return cls(
            per_token,
            0.0 if head_weight is None else head_weight.numel() * (6 if head_weight.requires_grad else 4),
            12.0 * attended,
        )

    def __call__(self, prompts: np.ndarray, responses: np.ndarray) -> float:
        """Returns the FLOPs of some trajectories, each with its own prompt; lengths are in tokens."""
        lengths = (prompts + np.maximum(responses - 1, 0)).astype(np.float64)
        pairs = lengths * (lengths + 1) / 2
        return float(
            self.per_token * lengths.sum() + self.per_response_token * responses.sum() + self.per_pair * pairs.sum()
        )


def utilization(flops: float, seconds: float) -> float | None:
    """Returns a computation's share of the peak FLOPs of all ranks' GPUs.

    `flops` counts all ranks. None if the device's peak is unknown, or there was nothing to compute.
    """
    name = accelerator.name()
    if name is None or not flops:
        return None
    gpu = gpus.of_device(name)
    return None if gpu is None else flops / seconds / gpu.bf16_flops / ranks.count()


def memory() -> dict[str, float]:
    """Returns memory by metric, in GiB: peaks of the fullest GPU since its process began, and use of this machine."""
    used = {"perf/cpu_memory_used_gb": psutil.virtual_memory().used / GIB}
    if not accelerator.is_available():
        return used
    peaks = ranks.gathered(accelerator.peaks())
    allocated, reserved = (max(values) / GIB for values in zip(*peaks, strict=True))
    return {"perf/max_memory_allocated_gb": allocated, "perf/max_memory_reserved_gb": reserved} | used
