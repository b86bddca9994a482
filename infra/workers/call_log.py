"""Stores answers before anybody gets them: those of the endpoint, and the turns of durable environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

import pyarrow as pa

from ratchet.rlhf.agents.sessions import Recorded
from ratchet.rlhf.environments.dialogues import Dialogue, joined
from ratchet.rlhf.schema import SECONDS

CALL_COLUMNS: Mapping[str, tuple[pa.DataType, str]] = {
    "trajectory_id": (pa.string(), "the trajectory, or of `ratchet serve` the conversation"),
    "branch": (pa.string(), "the conversation within the trajectory: an edited history begins another one"),
    "call_id": (pa.string(), "id of the completion, as the caller gets it; further choices end in -1, -2"),
    "digest": (pa.string(), "sha256 of what was asked"),
    "heard_ids": (pa.list_(pa.int32()), "tokens that the call added to its conversation, before the answer"),
    "ids": (pa.list_(pa.int32()), "tokens of the answer"),
    "log_probs": (pa.list_(pa.float32()), "log-prob of each of these, in nats"),
    "versions": (pa.list_(pa.int32()), "number of iterations of the weights that drew each of these"),
    "finish_reason": (pa.string(), "stop or length"),
    "asked": (pa.string(), "what the call added, as JSON: {messages} or {prompt}, and perhaps {tools}"),
    "answer": (pa.string(), "message of the assistant, as JSON"),
    "started": (pa.float64(), "time of the call, in seconds since 1970"),
    "seconds": (pa.float64(), "time until it was answered"),
    "routes": (
        pa.large_binary(),
        "experts of the conversation's tokens that no earlier answer has, int16; see `rollout.router_replay`",
    ),
    "slots": (pa.int32(), "number of experts for each token in `routes`"),
}
"""Types and meanings of the columns of a file of answers; see `Recorded`."""
CALLS = pa.schema([(name, kind) for name, (kind, _) in CALL_COLUMNS.items()])
JOURNAL = pa.schema(
    {
        "trajectory_id": pa.string(),
        "ids": pa.list_(pa.int32()),
        "log_probs": pa.list_(pa.float32()),
        "mask": pa.list_(pa.int8()),
        "versions": pa.list_(pa.int32()),
        "turn_starts": pa.list_(pa.int32()),
        "turn_ends": pa.list_(pa.int32()),
        "turn_rewards": pa.list_(pa.float64()),
        "turn_seconds": SECONDS,
        "parts": pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()})),
        "finish_reason": pa.string(),
        "tool_error": pa.string(),
        "attempt": pa.int32(),
        "states": pa.list_(pa.string()),
        "routes": pa.large_binary(),
        "slots": pa.int32(),
        "images": pa.list_(pa.large_binary()),
        "turn_images": pa.list_(pa.int32()),
    }
)
"""Columns of a journal; see `Dialogue`."""
TURNS = JOURNAL.append(pa.field("before", pa.string()))
"""Columns of a file of turns; see `Dialogue.new_row`."""


class _RowLog:
    """A log of rows, which batches those that arrive while a file is being written. Used on the event loop only."""

    def __init__(self, write: Callable[[pa.Table], None], schema: pa.Schema) -> None:
        self._write, self._schema = write, schema
        self._waiting: list[tuple[Mapping[str, Any], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def add(self, row: Mapping[str, Any]) -> None:
        """Stores a row durably."""
        stored = asyncio.get_running_loop().create_future()
        self._waiting.append((row, stored))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await stored

    async def _write_all(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            failure: BaseException | None = None
            try:
                table = pa.Table.from_pylist([row for row, _ in taken], self._schema)
                await asyncio.to_thread(self._write, table)
            except BaseException as error:
                # every waiting caller gets the error, even a cancellation
                failure = error
            for _, stored in taken:
                # its caller may have been cancelled
                if not stored.done():
                    stored.set_result(None) if failure is None else stored.set_exception(failure)
        self._writing = None


class CallLog:
    """A log of the endpoint's answers."""

    def __init__(self, write: Callable[[pa.Table], None], scope: str = "") -> None:
        """Takes a function that stores a table with the columns `CALLS`, and what `Recorder.scope` returns."""
        self._rows, self.scope = _RowLog(write, CALLS), scope

    async def record(self, answer: Recorded) -> None:
        """Stores an answer durably; see `Recorder.record`."""
        await self._rows.add(asdict(answer))


class NoLog:
    """Stands for a log where nobody would continue from one: it only names the keys that environments and programs
    get."""

    def __init__(self, scope: str) -> None:
        """Takes what `Recorder.scope` returns."""
        self.scope = scope

    async def record(self, _: Recorded | Dialogue) -> None:
        """Stores nothing."""


class TurnLog:
    """A log of the turns of durable environments."""

    def __init__(self, write: Callable[[pa.Table], None], scope: str) -> None:
        """Takes a function that stores a table with the columns `TURNS`, and what `TurnRecorder.scope` returns."""
        self._rows, self.scope = _RowLog(write, TURNS), scope

    async def record(self, dialogue: Dialogue) -> None:
        """Stores what is new in a trajectory durably; see `TurnRecorder.record`."""
        await self._rows.add(dialogue.new_row())


def turns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Joins the rows in such files to one row of a journal for each trajectory id."""
    by_trajectory: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_trajectory.setdefault(row["trajectory_id"], []).append(row)
    whole = {trajectory_id: joined(rows) for trajectory_id, rows in by_trajectory.items()}
    return {trajectory_id: row for trajectory_id, row in whole.items() if row}


def recorded_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Recorded]]:
    """Groups the answers in the rows of such files by trajectory id."""
    names = [field.name for field in fields(Recorded)]
    by_trajectory: dict[str, list[Recorded]] = {}
    for row in rows:
        answer = Recorded(**{name: row[name] for name in names if name in row})  # older files lack the newest
        by_trajectory.setdefault(answer.trajectory_id, []).append(answer)
    return by_trajectory
