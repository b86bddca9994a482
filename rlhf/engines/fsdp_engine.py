"""`engine: fsdp`: PyTorch's FSDP2 (`fully_shard`): parameters, gradients and optimizer state are spread over the ranks,
and gathered layer by layer as they are needed (arXiv 2304.11277)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf.engines import ranks
from rlhf.engines.base import Schedule
from rlhf.engines.model_engine import Dtype, Head, ModelEngine, not_finite, set_options

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class FSDPEngine(ModelEngine):
    def __init__(
        self,
        model: PreTrainedModel,
        head: Head,
        *,
        dtype: Dtype = "float32",
        trainable: bool = True,
        gradient_checkpointing: bool = False,
        offload: bool = False,
    ) -> None:
        ranks.initialized()
        self.device = ranks.device()
        self.head, self.dtype, self.trainable = head, dtype, trainable
        self.model = model if offload else model.to(self.device)
        self.model.train(trainable and gradient_checkpointing)
        if trainable and gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.requires_grad_(trainable)
        mesh = init_device_mesh(self.device.type, (ranks.count(),))
        compute = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy(),
        }
        blocks = set(self.model._no_split_modules or ())
        for module in self.model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, **options)
        fully_shard(self.model, **options)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values(), foreach=True) if trainable else None

    def _backward(self, loss: Tensor, last: bool) -> None:
        (loss * ranks.count()).backward()  # type: ignore[no-untyped-call]  # it averages over ranks, and every loss is already a share

    def _step(self, schedule: Schedule) -> float:
        assert self.optimizer is not None
        set_options(self.optimizer, schedule)
        total = torch.nn.utils.clip_grad_norm_(self.parameters.values(), schedule.grad_clip or math.inf)
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(norm):
            raise not_finite(norm.item())
        return norm.item()

    def names(self) -> list[str]:
        return sorted(self.parameters)

    def get(self, kind: str, name: str) -> Tensor:
        parameter = self.parameters[name]
        if kind == "model":
            return _whole(parameter.data, self.device)
        assert self.optimizer is not None
        moment = self.optimizer.state.get(parameter, {}).get(kind)
        return torch.zeros(parameter.shape, device=self.device) if moment is None else _whole(moment, self.device)

    def set(self, kind: str, name: str, value: Tensor) -> None:
        parameter = self.parameters[name]
        assert isinstance(parameter, DTensor)
        mine = distribute_tensor(value.to(self.device), parameter.device_mesh, parameter.placements)
        if kind == "model":
            parameter.to_local().copy_(mine.to_local())
            return
        assert self.optimizer is not None
        state = self.optimizer.state[parameter]
        state["step"] = torch.tensor(float(self.steps))
        state[kind] = mine.to(parameter.to_local().device)

    def _reset_optimizer(self) -> None:
        if self.optimizer is not None:
            self.optimizer.state.clear()


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to(device).full_tensor()  # type: ignore[no-any-return, attr-defined]
