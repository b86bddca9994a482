"""The time of day and the birth time of processes, unaffected when someone sets the machine's clock."""

from __future__ import annotations

import time

import psutil

_STARTED = time.time() - time.monotonic()


def now() -> float:
    """Tell the time by a monotonic clock, which stops while the machine sleeps.

    Returns:
        Seconds since 1970.
    """
    return _STARTED + time.monotonic()


def born(process: psutil.Process) -> float:
    """Tell when a process started, relative to the machine's boot.

    The operating system computes the start's time of day from the clock, so that time would change when the clock is
    set.

    Args:
        process: the process.

    Returns:
        Seconds from the machine's boot to the start of the process.

    Raises:
        psutil.NoSuchProcess: the process has ended.
    """
    return float(process.create_time() - psutil.boot_time())


def is_same(process: psutil.Process, born_at: float) -> bool:
    """Tell whether a process with a recorded pid is still the one that was recorded, and is running.

    Args:
        process: the process that has this pid now.
        born_at: what `born` gave for the recorded process, in seconds.

    Returns:
        Whether it is the same process; False for a zombie.

    Raises:
        psutil.NoSuchProcess: the process has ended.
    """
    return abs(born(process) - born_at) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
