"""Prefect only watches: a computation runs once, and its end is what counts, whatever Prefect says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prefect.exceptions import Abort, PrefectHTTPStatusError

from ratchet.infra.execution.stopping import Stopped
from ratchet.infra.store.object_store import StoreUnavailable
from ratchet.rlhf.errors import NotFinite
from ratchet.tasks import recording
from ratchet.tasks.recording import noted, recorded

AWAY = [
    httpx.ConnectError("nobody listens"),
    httpx.ReadTimeout("no answer"),
    PrefectHTTPStatusError("503", request=httpx.Request("GET", "http://x"), response=httpx.Response(503)),
    Abort("this run has already made this state transition"),
    AttributeError("'NoneType' object has no attribute 'state'"),  # the server says null
    RuntimeError("Found incompatible versions"),
    ValueError("Expecting value: line 1 column 1"),
]
"""What Prefect raises where its server fails."""


class Body:
    """What is computed: how often it ran, and how it ends."""

    def __init__(self, error: BaseException | None = None, seconds: float = 0.0) -> None:
        self.runs, self.error, self.seconds = 0, error, seconds

    def __call__(self) -> str:
        self.runs += 1
        clock.now += self.seconds
        if self.error is not None:
            raise self.error
        return "done"


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


clock = Clock()


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has answered so far."""
    monkeypatch.setattr(recording, "time", clock)
    monkeypatch.setattr(recording._Server, "answers", True)
    monkeypatch.setattr(recording._Server, "asked_again", 0.0)
    clock.now = 0.0


def prefect(body: Callable[[], Any], before: BaseException | None = None, after: BaseException | None = None) -> Any:
    """As Prefect calls a flow's body, and fails before or after it."""

    def record() -> Any:
        if before is not None:
            raise before
        try:
            return noted(body)()
        finally:
            if after is not None:
                raise after

    return record


@pytest.mark.parametrize("error", AWAY, ids=lambda error: type(error).__name__)
def test_a_server_that_fails_before_or_after_changes_nothing(error: BaseException) -> None:
    for failure in ({"before": error}, {"after": error}, {}):
        body = Body()
        recording._Server.asked_again = 0.0
        assert recorded(prefect(body, **failure), body) == "done"
        assert body.runs == 1, failure


@pytest.mark.parametrize("end", [NotFinite("a loss"), Stopped("as asked"), StoreUnavailable("away"), KeyError("a bug")])
@pytest.mark.parametrize("error", [None, *AWAY], ids=lambda error: type(error).__name__)
def test_how_the_computation_ended_is_what_counts(end: BaseException, error: BaseException | None) -> None:
    """A driver that was stopped, fenced or told of a bad loss does not begin again because Prefect was not told."""
    body = Body(end)
    with pytest.raises(type(end)) as raised:
        recorded(prefect(body, after=error), body)
    assert raised.value is end
    assert body.runs == 1


def test_a_stop_between_prefect_and_the_computation_stops() -> None:
    body = Body()
    with pytest.raises(Stopped):
        recorded(prefect(body, before=Stopped("as asked")), body)
    with pytest.raises(KeyboardInterrupt):
        recorded(prefect(body, after=KeyboardInterrupt()), body)
    assert body.runs == 1


def test_what_a_computation_calls_has_an_end_of_its_own() -> None:
    inner = Body(NotFinite("a loss"))

    def outer() -> str:
        with pytest.raises(NotFinite):
            recorded(prefect(inner), inner)
        return "went on"

    assert recorded(prefect(outer, after=AWAY[0]), outer) == "went on"
    assert inner.runs == 1


def test_a_server_that_fails_is_asked_again_in_proportion_to_what_it_cost() -> None:
    """Not to what the computation took; and never later than some minutes."""

    def slow() -> None:
        clock.now += 6.0
        raise AWAY[0]

    hour = Body(seconds=3600.0)

    def after_an_hour() -> str:
        noted(hour)()
        clock.now += 6.0
        raise AWAY[0]

    recorded(after_an_hour, hour)
    assert recording._Server.asked_again == clock.now + 60.0
    clock.now += 61.0
    record = prefect(body := Body())
    assert recorded(record, body) == "done"
    assert recording._Server.answers
    clock.now += 61.0

    def hangs() -> str:
        clock.now += 600.0
        raise AWAY[1]

    recorded(hangs, Body())
    assert recording._Server.asked_again == clock.now + recording.LONGEST_PAUSE_S
