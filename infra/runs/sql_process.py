"""Runs SQL in a process of its own. `infra.runs.statements` starts it and talks to it through a pipe."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection

import duckdb
import pyarrow as pa

from ratchet.infra.runs.sql import Statement, Tables, arrow_bytes, connect, execute, reason
from ratchet.rlhf.errors import UserError

UNREADABLE = (duckdb.InvalidInputException, SystemError)
"""Errors of a statement whose data file cannot be read; `SystemError` if its bytes mislead pyarrow's reader."""
WITHOUT_MEMORY = (MemoryError, duckdb.OutOfMemoryException, pa.ArrowMemoryError)


def main() -> None:
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    memory_bytes, threads, seconds = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is doing
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # silences libraries that run out of memory
    try:
        while True:
            head = json.loads(pipe.recv_bytes())
            tables = Tables.from_bytes([pipe.recv_bytes() for _ in range(head["parts"])])
            signal.setitimer(signal.ITIMER_REAL, seconds)
            answers = answer(
                tables, [Statement(**statement) for statement in head["statements"]], memory_bytes, threads
            )
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for part in answers:
                pipe.send_bytes(part)
    except (EOFError, OSError):  # the parent has ended, or closed the pipe
        return


def answer(tables: Tables, statements: Sequence[Statement], memory_bytes: int, threads: int) -> list[bytes]:
    """Runs statements over tables.

    Returns:
        JSON that reports success or the failure, and then a stream of Arrow for each result.
    """
    try:
        # DuckDB does not count all that it allocates
        connection = connect(tables, memory_bytes // 2, threads)
        results = [arrow_bytes(execute(connection, statement).to_arrow_reader()) for statement in statements]
    except (duckdb.Error, pa.ArrowException, UserError, SystemError, MemoryError) as error:
        if isinstance(error, WITHOUT_MEMORY):
            kind = "memory"
        elif isinstance(error, UNREADABLE):
            kind = "unreadable"
        else:
            kind = "syntax" if isinstance(error, duckdb.ParserException) else "refused"
        return [json.dumps({"kind": kind, "message": reason(error), "results": 0}).encode()]
    return [json.dumps({"kind": "answered", "message": "", "results": len(results)}).encode(), *results]


def _end_with_parent(parent: int) -> None:
    """Ends this process when its parent has ended."""
    # a killed parent cannot end this process, and the main thread may be busy with a statement
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main()
