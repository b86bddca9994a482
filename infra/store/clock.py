"""The time of day and the birth time of processes, unaffected when someone sets the machine's clock."""

from __future__ import annotations

import time

import psutil

_STARTED = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970, measured by a monotonic clock, which stops while the machine sleeps."""
    return _STARTED + time.monotonic()


def born(process: psutil.Process) -> float:
    """Seconds from the machine's boot to the start of the process. (The operating system computes the start's time of
    day from the clock, so that time would change when the clock is set.)"""
    return float(process.create_time() - psutil.boot_time())


def is_same(process: psutil.Process, born_at: float) -> bool:
    """Whether a process with a recorded pid is still the one that was born at `born_at`, and is running."""
    return abs(born(process) - born_at) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
