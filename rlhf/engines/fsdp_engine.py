"""`engine: fsdp`: PyTorch's FSDP2 (`fully_shard`): parameters, gradients and optimizer state are spread over the ranks,
and gathered layer by layer as they are needed (arXiv 2304.11277)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf.engines import ranks
from rlhf.engines.token_outputs import Head
from rlhf.engines.torch_engine import TorchEngine

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class FSDPEngine(TorchEngine):
    adamw: dict[str, Any] = {"foreach": True}

    def __init__(self, model: PreTrainedModel, head: Head, *, offload: bool = False, **options: Any) -> None:
        self.offload = offload
        super().__init__(model, head, **options)

    def _place(self) -> None:
        ranks.initialized()
        if not self.offload:
            self.module.to(self.device)
        on_gpu = self.device.type == "cuda"
        compute = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (ranks.count(),)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if self.offload else OffloadPolicy(),
        }
        blocks = set(self.model._no_split_modules or ())
        for module in self.model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, **options)
        fully_shard(self.module, **options)

    def _backward(self, loss: Tensor, last: bool) -> None:
        share = loss * ranks.count()  # gradients are averaged over ranks, and every loss is already a share
        share.backward()  # type: ignore[no-untyped-call]

    def _gathered(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.to(self.device).full_tensor()  # type: ignore[no-any-return, attr-defined]

    def _share(self, parameter: Tensor, whole: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        return mine.to(parameter.to_local().device)
