"""SQL over the committed data of runs. DuckDB reads the Parquet files in place, and only the columns and row groups
that a query needs."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import FSSpecHandler, PyFileSystem

from infra.runs import OnDamage, Run, refuse, row_stages
from infra.store.log import Corrupt
from infra.store.records import RunState, ShardRef
from infra.store.run_store import VALIDATE
from infra.workers.call_log import CALLS
from rlhf.errors import UserError
from rlhf.schema import TRAJECTORY

if TYPE_CHECKING:
    import pandas as pd

Files = list[tuple[int, ShardRef]]
FAILURES = (duckdb.Error, SystemError)
"""What a statement raises: the second if the bytes of a damaged file mislead pyarrow's reader."""
UNREADABLE = (duckdb.InvalidInputException, SystemError)
"""What it raises if a data file cannot be read."""


def query(runs: Run | Sequence[Run], sql: str) -> pd.DataFrame:
    """Run a query over these tables, in which the column `run` names the run:

    - one per stage, with its name, its own columns, `trajectory_id` and `iteration`; `validate` likewise;
    - `trajectories`: the stages joined, one row per trajectory, with NULL for stages that have not processed it yet;
    - `metrics`: one row per closed iteration;
    - `served`: the answers of `ratchet serve`, if there are any.

    Args:
        runs: the run to query, or several.
        sql: one statement.

    Returns:
        The result.

    Raises:
        UserError: DuckDB rejects the query, `sql` is not one statement, or `runs` is a name instead of a run.
        Corrupt: an index, a manifest or a metrics file is missing or damaged.
    """
    if isinstance(runs, str):
        raise UserError(f"query: {runs!r} is a text, not a run: query(open_run(URL), SQL) takes a run that is open")
    connection = connect(runs)
    try:
        return answer(connection, sql)
    except FAILURES as error:
        hint = "`ratchet verify` lists all damage; " if isinstance(error, UNREADABLE) else ""
        if isinstance(error, duckdb.ParserException):
            hint = "write SQL, such as `select iteration, score from trajectories`; "
        tables = f"tables are {', '.join(_tables(connection))}"
        raise UserError(f"query: {reason(error)}; {hint}{tables}") from None


