"""Writing a policy's weights to files for an engine in another process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FILE_BYTES = 2**30


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path, stem: str) -> int:
    """Write weights as safetensors files of about `FILE_BYTES`, so that this process never holds a full copy.

    Args:
        weights: tensors by name, consumed one at a time.
        folder: an existing folder.
        stem: start of the file names: ``stem.safetensors``, or ``stem-00000.safetensors`` and so on.

    Returns:
        Bytes of the tensors.
    """
    from safetensors.torch import save_file

    part: dict[str, Tensor] = {}
    parts, size, written = 0, 0, 0
    for name, tensor in weights:
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()  # the next one may take its memory
        size += part[name].nbytes
        written += part[name].nbytes
        if size >= FILE_BYTES:
            save_file(part, folder / f"{stem}-{parts:05d}.safetensors", metadata={"format": "pt"})
            part, parts, size = {}, parts + 1, 0
    name = f"{stem}.safetensors" if parts == 0 else f"{stem}-{parts:05d}.safetensors"
    if part:
        save_file(part, folder / name, metadata={"format": "pt"})
    return written
