"""Lists the trajectories of a run that match an SQL filter, and reads single ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from ratchet.flows.ui.documents import CLIP, THUMBNAILS, Bar, Filter, Order, Trajectories, TrajectoryLine
from ratchet.infra.runs.sql import DataFile, FileTable, Statement, Tables
from ratchet.infra.runs.statements import SQLProcess, StatementFailed
from ratchet.infra.store.log import Corrupt, read_verified
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import ObjectRef
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import IMAGES, trajectory_of

if TYPE_CHECKING:
    import pandas as pd

LISTED = 200
"""Largest number of trajectories in a list."""
SAMPLED = 256
"""Trajectories of an iteration from which the scales of colours are computed."""
BARS = 24
"""Largest number of bars of a histogram."""
CHECK_S = 30.0
T = TypeVar("T")
ORDERS: dict[Order, str] = {
    "best": "score DESC NULLS LAST",
    "worst": "score ASC NULLS LAST",
    "longest": "length DESC NULLS LAST, len(response) DESC",
    "shortest": "length ASC NULLS LAST, len(response) ASC",
    "newest": "iteration DESC, score DESC NULLS LAST",
}
TEXTS = ("prompt", "response", "ground_truth")


def matching(child: SQLProcess, tables: Tables, wanted: Filter) -> Trajectories:
    """Lists the trajectories that match a filter: the first `LISTED` in its order, the numbers of matching and of all
    ones, and the damages.

    Raises `UserError` if DuckDB rejects the condition, or it takes too much time or memory.
    """
    listed, damages = _of_readable(tables, lambda readable: _matching(child, readable, wanted))
    return listed.model_copy(update={"damages": damages})


def _matching(child: SQLProcess, tables: Tables, wanted: Filter) -> Trajectories:
    columns = tables.columns.get("trajectories")
    if columns is None:
        return Trajectories(lines=[], scores=[], lengths=[], matching=0, total=0, damages=[])
    images = "coalesce(images, [])" if IMAGES in columns else "[]::VARCHAR[]"
    score, length = "score" if "score" in columns else "NULL::FLOAT", "len(response_ids)"
    conditions: list[str] = []
    parameters: dict[str, str | float] = {}
    if wanted.text:
        conditions.append(" OR ".join(f"contains(lower(coalesce({column}, '')), lower($text))" for column in TEXTS))
        parameters["text"] = wanted.text
    for name, value, condition in (
        ("low", wanted.low, "score >= $low"),
        ("high", wanted.high, "score <= $high"),
        ("shortest", wanted.shortest, f"{length} >= $shortest"),
        ("longest", wanted.longest, f"{length} <= $longest"),
        ("prompt_id", wanted.prompt_id or None, "prompt_id = $prompt_id"),
        ("like", wanted.like or None, "prompt = (SELECT prompt FROM trajectories WHERE trajectory_id = $like LIMIT 1)"),
    ):
        if value is not None:
            conditions.append(condition)
            parameters[name] = value
    where = " AND ".join(f"({condition})" for condition in conditions) or "true"
    # a view, because text that closes the parenthesis could otherwise make a result that fills this process's memory;
    # a comment in it ends with its line
    filtered = f"CREATE TEMP VIEW filtered AS SELECT * FROM trajectories WHERE ({wanted.where.strip() or 'true'}\n)"
    texts = ", ".join(
        f"left(coalesce({column}, ''), {CLIP}) AS {column}"
        for column in ("trajectory_id", "prompt_id", "finish_reason", "response")
    )
    listed = (
        f"SELECT iteration, {score} AS score, {length} AS length, {texts}, "
        f"{images}[1:{THUMBNAILS}] AS images, greatest(len({images}) - {THUMBNAILS}, 0) AS more_images, "
        f"count(*) OVER () AS matching FROM filtered "
        f"WHERE {where} ORDER BY {ORDERS[wanted.order]}, iteration DESC, trajectory_id LIMIT {LISTED}"
    )
    drawn = () if wanted.prompt_id or wanted.like else (score, length)  # a group needs no histogram
    try:
        _, frame, every, *histograms = child.ask(
            tables,
            Statement(filtered),
            Statement(listed, parameters),
            Statement("SELECT count(*) AS n FROM trajectories"),
            *(Statement(_histogram(f"SELECT {x} AS x FROM filtered WHERE {where}"), parameters) for x in drawn),
        )
    except StatementFailed as error:
        raise _explained(error, wanted.where, columns) from error
    frame = frame.rename(columns={"trajectory_id": "id"}).astype({"score": object, "length": object})
    for name in ("score", "length"):
        frame[name] = frame[name].where(frame[name].notna(), None)
    frame["images"] = frame["images"].map(list)
    count = int(frame["matching"][0]) if len(frame) else 0
    lines = [TrajectoryLine.model_validate(row) for row in frame.drop(columns="matching").to_dict("records")]
    bars = [[Bar.model_validate(bar) for bar in histogram.to_dict("records")] for histogram in histograms]
    scores, lengths = bars or ([], [])
    total = int(every["n"][0])
    return Trajectories(lines=lines, scores=scores, lengths=lengths, matching=count, total=total, damages=[])


def _histogram(values: str) -> str:
    """Returns a statement that counts the column `x` of a statement in at most `BARS` bars of equal width, or each of
    its values if they are fewer."""
    return f"""
        WITH counted AS (SELECT x::DOUBLE AS x, count(*) AS n FROM ({values}) WHERE isfinite(x::DOUBLE) GROUP BY 1),
        whole AS (SELECT min(x) AS least, max(x) - min(x) AS span, count(*) <= {BARS} AS few FROM counted)
        SELECT min(x) AS low, max(x) AS high, sum(n)::BIGINT AS count FROM counted, whole
        GROUP BY CASE WHEN few THEN x ELSE least({BARS} - 1, floor({BARS} * (x - least) / span)) END ORDER BY low
    """


def full_rows(
    child: SQLProcess, tables: Tables, iteration: int, trajectory_id: str | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Reads trajectories of an iteration, with the columns of all stages.

    Args:
        trajectory_id: The only one to read, with all conversations of its agent; None: the first `SAMPLED` by id.

    Returns:
        A row per trajectory or conversation, without columns of stages that have no commits, and the damages. Empty if
        there is none.
    """
    import pandas as pd

    where = "" if trajectory_id is None else "WHERE split_part(trajectory_id, '-b', 1) = $id"
    sql = f"SELECT * FROM trajectories {where} ORDER BY trajectory_id LIMIT {SAMPLED}"
    statement = Statement(sql, {} if trajectory_id is None else {"id": trajectory_of(trajectory_id)})

    def rows(readable: Tables) -> pd.DataFrame:
        if "trajectories" not in readable.columns:
            return pd.DataFrame()
        try:
            [frame] = child.ask(readable, statement)
        except StatementFailed as error:
            raise UserError(f"iteration {iteration}: {error}; `ratchet verify` lists all damage") from error
        return frame

    return _of_readable(tables, rows)


