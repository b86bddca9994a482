"""Virtual time for threaded code: threads, locks and queues whose clock jumps to the next event.

The threads are greenlets: one runs at a time, until it waits, and the next one is that which could go on first. When
all wait, the clock jumps to the earliest deadline. So a run with the same inputs takes the same course, and waiting
takes no time. A wait that nothing can end is an error at once.
"""

from __future__ import annotations

import heapq
import itertools
import time as real_time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, Generic, Self, TypeVar

import pytest
from greenlet import getcurrent, greenlet

T = TypeVar("T")


class NothingHappens(BaseException):
    """All threads wait without a deadline."""


class _Killed(BaseException):
    """Ends a thread whose process was killed. Whatever it still does on its way out waits no more: it does nothing."""


class Group:
    """The threads of a process, which can be killed together."""

    def __init__(self) -> None:
        self.is_killed = False
        self.tasks: list[_Task] = []


class _Task:
    """A thread that runs, is due, or waits."""

    def __init__(self, runs: greenlet, kind: str, group: Group) -> None:
        self.runs, self.kind, self.group = runs, kind, group
        self.waits = 0
        """Number of the wait; a deadline of an earlier wait has no effect."""
        self.is_waiting = False


class VirtualTime:
    """The clock, and the scheduler of its threads. What makes it is the first of them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu_s = Counter[str]()
        """Real CPU seconds of the code under test (`driver`), and of what is simulated around it (`cluster`)."""
        self.current = self._main = _Task(getcurrent(), "driver", Group())
        self._due: deque[_Task] = deque()
        self._deadlines: list[tuple[float, int, _Task, int]] = []
        self._numbers = itertools.count()
        self._scheduler = greenlet(self._schedule)

    def start(self, run: Callable[[], None], kind: str = "cluster", group: Group | None = None) -> None:
        """Starts a thread, which runs once the others wait; it is in the group of the thread that starts it, or in
        another one."""
        group = self.current.group if group is None else group

        def until_killed() -> None:
            try:
                if not group.is_killed:
                    run()
            except BaseException:  # a killed thread does not hold the locks that its `with` statements release
                if not group.is_killed:
                    raise

        group.tasks.append(_Task(greenlet(until_killed, self._scheduler), kind, group))
        self._due.append(group.tasks[-1])

    def kill(self, group: Group) -> None:
        """Ends the threads of another group: nothing that they wait for takes effect any more."""
        group.is_killed = True
        for task in group.tasks:
            self.wake(task)

    def wait(self, timeout: float | None = None) -> None:
        """Lets others run until `wake` is called for this thread, or for so many seconds."""
        task = self.current
        if task.group.is_killed:
            raise _Killed
        task.waits += 1
        task.is_waiting = True
        if timeout is not None:
            heapq.heappush(self._deadlines, (self.now + max(timeout, 0.0), next(self._numbers), task, task.waits))
        self._scheduler.switch()
        if task.group.is_killed:
            raise _Killed
        if task.is_waiting:
            raise NothingHappens(f"at {self.now:.3f} s all threads wait, and nothing will end it")

    def wake(self, task: _Task) -> None:
        if task.is_waiting:
            task.is_waiting = False
            self._due.append(task)

    def sleep(self, seconds: float) -> None:
        self.wait(seconds)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def _schedule(self) -> None:
        """Lets one thread after the other go on: the first one if none ever would."""
        while True:
            while not self._due and self._deadlines:
                at, _, task, number = heapq.heappop(self._deadlines)
                if task.is_waiting and task.waits == number:
                    self.now = max(self.now, at)
                    self.wake(task)
            task = self.current = self._due.popleft() if self._due else self._main
            began = real_time.thread_time()
            task.runs.switch()
            self.cpu_s[task.kind] += real_time.thread_time() - began

    def namespace(self) -> SimpleNamespace:
        """Returns what takes the place of the module `threading`."""
        return SimpleNamespace(
            Condition=lambda lock=None: Condition(self, lock),
            Event=lambda: Event(self),
            Lock=lambda: Lock(self),
            RLock=lambda: Lock(self),
            Thread=lambda **options: Thread(self, **options),
        )

    @contextmanager
    def in_modules(self, modules: Sequence[ModuleType]) -> Iterator[None]:
        """Replaces the clock, threads and queues of the standard library where these modules name them."""
        queues = SimpleNamespace(SimpleQueue=lambda: Queue[Any](self))
        instead = {"threading": self.namespace(), "time": self, "SimpleQueue": queues.SimpleQueue}
        with pytest.MonkeyPatch.context() as patch:
            for module in modules:
                for name in instead.keys() & vars(module).keys():
                    patch.setattr(module, name, instead[name])
            yield


class Lock:
    """A lock that its owner may take again."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._owner: _Task | None = None
        self._depth = 0
        self._waiting: deque[_Task] = deque()

    def acquire(self) -> None:
        me = self._time.current
        while self._owner is not None and self._owner is not me:
            self._waiting.append(me)
            self._time.wait()
        self._owner = me
        self._depth += 1

    def release(self) -> None:
        assert self._owner is self._time.current
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                self._time.wake(self._waiting.popleft())

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.release()


class Condition(Lock):
    def __init__(self, time: VirtualTime, lock: Lock | None = None) -> None:
        assert lock is None
        super().__init__(time)
        self._notified: list[_Task] = []

    def wait_for(self, is_ready: Callable[[], T], timeout: float | None = None) -> T:
        """Waits until `is_ready`, or for so many seconds. Returns its last value."""
        deadline = None if timeout is None else self._time.now + timeout
        while not (value := is_ready()) and (deadline is None or self._time.now < deadline):
            me, depth = self._time.current, self._depth
            self._notified.append(me)
            self._depth = 1
            self.release()
            self._time.wait(None if deadline is None else deadline - self._time.now)
            if me in self._notified:  # time is up
                self._notified.remove(me)
            self.acquire()
            self._depth = depth
        return value

    def notify_all(self) -> None:
        waiting, self._notified = self._notified, []
        for task in waiting:
            self._time.wake(task)


class Event:
    def __init__(self, time: VirtualTime) -> None:
        self._changed = Condition(time)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_set, timeout)


class Thread:
    def __init__(
        self,
        time: VirtualTime,
        *,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._time, self._target, self._args, self.name = time, target, args, name
        self._ended = Event(time)

    def start(self) -> None:
        def run() -> None:
            self._target(*self._args)
            self._ended.set()

        self._time.start(run, "driver")

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class Queue(Generic[T]):
    def __init__(self, time: VirtualTime) -> None:
        self._changed = Condition(time)
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Future(Generic[T]):
    """The answer to a call, or its error."""

    def __init__(self, time: VirtualTime) -> None:
        self._changed = Condition(time)
        self._answer: tuple[T | None, BaseException | None] | None = None

    def set(self, result: T | None = None, error: BaseException | None = None) -> None:
        with self._changed:
            if self._answer is None:
                self._answer = result, error
                self._changed.notify_all()

    def result(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None)
        assert self._answer is not None
        result, error = self._answer
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
