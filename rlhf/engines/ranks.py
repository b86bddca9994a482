"""The processes that compute one model together: each knows its rank, and all make the same calls (SPMD).

One process is a group of one: nothing is sent, and nothing has to be set up. torch is imported when something is
computed, so that this module costs nothing to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.engines.micro_batches import by_token_budget

if TYPE_CHECKING:
    import torch


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def join(rank: int, count: int, meeting: str) -> None:
    """Become one of `count` ranks, which meet at ``tcp://host:port``, where rank 0 listens, or at ``file://path``."""
    import torch.distributed as dist

    dist.init_process_group(_backend(), rank=rank, world_size=count, init_method=meeting)


def initialized() -> None:
    """For engines that need a process group even when they are alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(), rank=0, world_size=1, store=store)


def _backend() -> str:
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def device() -> torch.device:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, in place."""
    import torch.distributed as dist

    if count() > 1:
        dist.all_reduce(tensor)
    return tensor


def largest(number: int) -> int:
    """Over the ranks."""
    return int(max(gathered(number)))


def gathered(mine: Any) -> list[Any]:
    """What each rank brings, by rank; plain data."""
    import torch.distributed as dist

    if count() == 1:
        return [mine]
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, mine)
    return found


def pieces(lengths: np.ndarray, budget: int, *, packed: bool = False, sharing: int = 1) -> list[np.ndarray]:
    """This rank's pieces of a batch: rows, at most `budget` tokens at once (padding included, unless packed).

    Rows are dealt out by length, so that ranks have about the same number of tokens; `sharing` ranks in a row get the
    same. Every rank gets the same number of pieces, since sharded models are computed in step: a piece may be empty.
    """
    hands = count() // sharing
    order = np.argsort(-lengths, kind="stable")
    dealt = [order[hand::hands] for hand in range(hands)]
    cut = [[rows[piece] for piece in by_token_budget(lengths[rows], budget, packed=packed)] for rows in dealt]
    most = max(len(one) for one in cut)
    mine = cut[rank() // sharing]
    return mine + [order[:0]] * (most - len(mine))
