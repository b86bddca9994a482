"""Reads the files of a checkpoint by range: an engine reads only its share."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = ("model", "adapter_model")
MOMENTS = ("optimizer",)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""PyTorch's types by their names in safetensors files."""

Read = Callable[[str, int, int], bytes]
"""Reads a file: its name, the first byte, and the byte after the last one."""


def is_weights(file: str) -> bool:
    """Returns True if a file of a checkpoint contains weights of the model or its adapters, judging by its name."""
    return file.startswith(WEIGHTS) and file.endswith(".safetensors")


class RangeReader(Protocol):
    """A whole tensor that is read by range."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""

    def flat(self, first: int, last: int) -> Tensor:
        """Reads elements of the flattened tensor, from `first` up to, but without, `last`."""

    def whole(self) -> Tensor:
        """Reads the whole tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    read: Read
    file: str
    start: int
    """Offset of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def joined(cls, tensors: Sequence[StoredTensor], shape: tuple[int, ...]) -> StoredTensor:
        """Joins the elements of several tensors of one type, one after the other, to one of the given shape."""
        ends = list(accumulate(tensor.bytes for tensor in tensors))

        def read(_file: str, start: int, end: int) -> bytes:
            data = b""
            number = bisect_right(ends, start)
            while start < end:
                tensor, until = tensors[number], min(end, ends[number])
                shift = tensor.start + tensor.bytes - ends[number]
                data += tensor.read(tensor.file, start + shift, until + shift)
                start, number = until, number + 1
            return data

        if len(tensors) == 1:
            return replace(tensors[0], shape=shape)
        return cls(read, tensors[0].file, 0, shape, tensors[0].dtype)

    def flat(self, first: int, last: int) -> Tensor:
        size = self.dtype.itemsize
        data = self.read(self.file, self.start + first * size, self.start + last * size)
        return torch.frombuffer(bytearray(data), dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)

    def whole(self) -> Tensor:
        return self.flat(0, torch.Size(self.shape).numel()).reshape(self.shape)


@dataclass(frozen=True)
class Held:
    """A tensor in memory."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def flat(self, first: int, last: int) -> Tensor:
        return self.tensor.reshape(-1)[first:last]

    def whole(self) -> Tensor:
        return self.tensor


class StoredState:
    """The files of a checkpoint, whose tensors are read by range."""

    def __init__(self, sizes: Mapping[str, int], read: Read) -> None:
        """Reads the headers of the safetensors files, given their sizes in bytes and a reader."""
        self._sizes, self._read = sizes, read
        self.weights = self._tensors(WEIGHTS)
        """The tensors of the model or of its adapters, by name."""

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> StoredState:
        """Opens files that are in memory."""
        return cls({name: len(data) for name, data in files.items()}, lambda name, start, end: files[name][start:end])

    @property
    def moments(self) -> dict[str, StoredTensor]:
        """The optimizer's tensors, by kind and name of the parameter: ``exp_avg.lm_head.weight``."""
        return self._tensors(MOMENTS)

    def file(self, name: str) -> bytes | None:
        """Reads a whole file; None if there is none."""
        return self._read(name, 0, self._sizes[name]) if name in self._sizes else None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Reads the weights, one tensor at a time."""
        return ((name, stored.whole()) for name, stored in self.weights.items())

    def _tensors(self, which: tuple[str, ...]) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        for file in self._sizes:
            if file.startswith(which) and file.endswith(".safetensors"):
                # a safetensors file has the header's length in 8 bytes, the header, and the tensors
                first = 8 + int.from_bytes(self._read(file, 0, 8), "little")
                header = json.loads(self._read(file, 8, first))
                header.pop("__metadata__", None)
                for name, about in header.items():
                    start = first + about["data_offsets"][0]
                    shape, dtype = tuple(about["shape"]), DTYPES[about["dtype"]]
                    tensors[name] = StoredTensor(self._read, file, start, shape, dtype)
        return tensors


class TensorFile:
    """A safetensors file in memory, written one tensor at a time, so that no second copy of all is needed."""

    def __init__(self, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Writes the header, from the tensors' types and shapes in the order in which they will be written."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape) in tensors.items():
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [start, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)  # aligns the tensors
        beginning = len(encoded).to_bytes(8, "little") + encoded
        # zeros whose pages nothing has touched: each is touched once, by the tensor that is copied there
        self._data = BytesIO(bytes(len(beginning) + end))
        self._data.write(beginning)

    def write(self, tensor: Tensor) -> None:
        """Appends the next tensor."""
        first, flat = self._data.tell(), tensor.detach().contiguous().view(-1).view(torch.uint8)
        if len(flat):
            # from a GPU straight to where it stays
            torch.frombuffer(self._data.getbuffer(), dtype=torch.uint8, count=len(flat), offset=first).copy_(flat)
        self._data.seek(first + len(flat))

    def content(self) -> bytes:
        """Returns the complete file."""
        content = self._data.getvalue()
        assert self._data.tell() == len(content), "all tensors are written"
        return content
