"""`engine: torch`: plain PyTorch on CPU or GPU. Every process has the whole model; gradients are summed over ranks.

With bfloat16 the model itself is in bfloat16. The optimizer keeps float32 weights, from which the model's are rounded
after each step, and gradients of micro-batches are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ratchet.rlhf.distributed import ranks
from ratchet.rlhf.models.skeleton import materialize
from ratchet.rlhf.models.token_outputs import Head
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.model_engine import ModelEngine, not_finite
from ratchet.rlhf.weights.stored_state import RangeReader
from ratchet.rlhf.weights.tensor_shards import TensorShard

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.models.skeleton import Skeleton


class TorchEngine(ModelEngine):
    """Trains with plain PyTorch."""

    def __init__(self, model: PreTrainedModel | Skeleton, head: Head, **options: Any) -> None:
        """Wraps a model; the options are those of `ModelEngine`."""
        super().__init__(model, head, **options)
        self._rounded: dict[str, torch.nn.Parameter] = {}
        """The model's bfloat16 parameters, whose float32 weights are in `parameters`."""
        self._place()
        self._read()
        self.parameters = self._parameters()
        if self.dtype == "bfloat16":
            self._round()
        self.optimizer = self._build_optimizer() if self.trainable else None

    def _build_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer_type.build(self.parameters.values())

    def _place(self) -> None:
        materialize(self.module, self.device)

    def _round(self) -> None:
        """Makes the model compute in bfloat16."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._rounded[name] = parameter
                self.parameters[name] = torch.nn.Parameter(parameter.detach())
                parameter.register_post_accumulate_grad_hook(partial(_move_grad, self.parameters[name]))
            parameter.data = parameter.data.to(torch.bfloat16)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        yield from (self.parameters[name].data for name in self._rounded)
        yield from super()._optimizer_tensors()

    def _backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if last and ranks.count() > 1:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    ranks.summed(parameter.grad)

    def _step(self, plan: OptimizerPlan) -> float:
        assert self.optimizer is not None
        plan.optimizer.set(self.optimizer, plan.lr)
        norm = self._clip(plan.grad_clip or math.inf)
        if math.isfinite(norm):
            self.optimizer.step()
            with torch.no_grad():
                for name, rounded in self._rounded.items():
                    rounded.copy_(self.parameters[name])
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            raise not_finite(norm)
        return norm

    def _clip(self, limit: float) -> float:
        """Scales the gradient so that its norm is at most `limit`; returns the norm before scaling."""
        return float(self._gathered(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit)))

    def get(self, kind: str, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        if kind == "model" and name in self._rounded and dtype == torch.bfloat16:
            return self.weights_buffers.readable(self._rounded[name].data)
        held = self._held(kind, name)
        if held.dtype != dtype:
            held = held.to(self.device).to(dtype)  # a GPU casts faster than the host
        return self._gathered(held)

    def parts(self, kind: str, name: str) -> Iterator[TensorShard]:
        return TensorShard.of_rank(self._held(kind, name).float())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.parameters[name].shape)

    def _held(self, kind: str, name: str) -> Tensor:
        """Returns a parameter or its optimizer state, sharded as in the engine."""
        parameter = self.parameters[name]
        if kind == "model":
            buffers = self.optimizer_buffers if name in self._rounded else self.weights_buffers
            return buffers.readable(parameter.data)
        assert self.optimizer is not None
        moment: Tensor | None = self.optimizer.state.get(parameter, {}).get(kind)
        if moment is None:  # it has never had a gradient
            return torch.zeros_like(parameter)
        return self.optimizer_buffers.readable(moment)

    def _load(self, kind: str, name: str, stored: RangeReader) -> None:
        if kind != "model":
            assert self.optimizer is not None
            state = self.optimizer.state[self.parameters[name]]
            # AdamW corrects the bias of its moments by the number of steps
            state["step"] = torch.tensor(float(self.steps), device=self.parameters[name].device)
            state[kind] = torch.zeros_like(self.parameters[name])
        self._fill(self._held(kind, name), stored)
        if kind == "model" and name in self._rounded:
            self._rounded[name].copy_(self.parameters[name])

    def _fill(self, parameter: Tensor, stored: RangeReader) -> None:
        TensorShard.flat(parameter.detach()).fill(stored)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Returns the whole of a tensor that may be sharded over the ranks."""
        return tensor

    def _reset_optimizer(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.state.clear()


def _move_grad(weight: torch.nn.Parameter, rounded: torch.nn.Parameter) -> None:
    """Adds the gradient of a rounded weight to that of the float32 weight."""
    assert rounded.grad is not None
    if weight.grad is None:
        weight.grad = rounded.grad.float()
    else:
        weight.grad += rounded.grad
    rounded.grad = None