def _of_readable(tables: Tables, ask: Callable[[Tables], T]) -> tuple[T, list[str]]:
    """Asks about the readable files, and names the others."""
    try:
        return ask(tables), []
    except UserError as error:
        if not isinstance(error.__cause__, StatementFailed) or error.__cause__.kind != "unreadable":
            raise
    # all files are checked only now, since that takes long and damage is rare
    deadline = time.monotonic() + CHECK_S
    damages: dict[str, None] = {}

    def is_sound(file: DataFile) -> bool:
        if time.monotonic() > deadline:
            raise UserError(
                f"finding what cannot be read takes longer than {CHECK_S:.0f} s: choose one iteration; "
                "`ratchet verify` lists all damage"
            )
        try:
            _check(file)
        except Corrupt as damage:
            damages[str(damage)] = None
            return False
        return True

    def sound(table: FileTable) -> FileTable:
        return replace(table, files=tuple(file for file in table.files if is_sound(file)))

    return ask(replace(tables, files=tuple(map(sound, tables.files)))), list(damages)


@lru_cache(maxsize=65536)
def _check(file: DataFile) -> None:
    """Raises `Corrupt` if a data file is missing or damaged. Sound files are immutable: they are read once."""
    read_verified(ObjectStore(file.url), ObjectRef(key=file.key, sha256=file.sha256))


def _explained(error: StatementFailed, where: str, columns: Sequence[str]) -> UserError:
    if error.kind in ("time", "memory"):
        return UserError(f"the filter is too much: {error}; choose one iteration, or a simpler condition")
    if not where.strip():
        return UserError(f"{error}; `ratchet verify` lists all damage")
    return UserError(f"where {where!r}: {error}; columns are {', '.join(columns)}")
