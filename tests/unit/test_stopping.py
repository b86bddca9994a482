"""A stop request may interrupt any line of the main thread."""

from __future__ import annotations

import signal
import threading

import pytest

from ratchet.infra.execution.stopping import Stopped, Stopping
from ratchet.infra.progress import Event, Note, listening


def test_a_signal_may_come_while_what_it_reports_is_being_printed() -> None:
    """As one that comes while the main thread prints, or imports what prints: neither can be entered again."""
    printing, noted = threading.Lock(), threading.Event()

    def printed(event: Event) -> None:
        with printing:
            assert isinstance(event, Note)
            assert event.text.startswith("stopping after the current work")
            noted.set()

    stopping = Stopping("`ratchet resume run`")
    with listening(printed):
        with stopping.watching():
            with printing:
                signal.raise_signal(signal.SIGTERM)
                assert not noted.is_set()
            with pytest.raises(Stopped, match="stopped; `ratchet resume run` continues"):
                stopping.check()
        assert noted.is_set(), "the message comes before the driver ends"
