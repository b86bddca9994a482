"""A group of one worker in the driver's own process. The default, and what tests and the demo use."""

from __future__ import annotations

from typing import Any

from infra.workers.worker import Worker


class LocalGroup:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)
