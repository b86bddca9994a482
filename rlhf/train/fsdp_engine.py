"""`engine: fsdp`: PyTorch's FSDP2 (`fully_shard`).

Parameters, gradients and optimizer state are sharded over the ranks and gathered layer by layer when needed (arXiv
2304.11277). With `shard_size`, groups of ranks each hold the whole state, sharded within the group (HSDP). With
`tensor_parallel`, adjacent ranks form a team that computes the same trajectories: the matrices of attention and MLP are
split over the team, by columns and then by rows (arXiv 1909.08053), following the model's own plan, and the head by
vocabulary; FSDP then shards each part over the teams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ratchet.rlhf.distributed import accelerator, host_buffers, ranks
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.token_outputs import Head, VocabularyShare
from ratchet.rlhf.train.torch_engine import TorchEngine
from ratchet.rlhf.weights.stored_state import RangeReader
from ratchet.rlhf.weights.tensor_shards import TensorShard

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.models.skeleton import Skeleton

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
EMBEDDING = "embedding_rowwise"
"""The engine splits the embedding by itself, together with the head."""
SUMMED = "replicated_with_grad_allreduce"
"""Each member of the team has the parameter and applies it to its own heads, so gradients are summed over the team."""


class FSDPEngine(TorchEngine):
    """Trains with FSDP2, optionally with tensor parallelism."""

    def __init__(
        self,
        model: PreTrainedModel | Skeleton,
        head: Head,
        *,
        offload: bool = False,
        tensor_parallel: int = 1,
        shard_size: int | None = None,
        reshard_after_forward: bool = True,
        **options: Any,
    ) -> None:
        """Wraps and shards a model.

        Args:
            shard_size: number of adjacent ranks, teams included, that shard one copy of the state; None: all ranks.
            reshard_after_forward: free a layer's gathered weights after its forward pass. False: weights are gathered,
                and gradients summed over ranks, once per mini-batch; both are whole until then.

        Raises:
            UserError: the model does not support `tensor_parallel`.
        """
        self.offload = offload
        self.team = tensor_parallel
        self.shard_size = shard_size
        self.reshard_after_forward = reshard_after_forward
        super().__init__(model, head, tensor_parallel=tensor_parallel, **options)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        groups: dict[bool, list[torch.nn.Parameter]] = {}  # a kernel cannot mix tensors of two meshes
        for parameter in self.parameters.values():
            groups.setdefault(_is_cut(parameter), []).append(parameter)
        return self.optimizer_type.build(*groups.values())

    def _round(self) -> None:
        """Does nothing: FSDP rounds the weights when it gathers them."""

    def _place(self) -> None:
        ranks.initialized()
        if not self.offload and self.model.device.type != "meta":
            self.module.to(self.device)
        on_gpu = accelerator.is_gpu(self.device)
        compute = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        count = ranks.count()
        size = count if self.shard_size is None else self.shard_size
        assert count % size == 0 and size % self.team == 0
        self.copies = count // size
        """Number of ranks that hold the same shard."""
        mesh = _mesh(self.device.type, self.copies, size // self.team, self.team)
        self.is_first_copy = ranks.rank() < size
        plan = self._cut(mesh["team"]) if self.team > 1 else {}
        options: dict[str, Any] = {
            "mesh": mesh["copies", "shards"] if self.copies > 1 else mesh["shards"],
            # None: all but the root, whose weights the backward pass needs first
            "reshard_after_forward": None if self.reshard_after_forward or not self.trainable else False,
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
            "shard_placement_fn": partial(_sharded_by, size // self.team),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if self.offload else OffloadPolicy(),
        }
        blocks = set(self.model._no_split_modules or ())
        # blocks first, so that each is gathered separately; the rest belongs to the root
        for module in self.model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, **options)
        fully_shard(self.module, **options)
        self.summed = [
            parameter
            for name, parameter in self.model.base_model.named_parameters()
            if any(fnmatch(name, f"{pattern}.*") for pattern, style in plan.items() if style == SUMMED)
        ]
        self.members = mesh.get_group("team") if self.team > 1 else None
        if self._sources:
            self._give_memory()
        self._accumulates = False
        """True while some gradients are not summed over the ranks yet."""

    def _give_memory(self) -> None:
        """Gives memory to this rank's shards."""
        shards = [tensor for tensor in (*self.module.parameters(), *self.module.buffers()) if tensor.is_meta]
        # on the host, shards are cut from slabs, so that FSDP does not pin each separately
        on_host: dict[int, Tensor] = {}
        if self.offload:
            held = [shard for shard in shards if host_buffers.local_of(shard).numel()]
            sizes = [host_buffers.local_of(shard).nbytes for shard in held]
            buffers = host_buffers.cut(sizes, partial(host_buffers.host_memory, device=self.device))
            on_host = {id(shard): parts[0] for shard, parts in zip(held, buffers, strict=True) if len(parts) == 1}

        def placed(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor
            if id(tensor) not in on_host:
                return torch.empty_like(tensor, device="cpu" if self.offload else self.device)
            shard = host_buffers.local_of(tensor)
            memory = on_host[id(tensor)].view(shard.dtype).view(shard.shape)
            if isinstance(tensor, DTensor):
                return DTensor(memory, tensor._spec, requires_grad=tensor.requires_grad)  # type: ignore[no-untyped-call]
            return memory

        self.module._apply(placed)  # type: ignore[no-untyped-call]

    def _cut(self, team: DeviceMesh) -> dict[str, str]:
        """Splits the model over the team; returns the model's plan: styles by pattern of module names."""
        config = self.model.config.get_text_config()
        full_plan = (getattr(config, "base_model_tp_plan", None) or {}).items()
        plan = {pattern: style for pattern, style in full_plan if style != EMBEDDING}
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
        self._cut_vocabulary(team)
        return plan

    def _cut_vocabulary(self, team: DeviceMesh) -> None:
        """Splits the embedding and the head by vocabulary, if the team divides it."""
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings() if self.head == "policy" else None
        is_tied = head is not None and head.weight is embedding.weight
        # a subclass of Embedding may scale its output before the team has summed it
        cuts_embedding = type(embedding) is torch.nn.Embedding and embedding.weight.shape[0] % self.team == 0
        if head is not None and head.weight.shape[0] % self.team == 0 and (cuts_embedding or not is_tied):
            parallelize_module(head, team, ColwiseParallel())
            share = head.weight.to_local().shape[0]
            self.module.vocabulary = VocabularyShare(team.get_group(), share * team.get_local_rank(), self.team)
        if cuts_embedding:
            parallelize_module(embedding, team, RowwiseParallel(input_layouts=Replicate()))
            if head is not None and is_tied:
                head.weight = embedding.weight

    def _free_copies(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass the outermost parameters stay gathered

    def _backward(self, loss: Tensor, last: bool) -> None:
        assert isinstance(self.module, FSDPModule)
        self._accumulates = not last
        self.module.set_requires_all_reduce(last)  # shards are summed over their copies once per mini-batch
        if not self.reshard_after_forward:
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last)
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
                # equal shards on several ranks would be counted several times
                copies = self.copies * (1 if _is_cut(parameter.grad) else self.team)
                squares += _local(parameter.grad).float().square().sum().to(self.device) / copies
        norm = math.sqrt(float(ranks.summed(squares)))
        if norm > limit:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    _local(parameter.grad).mul_(limit / norm)
        return norm

    def parts(self, kind: str, name: str) -> Iterator[TensorShard]:
        tensor = self._held(kind, name)
        is_first_member = ranks.rank() % self.team == 0
        if self.is_first_copy and (_is_cut(tensor) or is_first_member):  # else another rank yields the same
            yield from _blocks(tensor)

    def _fill(self, parameter: Tensor, stored: RangeReader) -> None:
        for block in _blocks(parameter.detach()):
            block.fill(stored)

    def _reset_optimizer(self) -> None:
        # an aborted update may have left gradients in FSDP, which releases them only in a backward pass by all ranks
        if self.trainable and ranks.largest(int(self._accumulates)):
            token = torch.zeros(1, dtype=torch.long, device=self.device)
            with torch.enable_grad():
                [output] = self._call(token[None], None, token, token, 1.0, ()).values()
                self._backward(0 * output.sum(), last=True)
        super()._reset_optimizer()
        for module in self.module.modules():  # gathered weights would hide those that are loaded now
            if isinstance(module, FSDPModule):
                module.reshard()

    def _gathered(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.to(self.device).full_tensor()  # type: ignore[no-any-return, attr-defined]


def _mesh(device_type: str, copies: int, shards: int, team: int) -> DeviceMesh:
    """Lays out the ranks in a mesh. Models of one layout use the same groups."""
    sizes = {"copies": copies, "shards": shards, "team": team}
    # FSDP always asks for `shards`; other dimensions of size one are left out
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shards")
    layout = torch.arange(ranks.count()).view([sizes[name] for name in names])
    if len(names) == 1:
        world = dist.group.WORLD
        assert world is not None
        return DeviceMesh.from_group(world, device_type, mesh_dim_names=names)
    at = (layout == ranks.rank()).nonzero()[0].tolist()
    groups = [
        ranks.group(layout[(*at[:number], slice(None), *at[number + 1 :])].tolist(), name)
        for number, name in enumerate(names)
    ]
    return DeviceMesh.from_group(groups, device_type, layout, mesh_dim_names=names)


def _sharded_by(shards: int, parameter: torch.nn.Parameter) -> Shard | None:
    """Chooses the dimension by which a parameter is sharded; None: the first.

    Experts are sharded by their rows if the shards do not divide their number: it would be padded to a multiple, and
    each padded expert gathered and summed like the others.
    """
    if parameter.dim() < 3 or parameter.shape[0] % shards == 0:
        return None
    return next((Shard(number) for number, size in enumerate(parameter.shape) if number and size % shards == 0), None)


def _blocks(tensor: Tensor) -> Iterator[TensorShard]:
    """Yields this rank's block of a tensor, unless it is empty."""
    assert isinstance(tensor, DTensor)
    block = tensor.to_local()
    if block.numel():
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        yield TensorShard.block(block, tensor.shape, offsets)


def _is_cut(tensor: Tensor) -> bool:
    """Returns True if a tensor is split over the team."""
    assert isinstance(tensor, DTensor)
    names = tensor.device_mesh.mesh_dim_names
    return names is not None and names[-1] == "team" and isinstance(tensor.placements[-1], Shard)


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
