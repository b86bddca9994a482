"""Prefect only watches: what its server does not record is computed and committed all the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from json import JSONDecodeError
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency._asyncio import ConcurrencySlotAcquisitionError
from prefect.exceptions import Abort, PrefectException
from prefect.runtime import task_run
from prefect.tasks import Task
from pydantic import ValidationError
from tenacity import Retrying, retry_if_exception, stop_after_attempt

from infra.driver import Driver
from infra.objects import StoreFull, StoreUnavailable
from infra.progress import report
from infra.store import MAX_ATTEMPTS
from infra.workers.ray_group import GroupLost
from rlhf.errors import EngineLost

P = ParamSpec("P")
R = TypeVar("R")

PREFECTS = (Abort, PrefectException, ConcurrencySlotAcquisitionError, httpx.HTTPError, JSONDecodeError, ValidationError)
"""Errors of Prefect, or of what it talks to its server with. (`Abort` also follows from an answer that was lost: the
server refuses to record a state twice.)"""

UNREACHED = ("Failed to reach API", "Timed out while attempting to connect")
"""How the messages of those begin that Prefect raises as plain `RuntimeError`."""

PAUSE = 10
"""A server that failed is asked again after so many times the time that it took to fail: a tenth is lost at most."""


WAITS_S = (1, 5, 20)
"""Before each further try of a task."""

assert 2 * (1 + len(WAITS_S)) <= MAX_ATTEMPTS  # score is also tried from within generate, by dynamic sampling


class _Server:
    answers = True
    asked_again = 0.0


def recorded(record: Callable[[], R], compute: Callable[[], R]) -> R:
    """What `record` returns, which asks Prefect to run something and to record it; where Prefect fails, what `compute`
    returns: the same, without Prefect. Both skip what is committed, so that nothing is computed twice.

    Errors of the computation itself pass.
    """
    began = time.monotonic()
    if began < _Server.asked_again:
        return compute()
    try:
        result = record()
    except BaseException as error:
        if not _is_prefects(error):
            raise
        now = time.monotonic()
        _Server.asked_again = now + PAUSE * (now - began)
        if _Server.answers:
            _Server.answers = False
            report(
                "note", text=f"Prefect does not record what follows, and the run continues without it: {_line(error)}"
            )
    else:
        if not _Server.answers:
            _Server.answers = True
            report("note", text="Prefect records again")
        return result
    return compute()


def _is_prefects(error: BaseException) -> bool:
    unreached = isinstance(error, RuntimeError) and str(error).startswith(UNREACHED)
    return unreached or isinstance(error, PREFECTS)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def recorded_task(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A part of an iteration as a Prefect task, which is tried again where that may help, and is computed without
    Prefect where Prefect fails. The function's first parameter is `iteration`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        as_task = task(
            name=name,
            task_run_name=lambda: (
                f"{Driver.current().config.run.name} · it {task_run.parameters['iteration']} · {name}"
            ),
            retries=len(WAITS_S),
            retry_delay_seconds=list(WAITS_S),
            retry_condition_fn=_can_pass,
            persist_result=False,
            cache_policy=NO_CACHE,
        )(function)
        tries = Retrying(
            retry=retry_if_exception(_passes),
            wait=lambda tried: WAITS_S[tried.attempt_number - 1],
            stop=stop_after_attempt(1 + len(WAITS_S)),
            before_sleep=lambda tried: _say(name, tried.outcome.exception() if tried.outcome else None),
            reraise=True,
        )

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return recorded(lambda: as_task(*args, **kwargs), lambda: tries.copy()(function, *args, **kwargs))

        return run

    return decorate


def _can_pass(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    if passes := _passes(error):
        _say(task.name, error)
    return passes


def _passes(error: BaseException) -> bool:
    """Only what may pass is tried again: a store that did not answer, a worker that died; never a bad loss."""
    return isinstance(error, (StoreUnavailable, GroupLost, EngineLost)) and not isinstance(error, StoreFull)


def _say(name: str, error: BaseException | None) -> None:
    report("note", text=f"{error}; {name} is tried again")
