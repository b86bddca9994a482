"""Rollout teams: adjacent ranks of a pool whose devices one rollout engine spans.

The first rank of a team runs the engine. The other ranks lend it their devices: they help to gather weights, and take
turns on the devices.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from ratchet.rlhf.distributed import ranks
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutTeam:
    """The team of this rank; by default a team of one. All methods are collective."""

    leads: bool = True
    """True if this rank runs the engine."""
    devices: tuple[str, ...] = ()
    """The team's GPUs in order of rank, by number or UUID; empty: the GPUs that this process sees."""
    group: ProcessGroup | None = None
    """Connects the ranks through gloo, so that it needs no device; None: a team of one."""

    def meet(self) -> None:
        """Waits until all ranks of the team have called this."""
        import torch.distributed as dist

        if self.group is not None:
            dist.barrier(self.group)

    def agrees(self, opinion: bool) -> bool:
        """Returns True if `opinion` is true on all ranks of the team."""
        import torch
        import torch.distributed as dist

        if self.group is None:
            return opinion
        lowest = torch.tensor(int(opinion))
        dist.all_reduce(lowest, dist.ReduceOp.MIN, self.group)
        return bool(lowest)

    def of_leader(self, value: T | None) -> T:
        """Returns the first rank's value, which must be picklable; other ranks' values are ignored."""
        import torch.distributed as dist

        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group_src=0, group=self.group)
        [shared] = values
        assert shared is not None
        return shared


def formed(size: int, devices: Iterable[str], timeout_s: float) -> RolloutTeam:
    """Forms the teams of all ranks and returns this rank's; every rank calls this.

    Args:
        size: number of adjacent ranks in a team; it divides the number of ranks.
        devices: the GPUs of this rank, by number or UUID.
    """
    import torch.distributed as dist

    if size == 1:
        return RolloutTeam()
    index = ranks.rank() % size
    first = ranks.rank() - index
    # only the team's own members take part in creating its group
    group = dist.new_group(
        list(range(first, first + size)), timedelta(seconds=timeout_s), "gloo", use_local_synchronization=True
    )
    by_rank: list[tuple[str, ...]] = [()] * size
    dist.all_gather_object(by_rank, tuple(devices), group)
    team_devices = tuple(device for member in by_rank for device in member)
    return RolloutTeam(index == 0, team_devices, group)


class LentDevices(RolloutEngine):
    """The rollout engine of a rank that lends its devices to the engine of its team's first rank."""

    def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Raises AssertionError: the team's first rank generates."""
        raise AssertionError("only the first rank of a rollout team generates")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> int:
        """Does nothing: the first rank loads the weights."""
        return 0

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Does nothing: the first rank moves the engine."""

    def close(self) -> None:
        """Does nothing."""
