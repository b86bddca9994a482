"""Ranks: the processes that compute a model together and make the same calls (SPMD).

A single process is a group of one, which needs no setup and no communication. Functions import torch when called, so
that this module is cheap to import.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from ratchet.rlhf.distributed import accelerator

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ratchet.rlhf.distributed.rendezvous import Rendezvous


def rank() -> int:
    """Returns this process's rank, from 0."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Returns the number of ranks."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def join(rank: int, count: int, rendezvous: Rendezvous | str, timeout_s: float = 1800.0) -> None:
    """Joins a group of ranks; blocks until all have joined.

    Args:
        rendezvous: the rendezvous that rank 0 has opened, which it passes itself; for the other ranks, its URL. Or
            ``file://path`` for all.
        timeout_s: a collective operation fails if another rank does not take part for this many seconds.
    """
    import torch.distributed as dist

    from ratchet.rlhf.distributed.rendezvous import connected

    timeout = timedelta(seconds=timeout_s)
    if isinstance(rendezvous, str) and rendezvous.startswith("file:"):
        dist.init_process_group(
            accelerator.backend(), rank=rank, world_size=count, init_method=rendezvous, timeout=timeout
        )
        return
    store = connected(rendezvous, timeout) if isinstance(rendezvous, str) else rendezvous.store
    store.set_timeout(timeout)
    dist.init_process_group(accelerator.backend(), store=store, rank=rank, world_size=count, timeout=timeout)


def initialized() -> None:
    """Ensures that a process group exists, for engines that need one even with a single process."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(accelerator.backend(), rank=0, world_size=1, store=store)


def group(members: Iterable[int], purpose: str) -> ProcessGroup:
    """Returns the process group of some ranks, of which this rank is one; it is created once.

    Only its members create it, so the number of groups that a rank creates does not grow with the number of ranks. A
    rank in several groups must ask for them in the same order as the other members.

    Args:
        purpose: the use of the group. Another purpose gets another group of the same ranks, whose calls do not wait for
            those of this one.
    """
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    # by world, because another one needs new groups
    return _group(dist.group.WORLD, tuple(members), purpose)


@cache
def _group(world: ProcessGroup, members: tuple[int, ...], purpose: str) -> ProcessGroup:
    import torch.distributed as dist

    created = dist.new_group(list(members), use_local_synchronization=True, group_desc=purpose)
    assert isinstance(created, dist.ProcessGroup)
    return created


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Sums a tensor over the ranks, in place; returns the same tensor."""
    import torch.distributed as dist

    if count() > 1:
        dist.all_reduce(tensor)
    return tensor


def largest(number: int) -> int:
    """Returns the largest value of `number` over the ranks."""
    return int(max(gathered(number)))


def gathered(value: Any) -> list[Any]:
    """Collects a picklable value from every rank; returns the values in order of rank."""
    import torch.distributed as dist

    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True)
class Share:
    """The part of a batch that a rank computes; ranks that compute it together have the same."""

    number: int
    """Number of the part, from 0."""
    shares: int
    """Number of parts."""

    @classmethod
    def of(cls, sharing: int) -> Share:
        """Returns this rank's part if `sharing` adjacent ranks share one."""
        return cls(rank() // sharing, count() // sharing)
