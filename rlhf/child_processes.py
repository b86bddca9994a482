"""Ends a child process with its own children, and waits until their memory is free.

A killed process releases its memory while it ends, which takes seconds with many gigabytes or a GPU, and longer if a
driver holds it up. Waiting for a process says nothing about its children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil

END_S = 60.0
"""Seconds in which killed processes must end: one in an uninterruptible system call ends only when that returns."""


def end(leader: subprocess.Popen[bytes], also: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Kills a process and the members of its process group, and waits until they have ended.

    Args:
        leader: the process; it leads its process group, or is about to. It may have ended.

    Returns:
        The processes that did not end within `END_S`, which also raises a warning.
    """
    with suppress(ProcessLookupError):  # it ended before it had a group, or the whole group has ended
        os.killpg(leader.pid, signal.SIGKILL)
    leader.kill()
    killed = [*also, *_of_group(leader.pid)]
    for process in killed:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline, pause_s = time.monotonic() + END_S, 0.001
    while (left := remaining(killed)) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    with suppress(subprocess.TimeoutExpired):
        leader.wait(max(0.0, deadline - time.monotonic()))
    if left:
        warnings.warn(f"killed {END_S:.0f} s ago, and still there: {described(left)}", RuntimeWarning, stacklevel=2)
    return left


def remaining(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns the processes that have not ended, and so may hold memory."""
    return [process for process in processes if not _has_ended(process)]


def described(processes: Iterable[psutil.Process]) -> str:
    """Names processes for people, with their states."""
    return ", ".join(_described(process) for process in processes)


def _of_group(group: int) -> Iterator[psutil.Process]:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:  # nobody is left, the usual case: looking at every process would take milliseconds
        return
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getpgid(pid) == group:
                yield psutil.Process(pid)


def _has_ended(process: psutil.Process) -> bool:
    """Returns True if a process has ended: a zombie has no memory once its last thread has ended."""
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return True


def _described(process: psutil.Process) -> str:
    try:
        state = "an uninterruptible system call" if process.status() == psutil.STATUS_DISK_SLEEP else process.status()
        return f"{process.name()} (process {process.pid}, {state})"
    except psutil.NoSuchProcess:
        return f"process {process.pid}"
