"""A group of one worker in the driver's own process: the default, also for tests and the demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Concatenate, ParamSpec, TypeVar

from ratchet.infra.store.records import Weights
from ratchet.infra.workers.calls import ShardKey
from ratchet.infra.workers.rollouts import Generated
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.distributed.device_errors import out_of_memory

P = ParamSpec("P")
R = TypeVar("R")


class LocalGroup:
    """A `WorkerGroup` of one worker in this process."""

    ranks = 1

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns the method's result. Raises the worker's error."""
        try:
            return method(self.worker, *args, **kwargs)
        except RuntimeError as error:
            if (too_large := out_of_memory(error)) is not None:
                raise too_large from error
            raise

    def submit(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Runs the method now, since there is no other process to run it; the future is complete."""
        future: Future[R] = Future()
        try:
            future.set_result(self.call(method, *args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    handed = submit

    def generate(
        self, weights: Weights, submitted: Sequence[tuple[ShardKey, Sequence[str]]], wait_s: float
    ) -> list[Generated]:
        return self.call(Worker.generate, weights, submitted, wait_s)

    def replicas(self) -> list[LocalGroup]:
        return [self]
