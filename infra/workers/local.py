"""`local`: a group of one worker in the driver's own process. The default, and what tests and the demo use."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from infra.workers.worker import Worker


class LocalGroup:
    """Calls the worker's methods in place and returns finished futures, as a remote group returns pending ones."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(getattr(self.worker, method)(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, method: str, *arguments: Any) -> Any:
        return self.submit(method, *arguments).result()
