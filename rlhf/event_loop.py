"""Event loops in daemon threads, started on first use; trajectories are generated on one of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def loop(name: str = "generation") -> asyncio.AbstractEventLoop:
    """Returns this process's event loop of a name, which runs in its own thread."""
    return _loop_of(name, os.getpid())  # a forked process starts its own


@cache
def _loop_of(name: str, process: int) -> asyncio.AbstractEventLoop:
    created = asyncio.new_event_loop()
    threading.Thread(target=created.run_forever, name=name, daemon=True).start()
    return created


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the event loop and waits for its result. Must not be called on the event loop itself."""
    future = asyncio.run_coroutine_threadsafe(coroutine, loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # the caller was interrupted: nobody waits for the result
        raise


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently. If one fails, the others are cancelled, and the first error is raised."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
