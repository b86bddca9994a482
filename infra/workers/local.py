"""A group of one worker in the driver's own process. The default, and what tests and the demo use."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Concatenate, ParamSpec, TypeVar

from infra.workers.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class LocalGroup:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.worker, *args, **kwargs)

    def submit(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """There is nobody else who could compute meanwhile: the future is there already."""
        future: Future[R] = Future()
        future.set_result(self.call(method, *args, **kwargs))
        return future
