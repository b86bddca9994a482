"""`engine: torch`: plain PyTorch, CPU or GPU. Every process holds the whole model; gradients are summed over them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rlhf.engines import ranks
from rlhf.engines.base import Schedule
from rlhf.engines.model_engine import Dtype, Head, ModelEngine, not_finite, set_options

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class TorchEngine(ModelEngine):
    def __init__(
        self,
        model: PreTrainedModel,
        head: Head,
        *,
        dtype: Dtype = "float32",
        trainable: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.device = ranks.device()
        self.model = model.to(self.device)
        self.head, self.dtype, self.trainable = head, dtype, trainable
        self.model.train(trainable and gradient_checkpointing)  # dropout is off either way
        if trainable and gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.requires_grad_(trainable)
        self.parameters: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values(), fused=True) if trainable else None

    def _backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if last and ranks.count() > 1:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    ranks.summed(parameter.grad)

    def _step(self, schedule: Schedule) -> float:
        assert self.optimizer is not None
        set_options(self.optimizer, schedule)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), schedule.grad_clip or math.inf)
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
            return parameter.data
        assert self.optimizer is not None
        moment: Tensor | None = self.optimizer.state.get(parameter, {}).get(kind)
        return moment if moment is not None else torch.zeros_like(parameter)  # it has never had a gradient

    def set(self, kind: str, name: str, value: Tensor) -> None:
        parameter = self.parameters[name]
        if kind == "model":
            parameter.data.copy_(value)
            return
        assert self.optimizer is not None
        state = self.optimizer.state[parameter]
        state["step"] = torch.tensor(float(self.steps), device=self.device)
        state[kind] = value.to(self.device)

    def _reset_optimizer(self) -> None:
        if self.optimizer is not None:
            self.optimizer.state.clear()
