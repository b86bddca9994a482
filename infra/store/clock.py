"""The time of day as this process found it, and the age of processes: neither moves when a machine's clock is set."""

from __future__ import annotations

import time

import psutil

_STARTED = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch, by a clock that nobody sets (and that stands still while the machine sleeps)."""
    return _STARTED + time.monotonic()


def born(process: psutil.Process) -> float:
    """Seconds from the machine's start to the process's. The time of day at which it started would move with the clock,
    from which the system calculates it."""
    return float(process.create_time() - psutil.boot_time())


def is_same(process: psutil.Process, born_at: float) -> bool:
    """Whether this is the process that had the number then, and it still runs."""
    return abs(born(process) - born_at) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
