"""SQL over what a run has committed, in place: DuckDB reads the Parquet files where they lie, and only the columns and
row groups that a query needs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import FSSpecHandler, PyFileSystem

from infra.runs import Run
from infra.store.records import ShardRef
from infra.store.run_store import VALIDATE
from rlhf.errors import UserError
from rlhf.schema import TRAJECTORY

if TYPE_CHECKING:
    import pandas as pd

Files = list[tuple[int, ShardRef]]


def query(run: Run, sql: str) -> pd.DataFrame:
    """The answer to a query over these tables:

    - one for each stage, by its name, with its own columns, `trajectory_id` and `iteration`; `validate` likewise;
    - `trajectories`: the stages joined, one row a trajectory, and NULL where a stage has not got to it;
    - `metrics`: one row for each closed iteration.

    Raises `UserError` for what DuckDB refuses.
    """
    connection = connect(run)
    try:
        return answer(connection, sql)
    except duckdb.Error as error:
        raise UserError(f"query: {str(error).splitlines()[0]}; tables are {', '.join(_tables(connection))}") from None


def answer(connection: duckdb.DuckDBPyConnection, sql: str) -> pd.DataFrame:
    """Of one statement. Raises `UserError` for none, or several."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UserError(f"the query has {len(statements)} statements: write one, such as `select * from trajectories`")
    frame: pd.DataFrame = connection.execute(statements[0]).df()
    return frame


def isolated() -> duckdb.DuckDBPyConnection:
    """A connection that reads and writes no file, whatever it is asked."""
    return duckdb.connect(config={"enable_external_access": "false", "lock_configuration": "true"})


def connect(run: Run) -> duckdb.DuckDBPyConnection:
    """A connection in which the run's tables are known, and which reaches nothing else."""
    connection = isolated()
    states = [run.store.iteration_state(iteration) for iteration in range(run.state.iteration + 1)]
    columns: dict[str, list[str]] = {}
    for stage in dict.fromkeys(
        (*TRAJECTORY.stages, *(name for state in states for name in (*state.shards, *state.stages)))
    ):
        files = [(number, ref) for number, state in enumerate(states) for ref in run.store.shards_of(state, stage)]
        if files:
            rows = _dataset(run, stage, files)
            connection.register(stage, rows)
            columns[stage] = [name for name in rows.schema.names if name not in ("trajectory_id", "iteration")]
    metrics = run.metrics()
    connection.register("metrics", metrics)
    if TRAJECTORY.stages[0] in columns:
        connection.execute(_joined({stage: names for stage, names in columns.items() if stage != VALIDATE}))
    return connection


def _joined(stages: dict[str, list[str]]) -> str:
    first, *others = stages
    columns = [f'"{stage}"."{name}"' for stage, names in stages.items() for name in names]  # select is a word of SQL
    joins = " ".join(f'LEFT JOIN "{stage}" ON "{stage}".trajectory_id = {first}.trajectory_id' for stage in others)
    return (
        f"CREATE VIEW trajectories AS SELECT {first}.iteration, {first}.trajectory_id, {', '.join(columns)} "
        f"FROM {first} {joins}"
    )


def _dataset(run: Run, stage: str, files: Files) -> ds.Dataset:
    """The files as one dataset, with `iteration` as a column, and null in columns that are younger than a file.

    Those of a fork may lie in several stores.
    """
    by_store: dict[str, Files] = defaultdict(list)
    for iteration, ref in files:
        by_store[run.store.objects.of_run(ref.run).url].append((iteration, ref))
    parts: list[Any] = []
    for url, found in by_store.items():
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        filesystem = PyFileSystem(FSSpecHandler(fs))
        paths = [f"{root.rstrip('/')}/{ref.key}" for _, ref in found]
        form = ds.ParquetFileFormat()
        names = ("trajectory_id", *TRAJECTORY.names(stage))
        known = stage in TRAJECTORY.stages  # of others, the newest file tells
        schema = TRAJECTORY.arrow(names) if known else form.inspect(paths[-1], filesystem=filesystem)
        parts.append(
            ds.FileSystemDataset.from_paths(
                paths,
                schema=schema.append(pa.field("iteration", pa.int32())),
                format=form,
                filesystem=filesystem,
                partitions=[ds.field("iteration") == pa.scalar(iteration, pa.int32()) for iteration, _ in found],
            )
        )
    return parts[0] if len(parts) == 1 else ds.dataset(parts)


def _tables(connection: duckdb.DuckDBPyConnection) -> list[str]:
    return [name for (name,) in connection.execute("SHOW TABLES").fetchall()]
