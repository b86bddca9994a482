"""The trajectories of a run by SQL: lists that match a filter, and single ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import duckdb

from flows.ui.documents import CLIP, Filter, Order, Trajectories, TrajectoryLine
from infra.query import FAILURES, UNREADABLE, answer, connect
from infra.runs import Run
from infra.store.log import Corrupt, read_verified
from infra.store.object_store import ObjectStore
from infra.store.records import ShardRef
from rlhf.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

LISTED = 200
"""Trajectories in a list."""
SAMPLED = 256
"""Trajectories of an iteration from which the scales of colours are computed."""
LIMIT_S = 30.0
"""A query that takes longer is interrupted, as is a check of data files."""
T = TypeVar("T")
Parameters = dict[str, str | float | None]
ORDERS: dict[Order, str] = {
    "best": "score DESC NULLS LAST",
    "worst": "score ASC NULLS LAST",
    "longest": "length DESC",
    "shortest": "length ASC",
}
TEXTS = ("prompt", "response", "ground_truth")


def matching(run: Run, wanted: Filter) -> Trajectories:
    """List the trajectories that match a filter.

    Args:
        run: the run.
        wanted: the filter.

    Returns:
        The first `LISTED` trajectories in the filter's order, the numbers of matching and of all ones, and what could
        not be read.

    Raises:
        UserError: DuckDB rejects the condition.
    """
    last = run.state.iteration
    if wanted.iteration is not None and not 0 <= wanted.iteration <= last:
        raise UserError(f"there is no iteration {wanted.iteration}: choose one from 0 to {last}")
    chosen = None if wanted.iteration is None else [wanted.iteration]
    listed, damages = _of_readable(run, chosen, lambda connection: _matching(connection, wanted))
    return listed.model_copy(update={"damages": damages})


def _matching(connection: duckdb.DuckDBPyConnection, wanted: Filter) -> Trajectories:
    columns = _columns(connection)
    if not columns:
        return Trajectories(lines=[], matching=0, total=0, damages=[])
    score = "score" if "score" in columns else "NULL::FLOAT AS score"
    conditions: list[str] = []
    parameters: Parameters = {}
    if wanted.text:
        conditions.append(" OR ".join(f"contains(lower(coalesce({column}, '')), lower($text))" for column in TEXTS))
        parameters["text"] = wanted.text
    for name, value, condition in (
        ("low", wanted.low, "score >= $low"),
        ("high", wanted.high, "score <= $high"),
        ("prompt_id", wanted.prompt_id or None, "prompt_id = $prompt_id"),
    ):
        if value is not None:
            conditions.append(condition)
            parameters[name] = value
    if wanted.where.strip():
        conditions.append(wanted.where)
    where = " AND ".join(f"({condition}\n)" for condition in conditions) or "true"  # a comment ends with its line
    listed = (
        f"SELECT trajectory_id, iteration, prompt_id, {score}, len(response_ids) AS length, finish_reason, "
        f"left(response, {CLIP}) AS response, count(*) OVER () AS matching FROM trajectories WHERE {where} "
        f"ORDER BY {ORDERS[wanted.order]}, iteration DESC, trajectory_id LIMIT {LISTED}"
    )
    try:
        frame = _within_limit(connection, listed, parameters)
        total = int(_within_limit(connection, "SELECT count(*) AS n FROM trajectories", {})["n"][0])
    except FAILURES as error:
        raise UserError(_reason(error, wanted.where, columns)) from error
    frame = frame.rename(columns={"trajectory_id": "id"}).astype({"score": object})
    frame["score"] = frame["score"].where(frame["score"].notna(), None)
    count = int(frame["matching"][0]) if len(frame) else 0
    lines = [TrajectoryLine.model_validate(row) for row in frame.drop(columns="matching").to_dict("records")]
    return Trajectories(lines=lines, matching=count, total=total, damages=[])


def full_rows(run: Run, iteration: int, trajectory_id: str | None = None) -> tuple[pd.DataFrame, list[str]]:
    """Read trajectories of an iteration, with the columns of all stages.

    Args:
        run: the run.
        iteration: the iteration.
        trajectory_id: the only one to read; None: the first `SAMPLED` by id.

    Returns:
        A row per trajectory, without columns of stages that have no commits, and what could not be read. Empty if there
        is none.

    Raises:
        UserError: they cannot be read.
    """
    import pandas as pd

    parameters: Parameters = {} if trajectory_id is None else {"id": trajectory_id}
    where = "" if trajectory_id is None else "WHERE trajectory_id = $id"
    sql = f"SELECT * FROM trajectories {where} ORDER BY trajectory_id LIMIT {SAMPLED}"

    def rows(connection: duckdb.DuckDBPyConnection) -> pd.DataFrame:
        try:
            return _within_limit(connection, sql, parameters) if _columns(connection) else pd.DataFrame()
        except FAILURES as error:
            message = f"iteration {iteration}: {_first_line(error)}; `ratchet verify` lists all damage"
            raise UserError(message) from error

    return _of_readable(run, [iteration], rows)


def _of_readable(
    run: Run, iterations: Sequence[int] | None, ask: Callable[[duckdb.DuckDBPyConnection], T]
) -> tuple[T, list[str]]:
    """Ask about what can be read, and name the rest. All data files are read ahead only if one cannot be."""
    damages: dict[str, None] = {}

    def damaged(damage: Corrupt) -> None:
        damages[str(damage)] = None

    def check(run: Run, ref: ShardRef) -> None:
        if time.monotonic() > deadline:
            raise UserError(
                f"finding what cannot be read takes longer than {LIMIT_S:.0f} s: choose one iteration; "
                "`ratchet verify` lists all damage"
            )
        _check(run.store.url, ref)

    try:
        return ask(connect(run, iterations, damaged)), list(damages)
    except UserError as error:
        if not isinstance(error.__cause__, UNREADABLE):
            raise
    deadline = time.monotonic() + LIMIT_S
    return ask(connect(run, iterations, damaged, check)), list(damages)


@lru_cache(maxsize=65536)
def _check(url: str, ref: ShardRef) -> None:
    """Raise `Corrupt` if a data file is missing or damaged. Others are immutable: they are read once."""
    read_verified(ObjectStore(url), ref)


def _columns(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """The columns of the trajectories; none if there are no trajectories."""
    sql = (
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'trajectories' ORDER BY ordinal_position"
    )
    return [str(name) for name in answer(connection, sql)["column_name"]]


def _within_limit(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Parameters) -> pd.DataFrame:
    timer = threading.Timer(LIMIT_S, connection.interrupt)
    timer.start()
    try:
        return answer(connection, sql, parameters)
    finally:
        timer.cancel()


def _reason(error: duckdb.Error | SystemError, where: str, columns: list[str]) -> str:
    if isinstance(error, duckdb.InterruptException):
        return f"the filter took longer than {LIMIT_S:.0f} s: choose one iteration, or a simpler condition"
    if not where.strip():
        return f"{_first_line(error)}; `ratchet verify` lists all damage"
    return f"where {where!r}: {_first_line(error)}; columns are {', '.join(columns)}"


def _first_line(error: duckdb.Error | SystemError) -> str:
    return str(error).splitlines()[0]
