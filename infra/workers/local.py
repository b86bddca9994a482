"""A group of one worker in the driver's own process. The default, and what tests and the demo use."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from infra.workers.worker import Worker


class LocalGroup:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """There is nobody else who could compute meanwhile: the future is there already."""
        future: Future[Any] = Future()
        future.set_result(self.call(method, *arguments))
        return future
