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
    """The number of shards that a stage has committed."""

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
    """Progress outside stages, such as that of a fine-tuning run or a check."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class ReplayProgress:
    """Progress of replaying committed updates, up to the role's version `total`."""

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
    """Sends an event to every listener."""
    for listener in _listeners:
        listener(event)


def note(text: str) -> None:
    """Sends a message for the user to every listener."""
    report(Note(text))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Sends events to `listener` during the `with` statement."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
