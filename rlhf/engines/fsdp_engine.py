"""`engine: fsdp`: PyTorch's FSDP2 (`fully_shard`).

Parameters, gradients and optimizer state are sharded over the ranks and gathered layer by layer when needed (arXiv
2304.11277). With `tensor_parallel`, adjacent ranks form a team that computes the same trajectories: the matrices of
attention and MLP are split over the team, by columns and then by rows (arXiv 1909.08053), as the model's own plan says;
FSDP then shards each part over the teams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from rlhf.engines import ranks
from rlhf.engines.parts import Part
from rlhf.engines.stored_state import StoredTensor
from rlhf.engines.token_outputs import Head
from rlhf.engines.torch_engine import TorchEngine
from rlhf.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
WHOLE = "embedding_rowwise"
"""Embeddings are not split over the team; FSDP shards them."""
SUMMED = "replicated_with_grad_allreduce"
"""Every member of the team has the parameter and applies it to its own heads, so gradients are summed over the team."""


class FSDPEngine(TorchEngine):
    """A train engine that uses FSDP2, optionally with tensor parallelism."""

    def __init__(
        self, model: PreTrainedModel, head: Head, *, offload: bool = False, tensor_parallel: int = 1, **options: Any
    ) -> None:
        """Wrap and shard a model.

        Args:
            model: the model, with float32 weights.
            head: outputs of the model.
            offload: whether parameters and optimizer state are kept in host memory.
            tensor_parallel: number of adjacent ranks that split each matrix.
            options: see `ModelEngine`.

        Raises:
            UserError: the model does not support `tensor_parallel`.
        """
        self.offload = offload
        self.team = tensor_parallel
        super().__init__(model, head, tensor_parallel=tensor_parallel, **options)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        # multi-tensor kernels cannot mix tensors of two meshes
        return self.optimizer_type.build(self.parameters.values(), foreach=self.team == 1)

    def _place(self) -> None:
        ranks.initialized()
        if not self.offload:
            self.module.to(self.device)
        on_gpu = self.device.type == "cuda"
        compute = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        mesh = init_device_mesh(
            self.device.type, (ranks.count() // self.team, self.team), mesh_dim_names=("teams", "team")
        )
        plan = self._cut(mesh["team"]) if self.team > 1 else {}
        options: dict[str, Any] = {
            "mesh": mesh["teams"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if self.offload else OffloadPolicy(),
        }
        blocks = set(self.model._no_split_modules or ())
        for module in self.model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, **options)
        fully_shard(self.module, **options)
        self.summed = [
            parameter
            for name, parameter in self.model.base_model.named_parameters()
            if any(fnmatch(name, f"{pattern}.*") for pattern, style in plan.items() if style == SUMMED)
        ]
        self.members = mesh.get_group("team")

    def _cut(self, team: DeviceMesh) -> dict[str, str]:
        """Split the model over the team; returns the model's plan: styles by pattern of module names."""
        config = self.model.config.get_text_config()
        full_plan = (getattr(config, "base_model_tp_plan", None) or {}).items()
        plan = {pattern: style for pattern, style in full_plan if style != WHOLE}
        unknown = set(plan.values()) - {*STYLES, SUMMED}
        if not plan or unknown:
            raise UserError(
                f"tensor_parallel: {type(self.model).__name__} has no supported plan"
                + (f" (unknown styles: {', '.join(sorted(unknown))})" if unknown else "")
                + ": remove tensor_parallel"
            )
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(config, key) % self.team:
                raise UserError(
                    f"tensor_parallel is {self.team}, which does not divide the model's {key} {getattr(config, key)}"
                )
        styles = {pattern: STYLES[style]() for pattern, style in plan.items() if style in STYLES}
        parallelize_module(self.model.base_model, team, styles)
        return plan

    def _free_copies(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass the outermost parameters stay gathered

    def _backward(self, loss: Tensor, last: bool) -> None:
        share = loss * (ranks.count() // self.team)  # FSDP averages over teams; losses must be summed
        share.backward()  # type: ignore[no-untyped-call]

    def _clip(self, limit: float) -> float:
        if self.team == 1:
            return super()._clip(limit)
        for parameter in self.summed:
            dist.all_reduce(_local(parameter.grad), group=self.members)
        squares = torch.zeros((), device=self.device)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                copies = 1 if _is_cut(parameter.grad) else self.team
                squares += _local(parameter.grad).float().square().sum().to(self.device) / copies
        norm = math.sqrt(float(ranks.summed(squares)))
        if norm > limit:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    _local(parameter.grad).mul_(limit / norm)
        return norm

    def parts(self, kind: str, name: str) -> Iterator[Part]:
        """Yield what this rank holds of a tensor; see `ModelEngine.parts`."""
        tensor = self._held(kind, name)
        if _is_cut(tensor) or ranks.rank() % self.team == 0:  # otherwise the team's first member has the same
            yield from _blocks(tensor)

    def _fill(self, tensor: Tensor, stored: StoredTensor) -> None:
        for block in _blocks(tensor):
            block.fill(stored)

    def _gathered(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.to(self.device).full_tensor()  # type: ignore[no-any-return, attr-defined]


def _blocks(tensor: Tensor) -> Iterator[Part]:
    """Yield this rank's block of a tensor, unless it is empty."""
    assert isinstance(tensor, DTensor)
    block = tensor.to_local()
    if block.numel():
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        yield Part.block(block, tensor.shape, offsets)


def _is_cut(tensor: Tensor) -> bool:
    """Tell whether a tensor is split over the team."""
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh.ndim == 2 and isinstance(tensor.placements[1], Shard)


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
