"""The groups of ranks in which Megatron communicates.

Megatron keeps them in a module's globals, for one layout of one model. Models of a process may have different layouts,
so the globals are swapped when another model computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from ratchet.rlhf.distributed import ranks
from ratchet.rlhf.models.megatron_layout import Place


@dataclass(frozen=True)
class Layout:
    """Numbers of ranks that share a model."""

    tensor: int = 1
    """Ranks that share each matrix."""
    pipeline: int = 1
    """Ranks that share the layers."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks that share the experts of each layer; they may share matrices or sequences, or have other trajectories."""


_create_group: Callable[..., dist.ProcessGroup | None] = parallel_state.create_group


def _create_own(members: list[int], **options: Any) -> dist.ProcessGroup | None:
    """Creates a group only if this rank is in it."""
    # Megatron asks each rank for the groups of all, thousands at 512 ranks, most of which have one member
    if members == [ranks.rank()]:
        return ranks.group(members, "megatron")
    return _create_group(members, **options | {"use_local_synchronization": True})


parallel_state.create_group = _create_own


def _globals() -> dict[str, Any]:
    return {name: held for name, held in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


class MegatronGroups:
    """The groups of a layout.

    Adjacent ranks share matrices, then sequences; distant ranks share layers. The attention's and the experts' ranks
    have one layout each, over the same ranks; each expert is whole on its rank.
    """

    _built: ClassVar[dict[tuple[dist.ProcessGroup, Layout], MegatronGroups]] = {}
    _empty: ClassVar[dict[str, Any]] = copy.deepcopy(_globals())

    @classmethod
    def of(cls, layout: Layout) -> MegatronGroups:
        """Builds the groups, or returns those of an earlier model of this layout; all ranks must make the same call."""
        ranks.initialized()
        world = dist.group.WORLD
        assert world is not None
        if (world, layout) not in cls._built:
            cls._built[world, layout] = cls(layout)
        return cls._built[world, layout]

    def __init__(self, layout: Layout) -> None:
        """Use `of` instead."""
        # Megatron refuses to initialize groups twice
        vars(parallel_state).update(copy.deepcopy(self._empty))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            context_parallel_size=layout.context,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        if not get_cuda_rng_tracker().is_initialized():
            # Megatron requires this generator; nothing in the models is random, so it is never used
            with torch.random.fork_rng():
                model_parallel_cuda_manual_seed(0)
        self._held = _globals()
        self.place = Place(
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            tensors=layout.tensor,
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            stages=layout.pipeline,
            expert=parallel_state.get_expert_model_parallel_rank(),
            experts=layout.expert,
            context=parallel_state.get_context_parallel_rank(),
            contexts=layout.context,
        )
        self.tensors: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        """The ranks that share matrices with this one."""
        self.contexts: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        """The ranks that share sequences with this one."""
        self.share = ranks.Share(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
        self.counts = self.place.is_last_stage and self.place.tensor == self.place.context == 0
        """True if this rank is the first of those that have the results of its trajectories."""
        self.copies: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
        """The ranks that have the same parameters as this one, except the experts'."""
        self.copies_of_experts: dist.ProcessGroup = parallel_state.get_expert_data_parallel_group()

    def enter(self) -> None:
        """Makes Megatron use these groups."""
        vars(parallel_state).update(self._held)
