"""Stores the answers that the programs of agents get, before they get them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

import pyarrow as pa

from rlhf.agents.sessions import Recorded

CALLS = pa.schema(
    {
        "trajectory_id": pa.string(),
        "digest": pa.string(),
        "ids": pa.list_(pa.int32()),
        "log_probs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
        "asked": pa.string(),
        "started": pa.float64(),
        "seconds": pa.float64(),
    }
)
"""Columns of a file of answers; see `Recorded`."""


class CallLog:
    """Writes the answers that wait while a file is written into the next file. Used on the event loop only."""

    def __init__(self, write: Callable[[pa.Table], None]) -> None:
        """`write` stores a table with the columns `CALLS`."""
        self._write = write
        self._waiting: list[tuple[Recorded, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, answer: Recorded) -> None:
        """Store an answer durably; see `Recorder.record`."""
        stored = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, stored))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await stored

    async def _write_all(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            failure: BaseException | None = None
            try:
                table = pa.Table.from_pylist([asdict(answer) for answer, _ in taken], CALLS)
                await asyncio.to_thread(self._write, table)
            except BaseException as error:
                failure = error
            for _, stored in taken:
                if not stored.done():
                    stored.set_result(None) if failure is None else stored.set_exception(failure)
        self._writing = None


def recorded_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Recorded]]:
    """The answers in the rows of such files, by trajectory id."""
    names = [field.name for field in fields(Recorded)]
    by_trajectory: dict[str, list[Recorded]] = {}
    for row in rows:
        answer = Recorded(**{name: row[name] for name in names})
        by_trajectory.setdefault(answer.trajectory_id, []).append(answer)
    return by_trajectory
