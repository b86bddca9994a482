"""Shards of a tensor: the elements that one rank holds, and their positions in the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ratchet.rlhf.distributed import ranks

if TYPE_CHECKING:
    from torch import Tensor

    from ratchet.rlhf.weights.stored_state import RangeReader

AT_ONCE = 2**22
"""Elements read at a time: 16 MiB."""


@dataclass(frozen=True)
class TensorShard:
    """Elements of a tensor that one rank holds: runs that are contiguous in the flattened whole tensor."""

    values: Tensor
    """float32, shape (runs, length of a run)."""
    starts: Tensor
    """Position of each run's first element in the flattened whole tensor, int64 on the CPU, shape (runs,)."""

    @classmethod
    def flat(cls, values: Tensor, start: int = 0) -> TensorShard:
        """Returns a single run of elements from `start` on."""
        return cls(values.view(1, -1), torch.tensor([start]))

    @classmethod
    def of_rank(cls, whole: Tensor) -> Iterator[TensorShard]:
        """Yields this rank's share of a tensor that all ranks hold."""
        values, count = whole.reshape(-1), ranks.count()
        first, last = (len(values) * number // count for number in (ranks.rank(), ranks.rank() + 1))
        if last > first:
            yield cls.flat(values[first:last], first)

    @classmethod
    def block(cls, values: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> TensorShard:
        """Returns a rectangular block.

        Args:
            values: the block, contiguous: `fill` writes into its memory.
            offsets: index of the block's first element in each dimension of the whole tensor.
        """
        strides = [1] * len(shape)
        for dim in reversed(range(len(shape) - 1)):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
        contiguous = len(shape)  # from this dimension on, the block is contiguous in the whole
        while contiguous > 0 and values.shape[contiguous:] == tuple(shape[contiguous:]):
            contiguous -= 1
        starts = torch.zeros(1, dtype=torch.int64)
        for dim, stride in enumerate(strides):
            count = values.shape[dim] if dim < contiguous else 1
            starts = (starts[:, None] + (offsets[dim] + torch.arange(count)) * stride).flatten()
        return cls(values.view(len(starts), -1), starts)

    def fill(self, stored: RangeReader) -> None:
        """Reads the elements of a stored whole tensor into `values`, which share memory with the engine's tensor."""
        runs, length = self.values.shape
        widest = int(self.starts.diff().max()) if runs > 1 else length
        at_once = max(1, AT_ONCE // widest)  # runs
        for run in range(0, runs, at_once):
            starts = self.starts[run : run + at_once]
            begin = int(starts[0])
            for first in range(0, length, AT_ONCE if at_once == 1 else length):
                last = min(first + AT_ONCE, length) if at_once == 1 else length
                # several runs are read together with the gaps between them
                read = stored.flat(begin + first, int(starts[-1]) + last)
                if len(starts) > 1:
                    read = read[(starts - begin)[:, None] + torch.arange(last - first)]
                self.values[run : run + at_once, first:last].copy_(read.view(len(starts), -1))
