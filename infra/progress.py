"""What is going on, said once and shown by whoever listens: the terminal, Prefect's pages, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A line that people should read."""

    text: str


@dataclass(frozen=True)
class StageProgress:
    """A stage has committed `done` of `total` shards."""

    iteration: int
    stage: str
    done: int
    total: int
    metrics: Mapping[str, float] | None = None
    """Its metrics, once all of it is committed."""


@dataclass(frozen=True)
class StepProgress:
    """Something that is no stage, such as a fit or a check, has done so many steps."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class ReplayProgress:
    """A committed update is computed again, on the way to the role's version `total`."""

    role: str
    done: int
    total: int


@dataclass(frozen=True)
class IterationClosed:
    iteration: int
    metrics: Mapping[str, float]


Event = Note | StageProgress | StepProgress | ReplayProgress | IterationClosed
Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def report(event: Event) -> None:
    """Tell every listener."""
    for listener in _listeners:
        listener(event)


def note(text: str) -> None:
    """Tell every listener a line that people should read."""
    report(Note(text))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
