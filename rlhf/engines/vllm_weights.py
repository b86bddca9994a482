"""How vLLM's workers receive new weights through host memory: a backend of vLLM's weight-transfer interface.

vLLM has backends for GPUs (`ipc`, within one GPU). This one works without a GPU, and where vLLM spans several GPUs.
Each worker process maps the same bucket and takes its share of every tensor. vLLM imports this module, which registers
the backend, in each worker process because it is named as the workers' extension class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rlhf.engines.vllm_rollout import HOST_MEMORY
from rlhf.engines.weight_transfer import Packed, mapped


@dataclass
class Start(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types
    """What a worker needs to know beforehand: nothing."""


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
        """There is nothing to connect to."""

    def start_weight_update(self) -> None:
        """Let layers collect new weights until they are complete."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a bucket. vLLM's own method also waits for a GPU, which may not exist."""
        import torch

        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: Bucket) -> None:
        """Load a bucket."""
        memory = mapped(update_info.path, update_info.nbytes)
        tensors = Packed.from_json(update_info.packed).tensors(memory)
        # a layer keeps its tensors until it is complete, and then the bucket may already hold others
        self.model.load_weights((name, tensor.to(self.device, copy=True)) for name, tensor in tensors)

    def finish_weight_update(self) -> None:
        """Give the layers their new weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is nothing to release."""


class Extension:
    """Adds nothing to vLLM's workers: naming this class makes them import this module."""


WeightTransferEngineFactory.register_engine(HOST_MEMORY, HostMemoryEngine)
