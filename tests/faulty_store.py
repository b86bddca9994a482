"""A store that fails at chosen operations, with a clock that jumps; replaces the network in tests of the log."""

from __future__ import annotations

import errno
import io
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, Literal, TypeVar

T = TypeVar("T")


class Killed(BaseException):
    """`kill -9` in the middle of a request."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "500": lambda: OSError(errno.EREMOTEIO, "500 InternalError"),
    "503": lambda: OSError(errno.EBUSY, "503 SlowDown"),
    "409": lambda: OSError(errno.EBUSY, "409 ConditionalRequestConflict"),
    "timeout": lambda: TimeoutError("the read timed out"),
    "reset": lambda: ConnectionResetError("connection reset by peer"),
    "own 412": lambda: FileExistsError("the client tried again by itself, and met its own object"),
    "kill": Killed,
}


@dataclass(frozen=True)
class Fault:
    """A fault of one request: whether it takes effect, and the answer that its sender gets.

    `late` takes effect after `delay_s`. With `overtaken` nothing goes wrong, but another driver claims first.
    """

    effect: Literal["none", "applied", "late", "overtaken"]
    answer: str = "500"
    delay_s: float = 0.0


class Clock:
    """A clock whose sleeps take no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds


class Memory:
    """A store in a dictionary, which counts the requests."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects
        self.requests: Counter[str] = Counter()

    def create(self, key: str, data: bytes) -> None:
        self._request("create", lambda: self._create(key, data))

    def put(self, key: str, data: bytes) -> None:
        self._request("put", lambda: self.objects.update({key: data}))

    def get(self, key: str) -> bytes:
        return self._request("get", lambda: self._get(key))

    def size(self, key: str) -> int:
        return self._request("size", lambda: len(self._get(key)))

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self.get(key))

    def read(self, key: str, start: int, end: int) -> bytes:
        return self._request("read", lambda: self._get(key)[start:end])

    def delete(self, keys: list[str]) -> None:
        self._request("delete", lambda: self._delete(keys))

    def delete_leftovers(self, older_s: float) -> None:
        """There are none."""

    def delete_empty_folders(self) -> None:
        """There are none."""

    def list(self, prefix: str) -> list[str]:
        return self._request("list", lambda: sorted(key for key in self.objects if key.startswith(prefix)))

    def _request(self, kind: str, operation: Callable[[], T]) -> T:
        self.requests[kind] += 1
        return operation()

    def _create(self, key: str, data: bytes) -> None:
        if key in self.objects:
            raise FileExistsError(key)
        self.objects[key] = data

    def _get(self, key: str) -> bytes:
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key]

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)


class Simulated(Memory):
    """A store whose requests fail as `next_fault` returns for each; a request takes a second."""

    def __init__(self, clock: Clock, overtake: Callable[[], None]) -> None:
        super().__init__()
        self.clock = clock
        self.overtake = overtake
        self.next_fault: Callable[[str], Fault | None] = lambda kind: None
        self.failed = 0
        self.late: list[tuple[float, Callable[[], object]]] = []
        """Requests that were given up and are still on their way, with their times of arrival."""

    def _request(self, kind: str, operation: Callable[[], T]) -> T:
        self.clock.sleep(1.0)
        self.land()
        fault = self.next_fault(kind)
        if fault is None:
            return super()._request(kind, operation)
        if fault.effect == "overtaken":
            self.overtake()
            return super()._request(kind, operation)
        if fault.effect == "applied":
            super()._request(kind, operation)
        if fault.effect == "late":
            self.late.append((self.clock.now + fault.delay_s, operation))
        self.failed += 1
        plausible = kind == "create" and fault.effect == "applied"
        raise ERRORS["500" if fault.answer == "own 412" and not plausible else fault.answer]()

    def land(self) -> None:
        """Lets the late requests whose time has come take effect."""
        due = [operation for at, operation in self.late if at <= self.clock.now]
        self.late = [(at, operation) for at, operation in self.late if at > self.clock.now]
        for operation in due:
            with suppress(FileExistsError, FileNotFoundError):  # nobody hears its answer
                operation()
