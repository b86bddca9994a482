"""Checks the modes of files and folders that users get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOR_GROUP = 0o027


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def for_group() -> None:
    """The `setup` of a child whose new files are also readable by the user's group, and by nobody else."""
    os.umask(FOR_GROUP)


def others(folder: Path, mask: int) -> dict[str, str]:
    """Returns the files in a folder with another mode than new files and folders have under this umask."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode & 0o777
        if mode != (0o777 if path.is_dir() else 0o666) & ~mask:
            found[path.relative_to(folder).as_posix()] = oct(mode)
    return found
