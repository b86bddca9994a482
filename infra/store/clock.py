"""The time of day and the birth time of processes, unaffected when someone sets the machine's clock."""

from __future__ import annotations

import time

import psutil

_STARTED = time.time() - time.monotonic()


def now() -> float:
    """Returns the seconds since 1970 by a monotonic clock, which stops while the machine sleeps."""
    return _STARTED + time.monotonic()


def born(process: psutil.Process) -> float:
    """Returns the seconds from the machine's boot to the start of a process. Raises `psutil.NoSuchProcess` if it has
    ended."""
    # both are computed from the clock, so only their difference survives when the clock is set
    return float(process.create_time() - psutil.boot_time())


def is_same(process: psutil.Process, born_at: float) -> bool:
    """True if a process with a recorded pid is still the one that was `born_at`, and is running (not a zombie).

    Raises `psutil.NoSuchProcess` if it has ended.
    """
    return abs(born(process) - born_at) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
