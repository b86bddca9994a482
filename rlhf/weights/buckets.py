"""Moves weights from the trainer to the rollout: in the rollout's type, packed into buckets.

A bucket is a block of memory with the tensors of some layers, one after the other. While the receiver reads one bucket,
the sender fills another one, so neither ever holds a second copy of the model, and each byte of the model in the
rollout's type is written once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch

from ratchet.rlhf.distributed import accelerator

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = {"cpu": 2**25, "gpu": 2**28}
"""Size of a bucket, by type of device; a larger tensor has its own bucket.

Reusing host memory is cheaper than allocating it; on a GPU, fewer buckets are delivered faster.
"""


@dataclass(frozen=True)
class Packed:
    """Tensors of one type that lie one after the other in a bucket."""

    dtype: str
    """PyTorch's name of the type, such as `bfloat16`."""
    names: tuple[str, ...]
    """Names of the tensors, as in a checkpoint."""
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(torch.Size(shape).numel() * self._dtype.itemsize for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def tensors(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors by name; they share memory with the bucket's bytes, `memory`."""
        first = 0
        for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True):
            yield name, memory[first : first + size].view(self._dtype).view(shape)
            first += size

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Inverts `as_json`."""
        return cls(fields["dtype"], tuple(fields["names"]), tuple(tuple(shape) for shape in fields["shapes"]))


class Buffer(Protocol):
    """Memory for one bucket at a time."""

    device: torch.device

    def reserve(self, nbytes: int) -> Tensor:
        """Returns memory of at least `nbytes` bytes, uint8. It may replace what an earlier call returned."""
        ...


B = TypeVar("B", bound=Buffer)


class Memory:
    """A `Buffer` of ordinary memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, nbytes: int) -> Tensor:
        if len(self.memory) < nbytes:
            self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)  # frees the smaller one first
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.memory


class DeviceMemory(Memory):
    """A `Buffer` of this process's GPU that other processes on the same GPU can map."""

    def __init__(self) -> None:
        super().__init__(accelerator.device())
        self._handle: tuple[int, tuple[Any, ...]] | None = None

    @property
    def handle(self) -> dict[str, tuple[Any, ...]]:
        """The arguments of PyTorch's `rebuild_cuda_tensor` that map the memory, by the GPU's UUID."""
        from torch.multiprocessing.reductions import reduce_tensor

        if self._handle is None or self._handle[0] != self.memory.data_ptr():  # each export is released once
            self._handle = self.memory.data_ptr(), reduce_tensor(self.memory)[1]  # type: ignore[no-untyped-call]
        return {accelerator.cuda_uuid(self.device): self._handle[1]}

    def close(self) -> None:
        """Frees the memory once no process maps it."""
        self.memory, self._handle = self.memory[:0].clone(), None
        accelerator.release_exports()


class SharedMemory:
    """A `Buffer` of host memory that other processes of this machine and user can map.

    It is an anonymous file: the size of /dev/shm, which containers limit to 64 MB, does not bound it, and nothing
    remains of it when the processes that use it are gone.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """The file that other processes map."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def reserve(self, nbytes: int) -> Tensor:
        if len(self._memory) < nbytes:
            self.close()
            self._descriptor = os.memfd_create("ratchet-weights")
            os.ftruncate(self._descriptor, nbytes)
            self._memory = mapped(self.path, nbytes)
        return self._memory

    def close(self) -> None:
        """Frees the memory once no process maps it."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def mapped(path: str, nbytes: int) -> Tensor:
    """Maps the first `nbytes` bytes of a `SharedMemory`, in this process or another one; returns them as uint8."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def send(
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    buffers: Sequence[B],
    deliver: Callable[[Packed, B], None],
) -> int:
    """Packs weights, consumed one at a time, into buckets and delivers them in order; returns the number of bytes.

    Args:
        dtype: type of the rollout; floating-point tensors are cast to it.
        buffers: memory of the buckets. With two, one is filled while the other one is delivered.
        deliver: hands a bucket to the receiver, and returns when the receiver has read it. Runs in another thread.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as thread:
        return _send(iter(weights), dtype, buffers, lambda packed, buffer: thread.submit(deliver, packed, buffer))


def _send(
    weights: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    buffers: Sequence[B],
    deliver: Callable[[Packed, B], Future[None]],
) -> int:
    under_way: deque[Future[None]] = deque()
    sent = 0
    tensor_or_end = next(weights, None)
    while tensor_or_end is not None:
        buffer = buffers[0]
        # the buffers take turns
        buffers = (*buffers[1:], buffer)
        if len(under_way) == len(buffers):  # the receiver may still be reading this buffer
            under_way.popleft().result()
        packed, tensor_or_end = _fill(buffer, tensor_or_end, weights, dtype)
        sent += packed.nbytes
        under_way.append(deliver(packed, buffer))
    for delivery in under_way:
        delivery.result()
    return sent


def _fill(
    buffer: Buffer, first: tuple[str, Tensor], others: Iterator[tuple[str, Tensor]], dtype: torch.dtype
) -> tuple[Packed, tuple[str, Tensor] | None]:
    """Fills a buffer with `first` and as many of the others as fit; returns them, and the tensor that did not fit."""
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    kind, used = _type_of(first[1], dtype), 0
    limit = BUCKET_BYTES[accelerator.kind(buffer.device)]
    memory = buffer.reserve(max(limit, first[1].numel() * kind.itemsize))
    following: tuple[str, Tensor] | None = first
    while following is not None:
        name, tensor = following
        size = tensor.numel() * kind.itemsize
        if names and (_type_of(tensor, dtype) != kind or used + size > limit):
            break
        memory[used : used + size].view(kind).view(tensor.shape).copy_(tensor.detach())
        names.append(name)
        shapes.append(tuple(tensor.shape))
        used += size
        following = next(others, None)
    return Packed(str(kind).removeprefix("torch."), tuple(names), tuple(shapes)), following


def _type_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
