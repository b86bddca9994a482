"""Runs commands of sandboxes on this machine, within limits of the system: by bubblewrap, or with the limits alone.

bubblewrap gives a command the system read-only, the sandbox's folders, and neither network nor other processes.
`Limited` gives it the limits and a folder of its own: it may do what the user may.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO

from ratchet.rlhf import child_processes
from ratchet.rlhf.errors import UserError, in_one_line
from ratchet.rlhf.sandboxes.sandbox import Finished, Limits, Sandbox, SandboxFailed, written

START_S = 2.0
"""Seconds for a sandbox to start."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
"""What programs of the machine need."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The shell counts files in blocks of 512 bytes, memory in KiB; dash names the number of processes -p, bash -u.
_LIMIT = (
    'ulimit -c 0; ulimit -t "$1"; ulimit -v "$2"; ulimit -f "$3"; ulimit -n "$5"; '
    '{ ulimit -u "$4" || ulimit -p "$4"; } 2> /dev/null; shift 5; exec "$@"'
)
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""PR_SET_PDEATHSIG: who would end the command may be killed."""


def check_bubblewrap(key: str, otherwise: str = "") -> None:
    """Raises UserError if bubblewrap is missing, or the system does not let it work.

    Args:
        key: what needs it, for the error.
        otherwise: another way out, for the error.
    """
    if shutil.which("bwrap") is None:
        raise UserError(
            f"{key} runs programs in bubblewrap, and there is no bwrap here: install bubblewrap"
            + (f", or, {otherwise}" if otherwise else "")
        )
    if reason := _refusal():
        raise UserError(
            f"{key} runs programs in bubblewrap, which does not work here ({reason}): allow user namespaces"
            + (f", or, {otherwise}" if otherwise else "")
        )


@cache
def _refusal() -> str:
    """Runs a command in bubblewrap; returns its error, or nothing."""
    tried = Bubblewrap(["/work"], Limits())
    tried.start({})
    try:
        done = tried.exec(["true"], seconds=60.0)
    finally:
        tried.stop()
    return "" if done.code == 0 else in_one_line(done.errors.decode(errors="replace")) or f"exit code {done.code}"


class Limited(Sandbox):
    """Limits, and a folder that is removed."""

    def __init__(self, folders: Sequence[str], limits: Limits, env: Mapping[str, str] | None = None) -> None:
        """Describes a sandbox; `start` makes it.

        Args:
            folders: absolute paths of the folders that commands may change; commands begin in the first.
            env: environment variables of all commands.
        """
        self.folders = _without_inner(folders)
        self._begin, self._limits = folders[0], limits
        self._env = {"PATH": PATH, "LANG": "C.UTF-8", **(env or {})}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def root(self) -> Path:
        """The folder of the machine that holds the sandbox's folders. Raises SandboxFailed if it is not started."""
        if self._temporary is None:
            raise SandboxFailed("the sandbox is not started: call start or restore")
        return Path(self._temporary.name)

    def start(self, files: Mapping[str, bytes]) -> None:
        """See `Sandbox.start`."""
        self.stop()
        self._temporary = tempfile.TemporaryDirectory(prefix="ratchet-sandbox-")
        written(self.root, (*self.folders, self._begin), files)

    def exec(
        self,
        command: Sequence[str],
        stdin: bytes = b"",
        *,
        seconds: float,
        env: Mapping[str, str] | None = None,
        most: int | None = None,
    ) -> Finished:
        """See `Sandbox.exec`. The limit of time also counts the processor's seconds of each process."""
        limits = self._limits
        numbers = (math.ceil(seconds), limits.memory_mb << 10, limits.file_bytes >> 9, limits.processes)
        limited = ["/bin/sh", "-c", _LIMIT, "sh", *map(str, (*numbers, limits.open_files)), *command]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                self._confined(limited),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                cwd=self.root / self._begin.lstrip("/"),
                env={"HOME": self.where(self.folders[0]), **self._env, **(env or {})},
                start_new_session=True,
            )
            try:
                process.communicate(stdin, timeout=seconds + START_S)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                code = None
            finally:
                child_processes.end(process)
            return Finished(code, _read(output, most), _read(errors, most))

    def stop(self) -> None:
        """See `Sandbox.stop`."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def where(self, path: str) -> str:
        """See `Sandbox.where`."""
        return str(self.root / path.lstrip("/"))

    def _confined(self, command: Sequence[str]) -> list[str]:
        """Returns the command that runs a command in the sandbox."""
        return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, *command]


class Bubblewrap(Limited):
    """bubblewrap: the system read-only, the folders, no network, no view of other processes."""

    def __init__(
        self,
        folders: Sequence[str],
        limits: Limits,
        env: Mapping[str, str] | None = None,
        shown: Sequence[str] = (),
    ) -> None:
        """See `Limited`. `shown` are more paths of the machine that commands may read."""
        super().__init__(folders, limits, env)
        self._shown = tuple(dict.fromkeys((*SYSTEM, *shown)))

    def start(self, files: Mapping[str, bytes]) -> None:
        """See `Sandbox.start`."""
        super().start({**files, "/etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "/etc/group": b"root:x:0:\n"})

    def where(self, path: str) -> str:
        """See `Sandbox.where`."""
        return path

    def _confined(self, command: Sequence[str]) -> list[str]:
        shown = [part for path in self._shown for part in ("--ro-bind-try", path, path)]
        own = [
            part for name in ("passwd", "group") for part in ("--ro-bind", f"{self.root}/etc/{name}", f"/etc/{name}")
        ]
        folders = [part for path in self.folders for part in ("--bind", f"{self.root}{path}", path)]
        return [
            "bwrap",
            "--unshare-all",
            # root inside, so that programs that ask for it run; as root, a user namespace is not always to be had
            *(("--uid", "0", "--gid", "0") if os.getuid() else ()),
            "--die-with-parent",
            "--new-session",
            *("--cap-drop", "ALL"),
            *("--tmpfs", "/tmp"),  # before the paths that may lie in it
            *shown,
            *own,
            *("--proc", "/proc"),
            *("--dev", "/dev"),
            *folders,
            *("--remount-ro", "/"),  # what is written there would vanish with the command
            *("--chdir", self._begin),
            "--",
            *command,
        ]


def _read(file: IO[bytes], most: int | None) -> bytes:
    """Reads a file; with `most`, its beginning and its end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if most is None or size <= most:
        return file.read()
    beginning = file.read(most // 2)
    file.seek(size - most // 2)
    return b"%s\n[%d bytes are left out]\n%s" % (beginning, size - 2 * (most // 2), file.read(most // 2))


def _without_inner(folders: Sequence[str]) -> tuple[str, ...]:
    """Leaves out folders that lie in others."""
    paths = [PurePosixPath(folder) for folder in folders]
    return tuple(str(path) for path in dict.fromkeys(paths) if not any(parent in paths for parent in path.parents))
