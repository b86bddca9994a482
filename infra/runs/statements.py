"""Runs SQL in child processes, because a statement can take any amount of memory and time, and DuckDB checks its limits
only now and then. A child that exceeds them ends alone, and so does one whose client leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Literal, cast

import duckdb

from ratchet.infra.runs.sql import Statement, Tables, arrow_table
from ratchet.infra.runs.sql_process import answer
from ratchet.rlhf import child_processes
from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

NO_MEMORY = (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
"""Signals that end a process for want of memory: its own, or the machine's."""
Kind = Literal["refused", "syntax", "unreadable", "memory", "time", "left"]


@dataclass(frozen=True)
class SQLLimits:
    """The limits of a request."""

    seconds: float
    memory_bytes: int
    """Memory of the whole process. DuckDB may count half of it."""
    threads: int


class StatementFailed(UserError):
    """A statement has no result. The message is DuckDB's, or says which limit was exceeded."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """`unreadable`: a data file cannot be read; `left`: the statement was ended from outside."""


class SQLProcess:
    """A process that answers one request after the other."""

    def __init__(self, limits: SQLLimits) -> None:
        """Starts the process, without waiting for it."""
        self._limits = limits
        self._environment = dict(os.environ)
        self._killed = False
        self._pipe, child_end = Pipe()
        sizes = [str(number) for number in (limits.memory_bytes, limits.threads, limits.seconds)]
        self._process = subprocess.Popen(
            [
                sys.executable,
                # no working folder in sys.path, where a user's file could shadow a module
                "-P",
                "-m",
                "ratchet.infra.runs.sql_process",
                str(child_end.fileno()),
                str(os.getpid()),
                *sizes,
            ],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent
            env={
                **self._environment,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "ARROW_DEFAULT_MEMORY_POOL": "system",  # the default one takes a gigabyte of the limit when it starts
            },
        )
        child_end.close()

    def ask(self, tables: Tables, *statements: Statement) -> list[pd.DataFrame]:
        """Runs statements over tables, and returns the result of each. Lists are arrays, and maps are dicts.

        Raises `StatementFailed` if DuckDB rejects a statement, or all of them together exceed a limit.
        """
        parts = tables.to_bytes()
        request = {"parts": len(parts), "statements": [asdict(statement) for statement in statements]}
        try:
            for part in (json.dumps(request).encode(), *parts):
                self._pipe.send_bytes(part)
            head = json.loads(self._pipe.recv_bytes())
            answered = [self._pipe.recv_bytes() for _ in range(head["results"])]
        except (EOFError, OSError):
            raise self._how_it_ended() from None
        except BaseException:
            self.kill()
            raise
        if head["kind"] == "memory":
            self.kill()  # frees its memory
        return _frames(head, answered, self._limits)

    def is_fit(self) -> bool:
        """True if it can answer another request, as a new process would."""
        return not self._killed and self._process.poll() is None and self._environment == os.environ

    def kill(self) -> None:
        """Kills the process, from any thread: a caller that waits for an answer gets an error. `end` must follow."""
        self._killed = True
        self._process.kill()

    def end(self) -> None:
        """Ends the process, and waits until its memory is free."""
        child_processes.end(self._process)
        self._pipe.close()

    def _how_it_ended(self) -> StatementFailed:
        code = self._process.wait()
        if self._killed:
            return StatementFailed("left", "the statement was ended")
        if code == -signal.SIGALRM:
            return StatementFailed("time", f"it took longer than {self._limits.seconds:g} s")
        if -code in NO_MEMORY:
            return StatementFailed("memory", _too_large(self._limits))
        return StatementFailed("refused", f"the process that ran it ended with code {code}")


class Statements:
    """Child processes for statements. A process that has answered is kept for the next request. Thread-safe."""

    def __init__(self, limits: SQLLimits) -> None:
        """Takes the limits of each request. Starts no process."""
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: SQLProcess | None = None

    def start(self) -> None:
        """Starts a process, so that the first request need not wait for it."""
        self._keep(SQLProcess(self._limits))

    @contextmanager
    def child(self) -> Iterator[SQLProcess]:
        """Lends a process for the requests of a `with` statement."""
        with self._lock:
            child, self._idle = self._idle, None
        if child is not None and not child.is_fit():
            child.end()
            child = None
        child = child or SQLProcess(self._limits)
        try:
            yield child
        finally:
            self._keep(child)

    def close(self) -> None:
        """Ends the process that is kept."""
        with self._lock:
            child, self._idle = self._idle, None
        if child is not None:
            child.end()

    def _keep(self, child: SQLProcess) -> None:
        with self._lock:
            if self._idle is None and child.is_fit():
                self._idle = child
                return
        child.end()


def ask_here(limits: SQLLimits, tables: Tables, *statements: Statement) -> list[pd.DataFrame]:
    """Runs statements in this process, for tables in its memory. Like `SQLProcess.ask`, but limits are not enforced."""
    head, *answered = answer(tables, statements, limits.memory_bytes, limits.threads)
    return _frames(json.loads(head), answered, limits)


def _frames(head: Mapping[str, str], answered: Sequence[bytes], limits: SQLLimits) -> list[pd.DataFrame]:
    """Converts the results of a process to pandas frames."""
    kind, message = head["kind"], head["message"]
    if kind != "answered":
        raise StatementFailed(cast(Kind, kind), _too_large(limits) if kind == "memory" else message)
    connection = duckdb.connect(config={"threads": "1"})
    return [connection.from_arrow(arrow_table(data)).df() for data in answered]


def _too_large(limits: SQLLimits) -> str:
    return f"it needs more than {limits.memory_bytes / 2**30:.3g} GiB of memory"
