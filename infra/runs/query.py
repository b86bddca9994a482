"""SQL over the committed data of runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from ratchet.infra.runs.run import OnDamage, Run, refuse, row_stages
from ratchet.infra.runs.sql import DataFile, FileTable, Statement, Tables, file_schema
from ratchet.infra.runs.statements import SQLLimits, StatementFailed, Statements, ask_here
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.object_store import LocalBackend
from ratchet.infra.store.records import RunState, ShardRef
from ratchet.infra.store.run_store import VALIDATE, served_digest
from ratchet.infra.workers.call_log import CALLS
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import TRAJECTORY

if TYPE_CHECKING:
    import pandas as pd

LIMITS = SQLLimits(
    seconds=3600.0,
    memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4,
    threads=os.cpu_count() or 1,
)
"""Limits of a query: most of the machine."""
_statements = Statements(LIMITS)


def query(runs: Run | Sequence[Run], sql: str) -> pd.DataFrame:
    """Runs a query over these tables, in which the column `run` names the run:

    - one per stage, with its name, its own columns, `trajectory_id` and `iteration`; `validate` likewise;
    - `trajectories`: the stages joined, one row per trajectory, with NULL for stages that have not processed it yet;
    - `metrics`: one row per closed iteration;
    - `served`: the answers of `ratchet serve`, if there are any.

    Args:
        sql: one statement.

    Raises:
        UserError: DuckDB rejects the query, it exceeds `LIMITS`, `sql` is not one statement, or `runs` is a name
            instead of a run.
        Corrupt: an index, a manifest or a metrics file is missing or damaged.
    """
    if isinstance(runs, str):
        raise UserError(f"query: {runs!r} is a text, not a run: query(open_run(URL), SQL) takes a run that is open")
    with _statements.child() as child:
        tables = tables_of(runs)
        statement = Statement(sql)
        try:
            is_here = _is_in_memory(tables)
            [frame] = ask_here(LIMITS, tables, statement) if is_here else child.ask(tables, statement)
        except StatementFailed as error:
            hint = {
                "unreadable": "`ratchet verify` lists all damage; ",
                "syntax": "write SQL, such as `select iteration, score from trajectories`; ",
                "memory": "choose fewer iterations or columns; ",
                "time": "choose fewer iterations or columns; ",
            }.get(error.kind, "")
            raise UserError(f"query: {error}; {hint}tables are {', '.join(sorted(tables.columns))}") from None
    return frame


def tables_of(runs: Run | Sequence[Run], iterations: Sequence[int] | None = None, damaged: OnDamage = refuse) -> Tables:
    """Describes the tables of `query`. Reads indexes and manifests.

    Args:
        iterations: the iterations of the tables; None for all, including the open ones. With a choice there is no table
            `metrics`.
        damaged: called with each error of a missing or damaged object, whose rows are then left out.

    Returns:
        The tables. A statement fails if it reads a data file that is missing or damaged.

    Raises:
        Corrupt: an object is missing or damaged, unless `damaged` handles it.
    """
    runs = [runs] if isinstance(runs, Run) else runs
    files: list[FileTable] = []
    rows: dict[str, pa.Table] = {}
    views: list[str] = []
    columns: dict[str, dict[str, None]] = {}
    parts: dict[str, list[str]] = {}
    for number, (name, run) in enumerate(zip(names(runs), runs, strict=True)):
        prefix = f"_{number}_"
        tables = _tables_of(run, prefix, iterations, damaged)
        files += tables.files
        rows |= tables.rows
        views += tables.views
        for table, its_columns in tables.columns.items():
            columns.setdefault(table, {"run": None}).update(dict.fromkeys(its_columns))
            literal = name.replace("'", "''")
            parts.setdefault(table, []).append(f"SELECT '{literal}' AS run, * FROM \"{prefix}{table}\"")
    views += [f'CREATE VIEW "{table}" AS {" UNION ALL BY NAME ".join(selects)}' for table, selects in parts.items()]
    return Tables(tuple(files), rows, tuple(views), {table: list(its_names) for table, its_names in columns.items()})


def names(runs: Sequence[Run]) -> list[str]:
    """Names each run beside the others: by its name, or by its URL if two have the same name."""
    urls = [run.store.url for run in runs]
    leaves = [url.rpartition("/")[2] for url in urls]
    return [url if leaves.count(leaf) > 1 else leaf for url, leaf in zip(urls, leaves, strict=True)]


def _tables_of(run: Run, prefix: str, iterations: Sequence[int] | None, damaged: OnDamage) -> Tables:
    """Describes the tables of one run. Their names begin with a prefix, which the keys of `columns` lack."""
    chosen = range(run.state.iteration + 1) if iterations is None else iterations
    states: list[RunState] = []
    for iteration in chosen:
        try:
            states.append(run.store.iteration_state(iteration))
        except Corrupt as damage:
            damaged(damage)
    files: list[FileTable] = []
    columns: dict[str, list[str]] = {}
    for stage in dict.fromkeys(name for state in states for name in row_stages(state)):
        if (table := _stage_table(run, stage, prefix, states, damaged)) is not None:
            files.append(table)
            columns[stage] = [name for name in table.schema.names if name not in ("trajectory_id", "iteration")]
    views: list[str] = []
    seen = {stage: ["trajectory_id", *its_columns, "iteration"] for stage, its_columns in columns.items()}
    rows: dict[str, pa.Table] = {}
    if iterations is None:
        metrics = pa.Table.from_pandas(run.metrics(damaged=damaged), preserve_index=False)
        rows[f"{prefix}metrics"] = metrics
        seen["metrics"] = metrics.column_names
        if keys := run.store.served_keys():
            url = _absolute(run, None)
            served = (DataFile(url, key, served_digest(key)) for key in keys)
            files.append(FileTable(f"{prefix}served_files", CALLS, tuple(served)))
            once = "QUALIFY row_number() OVER (PARTITION BY call_id) = 1"  # a crash may leave an answer in two files
            views.append(f'CREATE VIEW "{prefix}served" AS SELECT * FROM "{prefix}served_files" {once}')
            seen["served"] = CALLS.names
    if TRAJECTORY.stages[0] in columns:
        stages = {stage: its_columns for stage, its_columns in columns.items() if stage != VALIDATE}
        views.append(_joined(stages, prefix))
        seen["trajectories"] = ["iteration", "trajectory_id", *(name for every in stages.values() for name in every)]
    return Tables(tuple(files), rows, tuple(views), seen)


def _stage_table(run: Run, stage: str, prefix: str, states: Iterable[RunState], damaged: OnDamage) -> FileTable | None:
    """Describes the data files of a stage; None if there are none. A stage outside the schema has the columns of its
    newest file."""
    files: list[DataFile] = []
    for state in states:
        try:
            refs = run.store.shards_of(state, stage)
        except Corrupt as damage:
            damaged(damage)
            continue
        files += [DataFile(_absolute(run, ref), ref.key, ref.sha256, state.iteration) for ref in refs]
    if not files:
        return None
    schema = TRAJECTORY.arrow(("trajectory_id", *TRAJECTORY.names(stage))) if stage in TRAJECTORY.stages else None
    while schema is None and files:
        newest = files[-1]
        try:
            schema = file_schema(newest.url, newest.key)
        except (OSError, pa.ArrowInvalid):
            damaged(Corrupt(f"{newest.url}/{newest.key} cannot be read: restore it from a backup"))
            files.pop()
    if schema is None:
        return None
    return FileTable(prefix + stage, schema.append(pa.field("iteration", pa.int32())), tuple(files))


def _is_in_memory(tables: Tables) -> bool:
    """True if data files are in this process's memory, which other processes do not see."""
    return any(file.url.startswith("memory:") for table in tables.files for file in table.files)


def _absolute(run: Run, ref: ShardRef | None) -> str:
    """Returns the absolute URL of the run that holds a file, for a process that may have another working folder."""
    objects = run.store.objects.of_run(None if ref is None else ref.run)
    return f"file://{objects.backend.root.absolute()}" if isinstance(objects.backend, LocalBackend) else objects.url


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
