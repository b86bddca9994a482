"""Counts the work of operations on the simulated device, also where it is hollow."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import varlen  # noqa: F401  (it registers its operations)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, mm_flop

from ratchet.rlhf.models.segments import Segments
from tests.simulated import device

ATTENTION = (torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward)
COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of what other hardware than the kernels' does; see `device.reported`."""
NO_TRAFFIC = ("empty", "new_empty", "set_", "resize_", "record_stream")
"""Beginnings of names of operations that neither read nor write memory."""


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors on the device."""
    for value in values:
        if isinstance(value, Tensor):
            if value.device.type == device.NAME:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


class Operations(TorchDispatchMode):
    """Counts the FLOPs of operations, by PyTorch's formulas, and the bytes that their kernels read and write."""

    def __init__(self, ends: dict[int, Tensor]) -> None:
        """Gets the ends of the pieces that attention gets, by their address on the device, see `Segments`."""
        super().__init__()
        self.counts: Counter[tuple[int, int]] = Counter()
        """Numbers of operations by their FLOPs and bytes."""
        self._ends = ends

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its shards' operations come here, too
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace not in COLLECTIVES and not func._opname.startswith(NO_TRAFFIC):
            given, made = {*tensors_of((*args, *kwargs.values()))}, {*tensors_of((result,))}
            read, written = ({tensor.untyped_storage()._cdata for tensor in side} for side in (given, made))
            if func._schema.is_mutable or not written <= read:  # a view otherwise
                size = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in (*given, *made))
                self.counts[self._flops(func._overloadpacket, args, kwargs, result), size] += 1
        return result

    def _flops(self, packet: Any, args: Any, kwargs: Any, result: Any) -> int:
        if packet is torch.ops.aten._grouped_mm:  # each token goes through one matrix of the group
            return mm_flop(args[0].shape[-2:], args[1].shape[-2:])
        formula: Callable[..., int] | None = flop_registry.get(packet)
        if formula is None:
            return 0
        if packet in ATTENTION:
            first = 3 + 3 * ATTENTION.index(packet)
            tensors, others = args[:first], args[first + 2 :]
            queries, keys = (self._ends[ends.data_ptr()] for ends in args[first : first + 2])
            # the formula ignores that attention is causal
            return formula(*tensors, queries, keys, *others) - formula(*tensors, queries, queries, *others) // 2
        return formula(*args, **kwargs, out_val=result)


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[int, int]]]:
    """Yields the numbers of operations by their FLOPs and bytes."""
    ends: dict[int, Tensor] = {}
    move = Segments.to

    def moved(segments: Segments, to: torch.device) -> Segments:
        placed = move(segments, to)
        for name in ("query_ends", "key_ends"):
            ends[getattr(placed, name).data_ptr()] = getattr(segments, name)
        return placed

    Segments.to = moved  # type: ignore[method-assign]  # a hollow device does not keep them
    try:
        with Operations(ends) as operations:
            yield operations.counts
    finally:
        Segments.to = move  # type: ignore[method-assign]
