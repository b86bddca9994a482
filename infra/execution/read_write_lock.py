"""A readers-writer lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadWriteLock:
    """A lock that many readers share, or one writer holds alone. Waiting writers take precedence over new readers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers = 0
        self._is_written = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Holds the lock together with other readers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writers)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the lock alone."""
        with self._changed:
            # before the wait: a writer that waits keeps new readers out
            self._writers += 1
            self._changed.wait_for(lambda: not self._readers and not self._is_written)
            self._is_written = True
        try:
            yield
        finally:
            with self._changed:
                self._writers -= 1
                self._is_written = False
                self._changed.notify_all()
