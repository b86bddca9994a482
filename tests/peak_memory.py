"""Measures the peak memory of a run of the tests, over all its processes."""

from __future__ import annotations

import threading

import psutil

INTERVAL_S = 0.5


class PeakMemory:
    """Watches the memory of this machine in use beyond that at the start."""

    def __init__(self) -> None:
        """Start watching."""
        self.bytes = 0
        self._before = _in_use()
        self._end = threading.Event()
        threading.Thread(target=self._watch, name="peak memory", daemon=True).start()

    def _watch(self) -> None:
        while not self._end.wait(INTERVAL_S):
            self.bytes = max(self.bytes, _in_use() - self._before)

    def end(self) -> str:
        """Stops watching; returns a description of the peak."""
        self._end.set()
        return f"at most {self.bytes / 2**30:.1f} GiB of memory beyond the {self._before / 2**30:.1f} GiB in use before"


def _in_use() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)
