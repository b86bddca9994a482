"""What is going on, said once and shown by whoever listens: the terminal, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Listener = Callable[[str, dict[str, Any]], None]
_listeners: list[Listener] = []


def report(event: str, **details: Any) -> None:
    """Tell every listener. Events: `note` (text), `stage` (iteration, stage, done, total, and its metrics
    once it is committed), `closed`
    (iteration, metrics), `replay` (role, done, total)."""
    for listener in _listeners:
        listener(event, details)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
