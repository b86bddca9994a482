"""Writes weights to files, for people and for engines in other processes."""

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
    """Writes a safetensors file with the mode that the umask gives to new files; replaces an existing one.

    `weights` are contiguous tensors on the CPU.
    """
    from safetensors import torch

    torch.save_file(weights, path, metadata={"format": "pt"})
    as_umask_says(path)


def as_umask_says(path: Path) -> None:
    """Gives a file the mode of a new one; safetensors writes files that only their owner can read."""
    new = path.with_name(f".{uuid.uuid4().hex}")
    new.touch()
    shutil.copymode(new, path)
    new.unlink()


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path, stem: str) -> int:
    """Writes weights, consumed one at a time, as safetensors files of about `FILE_BYTES`, so that this process never
    holds a full copy; returns the number of bytes.

    Args:
        stem: start of the file names: ``stem.safetensors``, or ``stem-00000.safetensors`` and so on.
    """
    part: dict[str, Tensor] = {}
    parts, size, written = 0, 0, 0
    for name, tensor in weights:
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()  # the next tensor may reuse its memory
        size += part[name].nbytes
        written += part[name].nbytes
        if size >= FILE_BYTES:
            save_file(part, folder / f"{stem}-{parts:05d}.safetensors")
            part, parts, size = {}, parts + 1, 0
    name = f"{stem}.safetensors" if parts == 0 else f"{stem}-{parts:05d}.safetensors"
    if part:
        save_file(part, folder / name)
    return written
