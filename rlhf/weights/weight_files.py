"""Writing weights to files for people, and for an engine in another process."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FILE_BYTES = 2**30


def save_file(weights: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the mode that the umask gives to new files.

    Args:
        weights: contiguous tensors on the CPU, by name.
        path: the file; one that is there is replaced.
    """
    from safetensors import torch

    torch.save_file(weights, path, metadata={"format": "pt"})
    as_umask_says(path)


def as_umask_says(path: Path) -> None:
    """Give a file the mode of a new one; safetensors writes files that only their owner can read."""
    new = path.with_name(f".{uuid.uuid4().hex}")
    new.touch()
    shutil.copymode(new, path)
    new.unlink()


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path, stem: str) -> int:
    """Write weights as safetensors files of about `FILE_BYTES`, so that this process never holds a full copy.

    Args:
        weights: tensors by name, consumed one at a time.
        folder: an existing folder.
        stem: start of the file names: ``stem.safetensors``, or ``stem-00000.safetensors`` and so on.

    Returns:
        Bytes of the tensors.
    """
    part: dict[str, Tensor] = {}
    parts, size, written = 0, 0, 0
    for name, tensor in weights:
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()  # the next one may take its memory
        size += part[name].nbytes
        written += part[name].nbytes
        if size >= FILE_BYTES:
            save_file(part, folder / f"{stem}-{parts:05d}.safetensors")
            part, parts, size = {}, parts + 1, 0
    name = f"{stem}.safetensors" if parts == 0 else f"{stem}-{parts:05d}.safetensors"
    if part:
        save_file(part, folder / name)
    return written
