"""Stops a driver on request: between two commits if that takes at most `GRACE_S`, otherwise at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Literal

from ratchet.infra.progress import note
from ratchet.rlhf.errors import RatchetError

GRACE_S = 15.0
"""Seconds from a stop request until running work is abandoned, which is safe: uncommitted work never counts."""


class Stopped(RatchetError):
    """The driver stopped between two commits, on request."""

    @classmethod
    def as_asked(cls, resume_command: str) -> Stopped:
        """Makes the error of a requested stop, which names the command that resumes."""
        return cls(f"stopped; {resume_command} continues from the last commit")


class Stopping:
    """Requests to stop a driver, which the driver checks between commits."""

    def __init__(self, resume_command: str) -> None:
        """Takes the command that resumes, for the message to the user."""
        self._why: RatchetError = Stopped.as_asked(resume_command)
        self._asked = False
        # its `put` is reentrant, so a signal handler may call it
        self._requests = SimpleQueue[Literal["soon", "at once", "ended"]]()

    def request(self, signum: int | None = None, _: FrameType | None = None) -> None:
        """Stops at the next `check`. Abandons running, uncommitted work after `GRACE_S`, or at once on Ctrl-C."""
        # A signal handler may interrupt any line of the main thread, even an import or one that holds a lock. So this
        # only queues; `watching` acts in another thread.
        if signum is not None:
            signal.alarm(0)  # of Ray's handler, which calls this one: it would abort the process 3 s later
        self._asked = True
        # at once on Ctrl-C, because the terminal also interrupts the temporary Prefect server
        self._requests.put("at once" if signum == signal.SIGINT else "soon")

    def fail(self, error: RatchetError) -> None:
        """Stops as if requested, but raises `error`."""
        self._why = error
        self.request()

    def check(self) -> None:
        """Raises `Stopped`, or the error given to `fail`, if a stop was requested."""
        if self._asked:
            raise self._why

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handles SIGTERM and Ctrl-C, and requests of other threads, during the `with` statement."""
        watcher = threading.Thread(target=self._watch, name="stopping", daemon=True)
        watcher.start()
        try:
            with on_signals(self.request):
                yield
        finally:
            self._requests.put("ended")
            watcher.join()

    def _watch(self) -> None:
        deadline: float | None = None
        while True:
            try:
                asked = self._requests.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except Empty:
                asked = "at once"
            if asked == "ended":
                return
            if asked == "at once":
                self._abandon()
            if deadline is None:
                note(f"stopping after the current work, or in {GRACE_S:.0f} s")
                deadline = time.monotonic() + GRACE_S

    def _abandon(self) -> None:
        print(f"{self._why} (uncommitted work is abandoned)", file=sys.stderr, flush=True)
        # `sys.exit` would end only this thread
        os._exit(1)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles SIGTERM and Ctrl-C with `handler` during the `with` statement.

    Prefect installs its own handler in every flow, which would interrupt a stage at any line; each flow's body uses
    this to install ours again.
    """
    # only the main thread may set signal handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former_handlers = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, former in former_handlers.items():
            signal.signal(number, former)
