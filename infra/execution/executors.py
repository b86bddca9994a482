"""Executors run stages concurrently, shard by shard.

An executor is a place that computes, and the driver's thread that waits for it: the driver's own models, a pool, an
engine in a separate process, or the host for stages without a model. Stages on the same executor run one at a time, in
the order in which they were started. Stages on different executors overlap: each continues as soon as the next shard
that it reads is committed. Stages are started after their inputs, so executors never deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass

from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.records import ShardRef
from ratchet.rlhf.errors import NotFinite, RatchetError

POLL_S = 0.2
"""Seconds between two calls of `meanwhile` while the driver waits for executors."""


class InputLost(RatchetError):
    """A stage's input will not come, because the stage that produces it has failed. That stage reports the cause."""


class StageHandle:
    """The shards that a stage has committed so far, and finally its manifest."""

    def __init__(self, stage: str, *given_up: threading.Event) -> None:
        """Makes the handle of a stage that stops before its next shard once one of the events `given_up` is set."""
        self.stage = stage
        self._given_up = given_up
        self._changed = threading.Condition()
        self._shards: dict[int, ShardRef] = {}
        self._count: int | None = None
        self._manifest: Manifest | None = None
        self._all_begun = False
        self._ended = False
        self._failed = False

    @property
    def failed(self) -> bool:
        return self._failed

    @classmethod
    def of(cls, manifest: Manifest) -> StageHandle:
        """Makes the handle of a complete stage."""
        handle = cls(manifest.stage)
        handle.end(manifest)
        return handle

    @classmethod
    def so_far(cls, stage: str, shards: Mapping[int, ShardRef]) -> StageHandle:
        """Makes the handle of an incomplete stage with these committed shards."""
        handle = cls(stage)
        handle.show(shards)
        return handle

    # For the stages that read this one.

    def shard(self, number: int) -> ShardRef:
        """Waits until shard `number` (from 0) is committed. Raises `InputLost` if the stage has failed."""
        self._wait(lambda: number in self._shards)
        return self._shards[number]

    def shards(self, beside: Container[int] = ()) -> dict[int, ShardRef]:
        """Waits until a shard is committed, other than those of `beside`. Shards are committed in any order.

        Returns:
            All shards committed so far except `beside`, by number in ascending order; at least one.

        Raises:
            InputLost: the stage has failed.
        """
        self._wait(lambda: any(number not in beside for number in self._shards))
        return {number: shard for number, shard in sorted(self._shards.items()) if number not in beside}

    def has(self, number: int) -> bool:
        """True if shard `number` (from 0) is committed."""
        return number in self._shards

    def count(self) -> int:
        """Waits until the number of shards is known. Raises `InputLost` if the stage has failed."""
        self._wait(lambda: self._count is not None)
        assert self._count is not None
        return self._count

    def all_begun(self) -> None:
        """Waits until the stage has begun its last shard. Raises `InputLost` if the stage has failed."""
        self._wait(lambda: self._all_begun or self._ended)

    def is_skipped(self) -> bool:
        """Waits until the stage is complete; True if it was skipped. Raises `InputLost` if the stage has failed."""
        self._wait(lambda: self._ended)
        return self._manifest is None

    def manifest(self) -> Manifest:
        """Waits until the stage is complete; it must not be skipped. Raises `InputLost` if the stage has failed."""
        self._wait(lambda: self._ended)
        assert self._manifest is not None, f"{self.stage} was skipped"
        return self._manifest

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_ready() or self._failed)
            if not is_ready():
                raise InputLost(f"{self.stage} has failed")

    # For the stage itself.

    def check(self) -> None:
        """Raises `InputLost` if the stage's work would be useless: another stage has failed, or the driver is
        ending."""
        if any(event.is_set() for event in self._given_up):
            raise InputLost(f"{self.stage} stops: another stage has failed, or the driver ends")

    def belongs_to(self, given_up: threading.Event) -> None:
        """Adds an event that stops the stage."""
        self._given_up = (*self._given_up, given_up)

    def expect(self, count: int) -> None:
        """Publishes the number of shards."""
        with self._changed:
            self._count = count
            self._changed.notify_all()

    def no_more_to_begin(self) -> None:
        """Publishes that the stage has begun its last shard."""
        with self._changed:
            self._all_begun = True
            self._changed.notify_all()

    def show(self, shards: Mapping[int, ShardRef]) -> None:
        """Publishes all shards that are committed so far."""
        with self._changed:
            self._shards = dict(shards)
            self._changed.notify_all()

    def end(self, manifest: Manifest | None) -> None:
        """Publishes that the stage is complete; None: it was skipped."""
        with self._changed:
            self._manifest = manifest
            self._shards = {} if manifest is None else dict(enumerate(manifest.shards))
            self._count = len(self._shards)
            self._ended = True
            self._changed.notify_all()

    def fail(self) -> None:
        """Publishes that the stage has failed."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


@dataclass(frozen=True)
class _Started:
    handle: StageHandle
    future: Future[None]


class Executors:
    """One thread per executor, created when its first stage starts."""

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._started: list[_Started] = []
        self._ahead: list[_Started] = []
        self._given_up = threading.Event()
        self._closing = threading.Event()
        self._context = copy_context()

    def start(
        self, executor: str, stage: str, run: Callable[[StageHandle], Manifest | None], ahead: bool = False
    ) -> StageHandle:
        """Queues a stage on an executor, behind the stages that were started before it.

        Args:
            run: computes the stage, publishes its shards on the handle, and returns its manifest; None: skipped.
            ahead: the stage outlives the flow that starts it, and `join` ignores it until it is adopted.
        """
        given_up = threading.Event() if ahead else self._given_up  # a stage that runs ahead can restart
        handle = StageHandle(stage, given_up, self._closing)

        def job() -> None:
            try:
                handle.check()
                handle.end(run(handle))
            except BaseException as error:
                if not isinstance(error, NotFinite | InputLost):  # both stop only the stages that read this one
                    given_up.set()
                handle.fail()
                raise

        if executor not in self._threads:
            import torch

            # the number is set per thread, and on CPUs results depend on it
            self._threads[executor] = ThreadPoolExecutor(1, executor, torch.set_num_threads, (torch.get_num_threads(),))
        # a stage that outlives the flow must not run in the flow's context
        context = self._context.copy() if ahead else copy_context()
        future = self._threads[executor].submit(context.run, job)
        (self._ahead if ahead else self._started).append(_Started(handle, future))
        return handle

    def adopt(self, handle: StageHandle) -> None:
        """Makes `join` wait for a stage that was started ahead."""
        adopted = [stage for stage in self._ahead if stage.handle is handle]
        self._ahead = [stage for stage in self._ahead if stage.handle is not handle]
        self._started += adopted
        handle.belongs_to(self._given_up)

    def join(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits for all stages that were started or adopted, and raises the root cause if stages failed.

        Args:
            meanwhile: called every `POLL_S` seconds.
        """
        started, given_up = self._started, self._given_up
        # the stages of the next join must not stop for the failures of this one
        self._started, self._given_up = [], threading.Event()
        running = {stage.future for stage in started}
        try:
            while running:
                running = wait(running, POLL_S, FIRST_COMPLETED).not_done
                meanwhile()
        except BaseException:
            given_up.set()
            wait(running)
            raise
        errors = [error for stage in started if (error := stage.future.exception()) is not None]
        # The root cause first: `InputLost` follows from another stage's error, and the caller may skip an update that
        # is not finite and continue, but only if nothing else went wrong.
        for error in sorted(errors, key=lambda error: (isinstance(error, InputLost), isinstance(error, NotFinite))):
            raise error

    def close(self) -> None:
        """Stops all stages after their current shard, and ends the threads."""
        self._closing.set()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._threads = {}
