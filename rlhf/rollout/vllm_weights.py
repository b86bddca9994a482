"""Gives vLLM's workers new weights through host memory: a backend of vLLM's weight-transfer interface.

vLLM's own backend for one machine (`ipc`) works within one GPU. This one works without a GPU, and where vLLM spans
several. Each worker process maps the same bucket and takes its share of every tensor. vLLM imports this module, which
registers the backend, in each worker process because it is named as the workers' extension class.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.rollout.vllm_engine import HOST_MEMORY
from ratchet.rlhf.weights.buckets import Packed, mapped

if torch.cpu._is_amx_tile_supported():
    # Linux lets a process use AMX only after it has asked. vLLM's attention in bfloat16 does not ask, and SIGILL would
    # kill it.
    torch.cpu._init_amx()


def for_each_draft(
    values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeats each request's value for its drafted tokens, of which there are `count`.

    Args:
        ends: total number of drafted tokens up to and including each request.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    return values.where(values != replace_from, replace_to).repeat_interleave(counts, output_size=count)


if not accelerator.is_available():
    # without a GPU, vLLM 0.32 leaves the temperatures of drafted tokens unset (vllm-project/vllm issue 55005)
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = for_each_draft


@dataclass
class Start(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types
    """A worker's parameters for the transfer: none."""


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A bucket to load."""

    path: str
    """The file to map."""
    nbytes: int
    """Bytes to map."""
    packed: dict[str, Any]
    """`Packed.as_json`."""


class HostMemoryEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads weights from buckets in shared host memory."""

    init_info_cls = Start
    update_info_cls = Bucket

    def init_transfer_engine(self, init_info: Start) -> None:
        """Does nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Makes layers collect new weights until they are complete."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            _pack_experts_again(self.model)
        self._experts = Experts(self.model, self.device)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a bucket."""
        # vLLM's own method always waits for a GPU, which may not exist
        self.receive_weights(self.parse_update_info(update_info))
        accelerator.synchronize(self.device)

    def receive_weights(self, update_info: Bucket) -> None:
        """Loads a bucket."""
        memory = mapped(update_info.path, update_info.nbytes)
        tensors = Packed.from_json(update_info.packed).tensors(memory)
        # a layer keeps its tensors until it is complete, and then the bucket may already hold others
        self.model.load_weights(
            (name, tensor.to(self.device, copy=True))
            for name, tensor in tensors
            if not self._experts.take(name, tensor)
        )

    def finish_weight_update(self) -> None:
        """Gives the layers their new weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._experts.check_complete()
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_heads_again(self.model)

    def shutdown(self) -> None:
        """Does nothing: there is nothing to release."""


class Experts:
    """Collects the matrices of a layer's experts and gives them to vLLM stacked, in three pieces.

    vLLM's `load_weights` loads each matrix separately, and twice while it reloads: once to count its elements.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """Finds the layers of a model on this device. Quantized or distributed experts are left to vLLM."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        self._device = device
        self._layers: dict[str, Any] = {
            path.removesuffix(".routed_experts"): layer
            for path, layer in model.named_modules()
            if isinstance(layer, RoutedExperts)
            and type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"
            and layer.moe_config.moe_parallel_config.ep_size == 1
        }
        self._stacks: dict[tuple[str, str], tuple[torch.Tensor, set[int]]] = {}
        """Incomplete stacks by layer and projection: all experts' matrices, and the numbers of those that have
        arrived."""

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Copies a tensor if it is a matrix of an expert of these layers; returns True if it is."""
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)
        layer = None if match is None else self._layers.get(match[1])
        if match is None or layer is None:
            return False
        shards = {layer.ckpt_gate_proj_name: "w1", layer.ckpt_down_proj_name: "w2", layer.ckpt_up_proj_name: "w3"}
        shard, count = shards.get(match[3]), layer.moe_config.num_experts
        if shard is None:
            return False
        if (match[1], match[3]) not in self._stacks:
            stack = torch.empty((count, *tensor.shape), dtype=tensor.dtype, device=self._device)
            self._stacks[match[1], match[3]] = stack, set()
        stack, there = self._stacks[match[1], match[3]]
        stack[int(match[2])].copy_(tensor)
        there.add(int(match[2]))
        if len(there) == count:
            del self._stacks[match[1], match[3]]
            weight = "w2_weight" if shard == "w2" else "w13_weight"
            parameter = getattr(layer, weight)
            loaded = parameter.weight_loader(
                param=parameter,
                loaded_weight=stack,
                weight_name=f"{layer.layer_name}.{weight}",
                shard_id=shard,
                expert_id=0,
                return_success=True,
            )
            assert loaded, f"vLLM did not take {name}"
        return True

    def check_complete(self) -> None:
        """Raises ValueError if matrices are missing: the layers would keep all of their old ones."""
        if self._stacks:
            incomplete = ", ".join(
                f"{len(there)} of the {len(stack)} matrices {path}.*.{projection}.weight"
                for (path, projection), (stack, there) in self._stacks.items()
            )
            raise ValueError(f"the new weights have only {incomplete}")


def _pack_experts_again(model: torch.nn.Module) -> None:
    """Makes layers with experts pack their new weights for the CPU's kernel, as they packed the first ones."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            # vLLM 0.32 packs only when it builds the kernel, and would copy new weights over the packed ones unpacked
            method.moe_kernel = None


def _pack_heads_again(model: torch.nn.Module) -> None:
    """Packs new weights of heads for the CPU's kernel.

    vLLM 0.32 packs the layers that load weights: a head that is tied to the embedding would keep its first ones.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


class Extension:
    """Methods that vLLM's workers get. Naming this class also makes them import this module."""

    def layers_with_experts(self) -> list[int]:
        """Returns the numbers of the model's layers that have experts."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]  # of vLLM's worker
        return sorted({int(module.layer_id) for module in model.modules() if isinstance(module, MoERunner)})


WeightTransferEngineFactory.register_engine(HOST_MEMORY, HostMemoryEngine)
