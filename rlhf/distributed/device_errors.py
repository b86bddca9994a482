"""Explains PyTorch's errors about the GPU and the connection to other ranks.

Functions import torch when they are called, so that this module is cheap to import.
"""

from __future__ import annotations

from ratchet.rlhf.errors import RatchetError, in_one_line


def out_of_memory(error: BaseException) -> RatchetError | None:
    """Returns the error for a user if GPU memory ran out, else None."""
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return None
    asked = in_one_line(error).split(". ")[0]
    return RatchetError(f"{asked}: lower micro_batch_tokens, set gradient_checkpointing, or use more GPUs")


def is_lost(error: BaseException) -> bool:
    """Returns True if a GPU or a collective operation failed, so that only new processes can continue."""
    import torch
    import torch.distributed as dist

    # gloo raises plain RuntimeErrors, which name its source files
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return is_gloo or isinstance(error, dist.DistError | torch.AcceleratorError)
