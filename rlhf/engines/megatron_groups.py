"""The groups of ranks that Megatron communicates in.

Megatron keeps them in globals of a module, for one layout of one model. Models of a process may have different layouts,
so the globals are exchanged when another model computes.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from rlhf.engines import ranks
from rlhf.models.megatron_layout import Place

ORDER = "tp-cp-ep-pp-dp"
"""Adjacent ranks share matrices, then layers; ranks that are further apart have other trajectories."""


def _globals() -> dict[str, Any]:
    return {name: held for name, held in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


class Groups:
    """The groups of a layout."""

    _built: ClassVar[dict[tuple[dist.ProcessGroup, int, int], Groups]] = {}
    _empty: ClassVar[dict[str, Any]] = copy.deepcopy(_globals())

    @classmethod
    def of(cls, tensors: int, stages: int) -> Groups:
        """Build the groups, or return those of an earlier model of this layout; all ranks must make the same call.

        Args:
            tensors: number of ranks that share each matrix.
            stages: number of ranks that share the layers.
        """
        ranks.initialized()
        world = dist.group.WORLD
        assert world is not None
        key = (world, tensors, stages)
        if key not in cls._built:
            cls._built[key] = cls(tensors, stages)
        return cls._built[key]

    def __init__(self, tensors: int, stages: int) -> None:
        """Build the groups; use `of`."""
        vars(parallel_state).update(copy.deepcopy(self._empty))
        parallel_state.initialize_model_parallel(
            tensors, stages, order=ORDER, create_gloo_process_groups=False, distributed_timeout_minutes=30
        )
        if not get_cuda_rng_tracker().is_initialized():
            # of a generator that is never used, because nothing in the models is random
            with torch.random.fork_rng():
                model_parallel_cuda_manual_seed(0)
        self._held = _globals()
        self.place = Place(
            parallel_state.get_tensor_model_parallel_rank(),
            tensors,
            parallel_state.get_pipeline_model_parallel_rank(),
            stages,
        )
        self.copy = parallel_state.get_data_parallel_rank()
        """Number of this rank's copy of the model."""
        self.copies: int = parallel_state.get_data_parallel_world_size()
        self.tensors: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        """The ranks that share matrices with this one."""

    def enter(self) -> None:
        """Make Megatron use these groups."""
        vars(parallel_state).update(self._held)