def reason(error: Exception) -> str:
    """What DuckDB says is wrong, in one line, with the names that it suggests instead of an unknown one."""
    first, *later = str(error).splitlines()
    suggested = [line.strip() for line in later if line.startswith(("Candidate bindings:", "Did you mean"))]
    return " ".join([first, *suggested]).replace("Candidate bindings:", "Nearest columns:")


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
        duckdb.Error: DuckDB rejects the statement, or cannot read a data file.
        SystemError: a data file cannot be read.
    """
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UserError(f"the query has {len(statements)} statements: write one, such as `select * from trajectories`")
    frame: pd.DataFrame = connection.execute(statements[0], dict(parameters or {})).df()
    return frame


def isolated() -> duckdb.DuckDBPyConnection:
    """A connection that cannot read or write files, whatever the query."""
    return duckdb.connect(config={"enable_external_access": "false", "lock_configuration": "true"})


def connect(
    runs: Run | Sequence[Run],
    iterations: Sequence[int] | None = None,
    damaged: OnDamage = refuse,
    check: Callable[[Run, ShardRef], None] | None = None,
) -> duckdb.DuckDBPyConnection:
    """A connection with the tables of `query` and access to nothing else.

    Args:
        runs: the run, or several.
        iterations: what the tables cover; None for all, including the open ones. With a choice there is no table
            `metrics`.
        damaged: called with each error of a missing or damaged object, whose rows are then left out.
        check: raises `Corrupt` for a data file that cannot be read; None: a query fails if it reads one.

    Raises:
        Corrupt: an object is missing or damaged, unless `damaged` handles it.
    """
    runs = [runs] if isinstance(runs, Run) else runs
    connection = isolated()
    tables: dict[str, list[str]] = {}
    for number, (name, run) in enumerate(zip(names(runs), runs, strict=True)):
        for table in _register(connection, run, f"{OF_ONE_RUN}{number}_", iterations, damaged, check):
            rows = f"SELECT '{name.replace(chr(39), chr(39) * 2)}' AS run, * FROM \"{OF_ONE_RUN}{number}_{table}\""
            tables.setdefault(table, []).append(rows)
    for table, parts in tables.items():
        connection.execute(f'CREATE VIEW "{table}" AS {" UNION ALL BY NAME ".join(parts)}')
    return connection


def names(runs: Sequence[Run]) -> list[str]:
    """What to call each run beside the others: its name, or its URL if two have the same name."""
    urls = [run.store.url for run in runs]
    leaves = [url.rpartition("/")[2] for url in urls]
    return [url if leaves.count(leaf) > 1 else leaf for url, leaf in zip(urls, leaves, strict=True)]


OF_ONE_RUN = "_"
"""How names of the tables of one run begin, of which the tables that users see are the union."""


def _register(
    connection: duckdb.DuckDBPyConnection,
    run: Run,
    prefix: str,
    iterations: Sequence[int] | None,
    damaged: OnDamage,
    check: Callable[[Run, ShardRef], None] | None,
) -> list[str]:
    """Register the tables of one run, with a prefix; returns their names without it."""
    chosen = range(run.state.iteration + 1) if iterations is None else iterations
    states: list[RunState] = []
    for iteration in chosen:
        try:
            states.append(run.store.iteration_state(iteration))
        except Corrupt as damage:
            damaged(damage)
    columns: dict[str, list[str]] = {}
    for stage in dict.fromkeys(name for state in states for name in row_stages(state)):
        if files := _files(run, stage, states, damaged, check):
            rows = _dataset(run, stage, files)
            connection.register(prefix + stage, rows)
            columns[stage] = [name for name in rows.schema.names if name not in ("trajectory_id", "iteration")]
    tables = list(columns)
    if iterations is None:
        connection.register(f"{prefix}metrics", run.metrics(damaged=damaged))
        tables.append("metrics")
        if keys := run.store.served_keys():
            filesystem, paths = _located(run.store.url, keys)
            files = ds.FileSystemDataset.from_paths(
                paths, schema=CALLS, format=ds.ParquetFileFormat(), filesystem=filesystem
            )
            connection.register(f"{prefix}served_files", files)
            once = "QUALIFY row_number() OVER (PARTITION BY call_id) = 1"  # a crash may leave an answer in two files
            connection.execute(f'CREATE VIEW "{prefix}served" AS SELECT * FROM "{prefix}served_files" {once}')
            tables.append("served")
    if TRAJECTORY.stages[0] in columns:
        connection.execute(_joined({stage: names for stage, names in columns.items() if stage != VALIDATE}, prefix))
        tables.append("trajectories")
    return tables


def _files(
    run: Run,
    stage: str,
    states: Sequence[RunState],
    damaged: OnDamage,
    check: Callable[[Run, ShardRef], None] | None,
) -> Files:
    """The data files of a stage, each with its iteration."""
    files: Files = []
    for state in states:
        try:
            refs = run.store.shards_of(state, stage)
        except Corrupt as damage:
            damaged(damage)
            continue
        for ref in refs:
            try:
                if check is not None:
                    check(run, ref)
                files.append((state.iteration, ref))
            except Corrupt as damage:
                damaged(damage)
    return files


def _joined(stages: dict[str, list[str]], prefix: str) -> str:
    first, *later_stages = stages
    columns = [
        f'"{prefix}{stage}"."{name}"' for stage, names in stages.items() for name in names
    ]  # quoted, because `select` is an SQL keyword
    table = f'"{prefix}{first}"'
    joins = " ".join(
        f'LEFT JOIN "{prefix}{stage}" ON "{prefix}{stage}".trajectory_id = {table}.trajectory_id'
        for stage in later_stages
    )
    return (
        f'CREATE VIEW "{prefix}trajectories" AS SELECT {table}.iteration, {table}.trajectory_id, '
        f"{', '.join(columns)} FROM {table} {joins}"
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
        filesystem, paths = _located(url, [ref.key for _, ref in store_files])
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


def _located(url: str, keys: Sequence[str]) -> tuple[PyFileSystem, list[str]]:
    """The filesystem and the paths of files in a run's folder."""
    fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return PyFileSystem(_Opening(fs)), [f"{root.rstrip('/')}/{key}" for key in keys]


class _Opening(FSSpecHandler):  # type: ignore[misc]  # pyarrow has no types
    """Opens data files. One that is gone is opened as an empty file, which pyarrow refuses: an exception that is raised
    here, in a thread of pyarrow's, can leave it and DuckDB waiting for each other for ever."""

    def open_input_file(self, path: str) -> pa.NativeFile:
        try:
            return super().open_input_file(path)
        except OSError:
            return pa.PythonFile(io.BytesIO(b""), mode="r")


def _tables(connection: duckdb.DuckDBPyConnection) -> list[str]:
    every_name = [name for (name,) in connection.execute("SHOW TABLES").fetchall()]
    return [name for name in every_name if not name.startswith(OF_ONE_RUN)]
