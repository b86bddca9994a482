"""Side by side: stages that compute in different places run at the same time, shard after shard.

An executor is a place that computes, and a thread of the driver that waits for it: the driver's own models, a pool, an
engine in a process of its own, or just the host for what needs no model. The stages of one executor run one after the
other, in the order in which they were started; those of different executors overlap, and each continues as soon as a
shard that it reads is committed. Stages are started after what they read, so executors never wait for each other in a
circle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass

from infra.store.manifest import Manifest
from infra.store.records import ShardRef
from rlhf.errors import NotFinite, RatchetError

POLL_S = 0.2
"""How often the driver looks after what else there is to do, while it waits for executors."""


class InputLost(RatchetError):
    """What a stage reads will not come: the stage that makes it has failed, and says why."""


class StageHandle:
    """What a stage has committed so far, and in the end its manifest."""

    def __init__(self, stage: str, *given_up: threading.Event) -> None:
        """`given_up`: set when nothing more is to be computed."""
        self.stage = stage
        self._given_up = given_up
        self._changed = threading.Condition()
        self._shards: list[ShardRef] = []
        self._count: int | None = None
        self._manifest: Manifest | None = None
        self._ended = False
        self._failed = False

    @property
    def failed(self) -> bool:
        return self._failed

    @classmethod
    def of(cls, manifest: Manifest) -> StageHandle:
        """Of a stage that has ended."""
        handle = cls(manifest.stage)
        handle.end(manifest)
        return handle

    @classmethod
    def so_far(cls, stage: str, shards: list[ShardRef]) -> StageHandle:
        """Of a stage that has more to commit."""
        handle = cls(stage)
        handle.show(shards)
        return handle

    # For those that read it: each waits, and raises `InputLost` if it will not come.

    def shard(self, number: int) -> ShardRef:
        self._wait(lambda: len(self._shards) > number)
        return self._shards[number]

    def count(self) -> int:
        """How many shards there will be."""
        self._wait(lambda: self._count is not None)
        assert self._count is not None
        return self._count

    def manifest(self) -> Manifest:
        self._wait(lambda: self._ended)
        assert self._manifest is not None, f"{self.stage} was skipped"
        return self._manifest

    def _wait(self, there: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: there() or self._failed)
            if not there():
                raise InputLost(f"{self.stage} has failed")

    # For the stage itself.

    def check(self) -> None:
        """Before each shard: where another stage has failed, nothing more is computed in vain."""
        if any(event.is_set() for event in self._given_up):
            raise InputLost(f"{self.stage} stops: another stage has failed, or the driver ends")

    def belongs_to(self, given_up: threading.Event) -> None:
        self._given_up = (*self._given_up, given_up)

    def expect(self, count: int) -> None:
        with self._changed:
            self._count = count
            self._changed.notify_all()

    def show(self, shards: list[ShardRef]) -> None:
        """So much of it is committed."""
        with self._changed:
            self._shards = list(shards)
            self._changed.notify_all()

    def end(self, manifest: Manifest | None) -> None:
        """All of it is committed; None: that nothing was to be done."""
        with self._changed:
            self._manifest = manifest
            self._shards = [] if manifest is None else list(manifest.shards)
            self._count = len(self._shards)
            self._ended = True
            self._changed.notify_all()

    def fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()


@dataclass(frozen=True)
class _Started:
    handle: StageHandle
    future: Future[None]


class Executors:
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
        """Start a stage as soon as its executor has ended those before it. `run` may show what it has committed.

        One that runs `ahead` is not waited for until it is adopted, and outlives the flow that starts it.
        """
        given_up = threading.Event() if ahead else self._given_up  # what runs ahead can be begun anew
        handle = StageHandle(stage, given_up, self._closing)

        def job() -> None:
            try:
                handle.check()
                handle.end(run(handle))
            except BaseException as error:
                if not isinstance(error, NotFinite | InputLost):  # then just what reads this stage cannot go on
                    given_up.set()
                handle.fail()
                raise

        if executor not in self._threads:
            import torch

            self._threads[executor] = ThreadPoolExecutor(1, executor, torch.set_num_threads, (torch.get_num_threads(),))
        context = self._context.copy() if ahead else copy_context()
        future = self._threads[executor].submit(context.run, job)
        (self._ahead if ahead else self._started).append(_Started(handle, future))
        return handle

    def adopt(self, handle: StageHandle) -> None:
        """From now on it is waited for, if it ran ahead."""
        mine = [each for each in self._ahead if each.handle is handle]
        self._ahead = [each for each in self._ahead if each.handle is not handle]
        self._started += mine
        handle.belongs_to(self._given_up)

    def join(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for all that was started; then raise the first error, which is what those that waited for it failed
        of. What may pass comes before `NotFinite`, which may be passed over."""
        started, given_up = self._started, self._given_up
        self._started, self._given_up = [], threading.Event()
        left = {each.future for each in started}
        try:
            while left:
                left = wait(left, POLL_S, FIRST_COMPLETED).not_done
                meanwhile()
        except BaseException:
            given_up.set()
            wait(left)
            raise
        errors = [error for each in started if (error := each.future.exception()) is not None]
        for error in sorted(errors, key=lambda error: (isinstance(error, InputLost), isinstance(error, NotFinite))):
            raise error

    def close(self) -> None:
        """End what still runs, after the shard at hand."""
        self._closing.set()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._threads = {}
