"""SQL over a run's committed data. DuckDB reads the Parquet files in place, and only the columns and row groups that a
query needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import FSSpecHandler, PyFileSystem

from infra.runs import Run, row_stages
from infra.store.records import ShardRef
from infra.store.run_store import VALIDATE
from rlhf.errors import UserError
from rlhf.schema import TRAJECTORY

if TYPE_CHECKING:
    import pandas as pd

Files = list[tuple[int, ShardRef]]


def query(run: Run, sql: str) -> pd.DataFrame:
    """Run a query over these tables:

    - one per stage, with its name, its own columns, `trajectory_id` and `iteration`; `validate` likewise;
    - `trajectories`: the stages joined, one row per trajectory, with NULL for stages that have not processed it yet;
    - `metrics`: one row per closed iteration.

    Args:
        run: the run to query.
        sql: one statement.

    Returns:
        The result.

    Raises:
        UserError: DuckDB rejects the query, or `sql` is not one statement.
        Corrupt: an index, a manifest or a metrics file is missing or damaged.
    """
    connection = connect(run)
    try:
        return answer(connection, sql)
    except duckdb.Error as error:
        raise UserError(f"query: {str(error).splitlines()[0]}; tables are {', '.join(_tables(connection))}") from None


def answer(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Mapping[str, str | float | None] | None = None
) -> pd.DataFrame:
    """The result of one statement.

    Args:
        connection: a connection with tables.
        sql: the statement.
        parameters: values of the statement's `$name`s.

    Returns:
        The rows. Lists are arrays, and maps are dicts.

    Raises:
        UserError: `sql` holds no statement or several.
        duckdb.Error: DuckDB rejects the statement.
    """
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UserError(f"the query has {len(statements)} statements: write one, such as `select * from trajectories`")
    frame: pd.DataFrame = connection.execute(statements[0], dict(parameters or {})).df()
    return frame


def isolated() -> duckdb.DuckDBPyConnection:
    """A connection that cannot read or write files, whatever the query."""
    return duckdb.connect(config={"enable_external_access": "false", "lock_configuration": "true"})


def connect(run: Run, iterations: Sequence[int] | None = None) -> duckdb.DuckDBPyConnection:
    """A connection with the run's tables and access to nothing else.

    Args:
        run: the run.
        iterations: what the tables cover; None for all, including the open one. With less than all there is no table
            `metrics`.
    """
    connection = isolated()
    chosen = range(run.state.iteration + 1) if iterations is None else iterations
    states = [run.store.iteration_state(iteration) for iteration in chosen]
    columns: dict[str, list[str]] = {}
    for stage in dict.fromkeys(name for state in states for name in row_stages(state)):
        files = [(state.iteration, ref) for state in states for ref in run.store.shards_of(state, stage)]
        if files:
            rows = _dataset(run, stage, files)
            connection.register(stage, rows)
            columns[stage] = [name for name in rows.schema.names if name not in ("trajectory_id", "iteration")]
    if iterations is None:
        connection.register("metrics", run.metrics())
    if TRAJECTORY.stages[0] in columns:
        connection.execute(_joined({stage: names for stage, names in columns.items() if stage != VALIDATE}))
    return connection


def _joined(stages: dict[str, list[str]]) -> str:
    first, *later_stages = stages
    columns = [
        f'"{stage}"."{name}"' for stage, names in stages.items() for name in names
    ]  # quoted, because `select` is an SQL keyword
    joins = " ".join(
        f'LEFT JOIN "{stage}" ON "{stage}".trajectory_id = {first}.trajectory_id' for stage in later_stages
    )
    return (
        f"CREATE VIEW trajectories AS SELECT {first}.iteration, {first}.trajectory_id, {', '.join(columns)} "
        f"FROM {first} {joins}"
    )


def _dataset(run: Run, stage: str, files: Files) -> ds.Dataset:
    """The files as one dataset with a column `iteration`. Columns that a file of an older release lacks are null.

    The files of a fork may be in several stores.
    """
    by_store: dict[str, Files] = defaultdict(list)
    for iteration, ref in files:
        by_store[run.store.objects.of_run(ref.run).url].append((iteration, ref))
    parts: list[Any] = []
    for url, store_files in by_store.items():
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        filesystem = PyFileSystem(FSSpecHandler(fs))
        paths = [f"{root.rstrip('/')}/{ref.key}" for _, ref in store_files]
        form = ds.ParquetFileFormat()
        names = ("trajectory_id", *TRAJECTORY.names(stage))
        is_declared = stage in TRAJECTORY.stages  # other stages have the schema of their newest file
        schema = TRAJECTORY.arrow(names) if is_declared else form.inspect(paths[-1], filesystem=filesystem)
        parts.append(
            ds.FileSystemDataset.from_paths(
                paths,
                schema=schema.append(pa.field("iteration", pa.int32())),
                format=form,
                filesystem=filesystem,
                partitions=[ds.field("iteration") == pa.scalar(iteration, pa.int32()) for iteration, _ in store_files],
            )
        )
    return parts[0] if len(parts) == 1 else ds.dataset(parts)


def _tables(connection: duckdb.DuckDBPyConnection) -> list[str]:
    return [name for (name,) in connection.execute("SHOW TABLES").fetchall()]
