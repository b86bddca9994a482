"""Asked to stop: between two commits if it does not take long, and otherwise in the middle of what is not committed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from infra.progress import note
from rlhf.errors import RatchetError

GRACE_S = 15.0
"""After a request to stop, what has not ended by then is abandoned; it was never going to half-commit."""


class Stopped(RatchetError):
    """The driver was asked to stop, and did so between two commits."""

    @classmethod
    def as_asked(cls, goes_on: str) -> Stopped:
        return cls(f"stopped as asked; {goes_on} goes on from the last commit")


class Stopping:
    def __init__(self, goes_on: str) -> None:
        """`goes_on`: what a person does to resume, such as a command."""
        self._why: RatchetError = Stopped.as_asked(goes_on)
        self._asked = threading.Event()
        self._grace: threading.Timer | None = None

    def request(self, signum: int | None = None, _: Any = None) -> None:
        """Stop at the next `check`; after `GRACE_S`, or at once for Ctrl-C (which a terminal also sends to the
        temporary Prefect server), abandon what is computing: nothing of it is committed."""
        if signum == signal.SIGINT:
            self._abandon()
        if self._asked.is_set():
            return
        self._asked.set()
        note(f"stopping: finishing what is at hand (at most {GRACE_S:.0f} s)")
        self._grace = threading.Timer(GRACE_S, self._abandon)
        self._grace.daemon = True
        self._grace.start()

    def fail(self, error: RatchetError) -> None:
        """Stop as if asked, with another reason."""
        self._why = error
        self.request()

    def check(self) -> None:
        if self._asked.is_set():
            raise self._why

    def forget(self) -> None:
        """It has ended in time: its process, which may have other things to do, lives on."""
        if self._grace is not None:
            self._grace.cancel()

    def _abandon(self) -> None:
        print(f"{self._why} (what was being computed is abandoned)", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGTERM and Ctrl-C with `handler`. Prefect installs a handler of its own in every flow, which would cut a
    stage at any line: a flow's body puts ours back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
