"""The interface of sandboxes: start, exec, upload, download, snapshot, restore, stop.

Nothing runs in a sandbox between two commands, so its files are all of its state. Files go in and out by commands that
run inside, because a link that the policy has made may point to any file of the machine.
"""

from __future__ import annotations

import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ratchet.rlhf.errors import RatchetError, in_one_line

COPY_S = 120.0
"""Seconds for a copy of files into a sandbox or out of it."""


class SandboxFailed(RatchetError):
    """A sandbox could not be started, or files could not be copied."""


@dataclass(frozen=True)
class Limits:
    """Limits of each command."""

    memory_mb: int = 1024
    """Memory of each process."""
    file_bytes: int = 1 << 30
    """Size of each file, and of the output."""
    processes: int = 256
    """Processes of the user; the system enforces no such limit for root."""
    open_files: int = 1024


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int | None
    """Exit code; None if time ran out."""
    output: bytes
    """What it wrote to standard output."""
    errors: bytes
    """What it wrote to standard error."""


class Sandbox(ABC):
    """A place for commands. One thread at a time uses it."""

    folders: tuple[str, ...]
    """The folders that commands may change, by absolute paths; all else is read-only, or vanishes with a command."""

    @abstractmethod
    def start(self, files: Mapping[str, bytes]) -> None:
        """Makes the folders, with these files in them. Raises SandboxFailed."""

    @abstractmethod
    def exec(
        self,
        command: Sequence[str],
        stdin: bytes = b"",
        *,
        seconds: float,
        env: Mapping[str, str] | None = None,
        most: int | None = None,
    ) -> Finished:
        """Runs a command in the first folder, and ends all of its processes.

        Args:
            seconds: time limit.
            env: environment variables beside the sandbox's own.
            most: number of bytes of the output, and of the errors, to return; the middle of more is left out, and said
                to be. None: all.
        """

    @abstractmethod
    def stop(self) -> None:
        """Removes the folders. Does nothing if it is not started."""

    def where(self, path: str) -> str:
        """Returns the path by which commands find a path of `folders`."""
        return path

    def upload(self, source: Path, target: str) -> None:
        """Copies a file, or what a folder contains, to a path inside. Raises SandboxFailed."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(source, "." if source.is_dir() else PurePosixPath(target).name, filter=_as_root)
        folder = self.where(target if source.is_dir() else str(PurePosixPath(target).parent))
        self._copied(["mkdir", "-p", "--", folder])
        self._copied(["tar", "-x", "--no-same-owner", "-C", folder], packed.getvalue())

    def download(self, path: str) -> bytes | None:
        """Returns the content of a file; None if there is no such file."""
        read = self.exec(["cat", "--", self.where(path)], seconds=COPY_S)
        return read.output if read.code == 0 else None

    def snapshot(self) -> bytes:
        """Returns the files of all folders, as a compressed tar. Raises SandboxFailed."""
        names = [folder.lstrip("/") for folder in self.folders]
        pack = ["tar", "-cz", "-C", self.where("/"), "--", *names]
        packed = self.exec(pack, seconds=COPY_S)
        if packed.code != 0:  # the policy may have forbidden itself to read a file
            self.exec(["chmod", "-R", "u+rwX", "--", *map(self.where, self.folders)], seconds=COPY_S)
            return self._copied(pack)
        return packed.output

    def restore(self, state: bytes) -> None:
        """Starts with the files of a snapshot. Raises SandboxFailed."""
        self.start({})
        self._copied(["tar", "-xz", "--no-same-owner", "-p", "-C", self.where("/")], state)

    def _copied(self, command: Sequence[str], stdin: bytes = b"") -> bytes:
        done = self.exec(command, stdin, seconds=COPY_S)
        if done.code != 0:
            reason = "time ran out" if done.code is None else in_one_line(done.errors.decode(errors="replace")[-300:])
            raise SandboxFailed(f"{' '.join(command)[:100]} failed in the sandbox: {reason}")
        return done.output


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Drops what a file's copy should not depend on: who owns the original."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def written(root: Path, folders: Sequence[str], files: Mapping[str, bytes]) -> None:
    """Makes the folders of a sandbox below `root`, before any command has run."""
    for folder in folders:
        (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
