"""Progress events, reported once and shown by each listener, such as the terminal or Prefect's pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A message for the user."""

    text: str


@dataclass(frozen=True)
class StageProgress:
    """A stage has committed `done` of its `total` shards."""

    iteration: int
    stage: str
    done: int
    total: int
    metrics: Mapping[str, float] | None = None
    """The stage's metrics, once it is complete."""
    in_flight: int | None = None
    """Number of trajectories that the rollout is generating; None: the stage does not generate."""


@dataclass(frozen=True)
class StepProgress:
    """Work outside stages, such as a fit or a check, has done `done` of its `total` steps."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class ReplayProgress:
    """A replay has recomputed a committed update, on the way to the role's version `total`."""

    role: str
    done: int
    total: int


@dataclass(frozen=True)
class IterationClosed:
    """An iteration is complete."""

    iteration: int
    metrics: Mapping[str, float]


Event = Note | StageProgress | StepProgress | ReplayProgress | IterationClosed
Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def report(event: Event) -> None:
    """Send an event to every listener."""
    for listener in _listeners:
        listener(event)


def note(text: str) -> None:
    """Send a message for the user to every listener."""
    report(Note(text))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send events to `listener` during the `with` statement."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
