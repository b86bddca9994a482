"""Records flows and tasks in Prefect, which only observes: a run commits its stages even if its server fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Generic, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import Abort
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_chain, wait_fixed

from ratchet.infra.progress import note
from ratchet.infra.store.object_store import StoreFull, StoreUnavailable
from ratchet.infra.workers.ray_group import GroupLost
from ratchet.rlhf.errors import EngineLost, RatchetError

P = ParamSpec("P")
R = TypeVar("R")

PAUSE, LONGEST_PAUSE_S = 10, 300.0
"""After a failure that took t seconds, the server is not used for PAUSE * t seconds, at most LONGEST_PAUSE_S: a failing
server costs at most a tenth of the time."""

WAITS_S = (1, 5, 20)
"""Seconds to wait before the second and each further attempt of a task."""


@dataclass
class _Ending(Generic[R]):
    """The outcome of a computation that Prefect ran, regardless of what Prefect reports."""

    results: list[R] = field(default_factory=list)
    error: BaseException | None = None
    seconds: float = 0.0


_ending: ContextVar[_Ending[object] | None] = ContextVar("ending", default=None)


class _Server:
    answers = True
    asked_again = 0.0


def noted(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates the body of a flow or a task, so that `recorded` learns its outcome."""

    @wraps(function)
    def body(*args: P.args, **kwargs: P.kwargs) -> R:
        # without `recorded`, nobody reads the ending
        ending, began = _ending.get() or _Ending[object](), time.monotonic()
        token = _ending.set(None)  # the tasks that it calls have outcomes of their own
        try:
            result = function(*args, **kwargs)
            ending.results.append(result)
            return result
        except BaseException as error:
            ending.error = error
            raise
        finally:
            ending.seconds = time.monotonic() - began
            _ending.reset(token)

    # Prefect resolves the annotations in the module that defines `body`, which is this one
    body.__signature__ = signature(function, eval_str=True)  # type: ignore[attr-defined]
    return body


def recorded(record: Callable[[], R], compute: Callable[[], R]) -> R:
    """Computes something once, recorded by Prefect if its server works.

    Args:
        record: Runs `compute` through Prefect, as the body of a flow or task that is `noted`.
        compute: The computation, called directly if Prefect fails before calling it.

    Returns:
        The result of `compute`; its exceptions are raised.
    """
    began = time.monotonic()
    if began < _Server.asked_again:
        return compute()
    ending: _Ending[object] = _Ending()
    token = _ending.set(ending)
    try:
        result = record()
    except (Exception, Abort) as error:  # Abort: the server rejects a state, perhaps because it knows it already
        # an error of the computation, not of Prefect
        if error is ending.error or isinstance(error, RatchetError):
            raise
        _report_failure(error, time.monotonic() - began - ending.seconds)
    else:
        if not _Server.answers:
            _Server.answers = True
            note("Prefect records the run again")
        return result
    finally:
        _ending.reset(token)
    # Prefect failed after the body ended: its outcome counts
    if ending.error is not None:
        raise ending.error
    return ending.results[0] if ending.results else compute()  # type: ignore[return-value]


def _report_failure(error: BaseException, took_s: float) -> None:
    _Server.asked_again = time.monotonic() + min(PAUSE * took_s, LONGEST_PAUSE_S)
    if _Server.answers:
        _Server.answers = False
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        note(f"the run continues without Prefect, which does not record what follows: {why}")


def recorded_task(name: str, run_name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a Prefect task that retries temporary errors, and that runs without Prefect if Prefect fails.

    Args:
        name: Name of the task.
        run_name: Name of its runs, with the function's parameters in braces; None: made of run, iteration and `name`,
            for a function with the parameters `driver` and `iteration`.
    """
    named = f"{{driver.config.run.name}} · it {{iteration}} · {name}" if run_name is None else run_name

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def tried(*args: P.args, **kwargs: P.kwargs) -> R:
            tries = Retrying(
                retry=retry_if_exception(_is_temporary),
                wait=wait_chain(*map(wait_fixed, WAITS_S)),
                stop=stop_after_attempt(1 + len(WAITS_S)),
                before_sleep=lambda state: _say(name, state),
                reraise=True,
            )
            return tries(function, *args, **kwargs)

        as_task = task(name=name, task_run_name=named, persist_result=False, cache_policy=NO_CACHE)(noted(tried))

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return recorded(lambda: as_task(*args, **kwargs), lambda: tried(*args, **kwargs))

        return run

    return decorate


def _is_temporary(error: BaseException) -> bool:
    """True if an error may be temporary, such as a store that did not answer or a worker that died."""
    # a full store does not empty itself
    return isinstance(error, (StoreUnavailable, GroupLost, EngineLost)) and not isinstance(error, StoreFull)


def _say(name: str, state: RetryCallState) -> None:
    assert state.outcome is not None, "a try has ended"
    note(f"{state.outcome.exception()}; {name} is tried again")
