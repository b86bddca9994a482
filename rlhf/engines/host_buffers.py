"""Host memory for state that leaves its device while another model computes there.

Only the memory behind the tensors moves. The tensors themselves stay, and so does everything that refers to them:
views, flat buffers that engines share parameters from, sharded tensors, optimizers.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage


class HostBuffers:
    """A part of an engine's state that may be away from its device.

    The buffers are allocated once and reused, since allocating and pinning host memory takes longer than the copy. They
    are pinned if the device is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Start with everything on the device.

        Args:
            device: the device that the state leaves; on the CPU "away" is other host memory.
        """
        self.device = device
        self._away: dict[int, tuple[UntypedStorage, Tensor]] = {}
        """Memory of the device, by its identity, and the buffer that has its bytes."""
        self._spare: dict[int, list[Tensor]] = defaultdict(list)
        """Buffers that are not in use, by size in bytes."""

    @property
    def in_use(self) -> bool:
        """Whether anything is away."""
        return bool(self._away)

    @property
    def size(self) -> int:
        """Bytes that are away."""
        return sum(buffer.numel() for _, buffer in self._away.values())

    def take(self, tensors: Iterable[Tensor]) -> bool:
        """Copy tensors to the buffers, and free their memory on the device. Until `give_back` they can only be read
        through `readable`.

        Args:
            tensors: the tensors; those that share memory leave together. Those on another device stay as they are.

        Returns:
            Whether any memory was freed.
        """
        leaving: list[UntypedStorage] = []
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            # memory that torch did not allocate, such as a file's, is host memory already
            if storage.nbytes() == 0 or storage.device != self.device or not storage.resizable():
                continue
            if storage._cdata not in self._away:
                buffer = self._buffer(storage.nbytes())
                buffer.copy_(_bytes_of(storage), non_blocking=True)
                self._away[storage._cdata] = storage, buffer
                leaving.append(storage)
        if leaving:
            self._synchronize()
        for storage in leaving:
            storage.resize_(0)
        return bool(leaving)

    def give_back(self) -> None:
        """Copy everything that is away back to the device."""
        for storage, buffer in self._away.values():
            storage.resize_(buffer.numel())
            _bytes_of(storage).copy_(buffer, non_blocking=True)
            self._spare[buffer.numel()].append(buffer)
        if self._away:
            self._synchronize()
        self._away = {}

    def readable(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose values can be read: the tensor itself, or if it is away, one on its buffer."""
        local = _local(tensor)
        if local.untyped_storage()._cdata not in self._away:
            return tensor
        _, buffer = self._away[local.untyped_storage()._cdata]
        on_host = torch.empty(0, dtype=local.dtype)
        on_host.set_(buffer.untyped_storage(), local.storage_offset(), local.size(), local.stride())
        # what `.cpu()` makes of a sharded tensor
        if isinstance(tensor, DTensor):
            return DTensor(on_host, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return on_host

    def _buffer(self, size: int) -> Tensor:
        if self._spare[size]:
            return self._spare[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def release_memory(device: torch.device) -> None:
    """Give the device memory that torch keeps for later back to the driver, so that another process can have it.

    Args:
        device: this process's device; on the CPU there is nothing to do.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
