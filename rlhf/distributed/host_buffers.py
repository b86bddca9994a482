"""Host memory for state that leaves its device while another model computes there.

Only the memory behind the tensors moves. The tensors themselves stay, and so do all references to them: views, flat
buffers whose memory engines' parameters share, sharded tensors, optimizers.

PyTorch rounds each pinned buffer up to a power of two, nearly twice the size of most tensors. So buffers are cut from a
few slabs, whose sizes are powers of two.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from ratchet.rlhf.distributed import accelerator

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

SLAB = 2**32
"""Size of the largest slab in bytes."""
SMALL_SLAB = 2**24
"""A remainder of up to this many bytes is one slab."""
ALIGNMENT = 64
"""Each part of a buffer begins at a multiple of this many bytes in its slab."""


def host_memory(size: int, device: torch.device) -> Tensor:
    """Allocates `size` bytes of host memory, uint8, pinned if the device is a GPU.

    Pinned memory takes the next power of two.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=accelerator.is_gpu(device))


def cut(sizes: Sequence[int], allocate: Callable[[int], Tensor]) -> list[list[Tensor]]:
    """Cuts buffers from a few slabs, which are freed when none of their buffers is in use.

    Args:
        sizes: size of each buffer in bytes, at least 1.
        allocate: allocates a slab of a number of bytes, a power of two.

    Returns:
        The parts of each buffer, uint8: usually one; a few buffers fill the remainders of several slabs.
    """
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    slab_sizes = _slab_sizes(sum(aligned))
    slabs, room = [allocate(size) for size in slab_sizes], list(slab_sizes)
    buffers: list[list[Tensor]] = [[] for _ in sizes]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):  # so that small ones fill the gaps
        left = sizes[number]
        whole = next(([slab] for slab, free in enumerate(room) if free >= left), None)
        for slab in whole or sorted(range(len(room)), key=lambda slab: -room[slab]):
            start, size = slab_sizes[slab] - room[slab], min(left, room[slab])
            buffers[number].append(slabs[slab][start : start + size])
            room[slab] -= -(-size // ALIGNMENT) * ALIGNMENT
            left -= size
            if not left:
                break
    return buffers


def _slab_sizes(total: int) -> list[int]:
    """Returns powers of two that sum to this many bytes, or a few more."""
    sizes: list[int] = []
    while total > SMALL_SLAB:
        sizes.append(min(SLAB, _power_of_two(total // 2 + 1)))
        total -= sizes[-1]
    return [*sizes, _power_of_two(total)] if total > 0 else sizes


def _power_of_two(size: int) -> int:
    """Returns the smallest power of two that is not less than a size."""
    return int(1 << (size - 1).bit_length())


class HostBuffers:
    """Host buffers for an engine's state that is away from its device.

    They are allocated once and reused, since allocating and pinning host memory takes longer than the copy.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts with everything on the device. On the CPU, "away" is other host memory."""
        self.device = device
        self._away: dict[int, tuple[UntypedStorage, list[Tensor]]] = {}
        """The device's memory by its identity, and the parts of the buffer that holds its bytes."""
        self._spare: dict[int, list[list[Tensor]]] = defaultdict(list)
        """Unused buffers, by size in bytes."""

    @property
    def in_use(self) -> bool:
        """True if anything is away."""
        return bool(self._away)

    @property
    def size(self) -> int:
        """Bytes that are away."""
        return sum(len(part) for _, buffer in self._away.values() for part in buffer)

    def take(self, tensors: Iterable[Tensor]) -> bool:
        """Copies tensors to the buffers, and frees their memory on the device; returns True if any was freed.

        Until `give_back` they can only be read through `readable`. Tensors that share memory leave together; those on
        another device stay.
        """
        leaving: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            storage = local_of(tensor).untyped_storage()
            # memory that torch did not allocate, such as a file's, is host memory already
            if storage.nbytes() == 0 or storage.device != self.device or not storage.resizable():
                continue
            if storage._cdata not in self._away:
                leaving[storage._cdata] = storage
        buffers = self._buffers([storage.nbytes() for storage in leaving.values()])
        for (identity, storage), buffer in zip(leaving.items(), buffers, strict=True):
            self._away[identity] = storage, buffer
            for part, on_device in _parts(storage, buffer):
                part.copy_(on_device, non_blocking=True)
        if leaving:
            accelerator.synchronize(self.device)
        for storage in leaving.values():
            # frees the memory, while tensors keep their storage
            storage.resize_(0)
        return bool(leaving)

    def give_back(self) -> None:
        """Copies everything that is away back to the device."""
        for storage, buffer in self._away.values():
            size = sum(len(part) for part in buffer)
            storage.resize_(size)
            for part, on_device in _parts(storage, buffer):
                on_device.copy_(part, non_blocking=True)
            self._spare[size].append(buffer)
        if self._away:
            accelerator.synchronize(self.device)
        self._away = {}

    def readable(self, tensor: Tensor) -> Tensor:
        """Returns a tensor whose values can be read: the tensor itself, or if it is away, one on its buffer."""
        local = local_of(tensor)
        if local.untyped_storage()._cdata not in self._away:
            return tensor
        _, buffer = self._away[local.untyped_storage()._cdata]
        # elements from the first to the last
        spread = sum((size - 1) * stride for size, stride in zip(local.size(), local.stride(), strict=True))
        start = int(local.storage_offset()) * local.itemsize
        end = start + (int(spread) + 1) * local.itemsize if local.numel() else start
        on_host = _range(buffer, start, end).view(local.dtype)
        on_host = on_host.as_strided(local.size(), local.stride(), on_host.storage_offset())
        # as `.cpu()` does with a sharded tensor
        if isinstance(tensor, DTensor):
            return DTensor(on_host, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return on_host

    def _buffers(self, sizes: Sequence[int]) -> list[list[Tensor]]:
        """Takes buffers of these sizes from the spare ones, and allocates new ones where there are too few."""
        spare = [self._spare[size].pop() if self._spare[size] else None for size in sizes]
        missing = [size for size, buffer in zip(sizes, spare, strict=True) if buffer is None]
        new = iter(cut(missing, partial(host_memory, device=self.device)))
        return [next(new) if buffer is None else buffer for buffer in spare]


def release_memory(device: torch.device) -> None:
    """Returns the memory that torch caches to the driver, so that another process can have it."""
    # reference cycles may still hold tensors
    gc.collect()
    accelerator.empty_cache(device)


def local_of(tensor: Tensor) -> Tensor:
    """Returns this rank's share of a tensor, which may be sharded."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parts(storage: UntypedStorage, buffer: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each part of a buffer, and the bytes of the device's memory that it holds."""
    sizes = [len(part) for part in buffer]
    yield from zip(buffer, torch.split(_bytes_of(storage), sizes), strict=True)


def _range(buffer: list[Tensor], start: int, end: int) -> Tensor:
    """Returns the bytes of a range: those of the buffer itself, unless they lie in several parts."""
    found: list[Tensor] = []
    for part in buffer:
        if start < len(part) and end > 0:
            found.append(part[max(start, 0) : end])
        start, end = start - len(part), end - len(part)
    if len(found) == 1:
        return found[0]
    return torch.cat(found) if found else buffer[0][:0]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
