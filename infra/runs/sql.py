"""SQL over tables that are described, not loaded. DuckDB reads the Parquet files in place, and only the columns and row
groups that a statement needs.

The process that runs statements (`ratchet.infra.runs.sql_process`) imports this module, which therefore imports little.
"""

from __future__ import annotations

import base64
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import FSSpecHandler, PyFileSystem

from ratchet.infra.store.object_store import Backend, backend_for
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import PARTS

LONGEST_REASON = 4000
"""Largest number of characters of a reason, which may contain a value of any size."""
Parameters = Mapping[str, str | float | None]


@dataclass(frozen=True)
class Statement:
    """One statement, with the values of its `$name`s."""

    sql: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class DataFile:
    """A Parquet file in a run's folder."""

    url: str
    """The run's folder."""
    key: str
    sha256: str
    iteration: int | None = None
    """The value of the column `iteration` in all of its rows; None: there is no such column."""


@dataclass(frozen=True)
class FileTable:
    """Data files as one table. Columns that a file lacks are null."""

    name: str
    schema: pa.Schema
    files: tuple[DataFile, ...]


@dataclass(frozen=True)
class Tables:
    """Everything that a statement can read."""

    files: tuple[FileTable, ...] = ()
    rows: Mapping[str, pa.Table] = field(default_factory=dict)
    """Tables in memory, by name."""
    views: tuple[str, ...] = ()
    """Statements that create views of the tables and of earlier views."""
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The columns of the tables that users see, by name."""

    def to_bytes(self) -> list[bytes]:
        """Encodes the tables for another process: JSON, then a stream of Arrow for each table in memory."""
        files = [
            {**asdict(table), "schema": base64.b64encode(table.schema.serialize()).decode()} for table in self.files
        ]
        head = {"files": files, "rows": list(self.rows), "views": self.views}
        return [json.dumps(head).encode(), *map(arrow_bytes, self.rows.values())]

    @classmethod
    def from_bytes(cls, parts: Sequence[bytes]) -> Tables:
        """Decodes the result of `to_bytes`, which lacks `columns`."""
        head = json.loads(parts[0])
        files = (
            FileTable(
                table["name"],
                pa.ipc.read_schema(pa.py_buffer(base64.b64decode(table["schema"]))),
                tuple(DataFile(**file) for file in table["files"]),
            )
            for table in head["files"]
        )
        rows = dict(zip(head["rows"], map(arrow_table, parts[1:]), strict=True))
        return cls(tuple(files), rows, tuple(head["views"]))


def arrow_bytes(table: pa.Table | pa.RecordBatchReader) -> bytes:
    """Encodes a table as a stream of Arrow."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        for batch in table.to_batches() if isinstance(table, pa.Table) else table:
            stream.write_batch(batch)
    return sink.getvalue()


def arrow_table(data: bytes) -> pa.Table:
    """Decodes a stream of Arrow."""
    return pa.ipc.open_stream(pa.py_buffer(data)).read_all()


def isolated(memory_bytes: int, threads: int) -> duckdb.DuckDBPyConnection:
    """Makes a connection that cannot read or write files, whatever the query."""
    return duckdb.connect(
        config={
            "enable_external_access": "false",
            "memory_limit": f"{memory_bytes >> 20}MiB",
            "threads": str(threads),
            "temp_directory": "",
            "arrow_lossless_conversion": "true",
            "python_enable_replacements": "false",  # otherwise a name could be a variable of this process
            "lock_configuration": "true",  # otherwise a statement could undo the rest
        }
    )


def connect(tables: Tables, memory_bytes: int, threads: int) -> duckdb.DuckDBPyConnection:
    """Makes a connection with these tables and access to nothing else; see `isolated`."""
    connection = isolated(memory_bytes, threads)
    for table in tables.files:
        parts = [field.name for field in table.schema if field.type == PARTS]
        connection.register(f"{table.name}_stored" if parts else table.name, _dataset(table))
        if parts:  # so that `reward_parts['length']` is a number
            maps = ", ".join(f'map_from_entries("{name}") AS "{name}"' for name in parts)
            connection.execute(f'CREATE VIEW "{table.name}" AS SELECT * REPLACE ({maps}) FROM "{table.name}_stored"')
    for name, rows in tables.rows.items():
        connection.register(name, rows)
    for view in tables.views:
        connection.execute(view)
    return connection


def execute(connection: duckdb.DuckDBPyConnection, statement: Statement) -> duckdb.DuckDBPyConnection:
    """Runs one statement, and returns the connection, which holds the result.

    Raises:
        UserError: the text holds no statement or several.
        duckdb.Error: DuckDB rejects the statement, or cannot read a data file.
        SystemError: the bytes of a damaged file mislead pyarrow's reader.
    """
    found = connection.extract_statements(statement.sql)
    if len(found) != 1:
        raise UserError(f"the query has {len(found)} statements: write one, such as `select * from trajectories`")
    return connection.execute(found[0], dict(statement.parameters))


def reason(error: Exception) -> str:
    """Returns DuckDB's message in one line, with the names that it suggests instead of an unknown one."""
    first, *later = str(error).splitlines() or [type(error).__name__]
    suggested = [line.strip() for line in later if line.startswith(("Candidate bindings:", "Did you mean"))]
    return " ".join([first, *suggested]).replace("Candidate bindings:", "Nearest columns:")[:LONGEST_REASON]


def file_schema(url: str, key: str) -> pa.Schema:
    """Reads the schema of a data file. Raises `OSError` or `pa.ArrowInvalid` if it cannot be read."""
    return ds.ParquetFileFormat().inspect(key, filesystem=PyFileSystem(_Opening(backend_for(url))))


def _dataset(table: FileTable) -> ds.Dataset:
    """Makes one dataset of the files, which may be in several stores, like those of a fork."""
    by_store: dict[str, list[DataFile]] = defaultdict(list)
    for file in table.files:
        by_store[file.url].append(file)
    parts = [
        ds.FileSystemDataset.from_paths(
            [file.key for file in files],
            schema=table.schema,
            format=ds.ParquetFileFormat(),
            filesystem=PyFileSystem(_Opening(backend_for(url))),
            partitions=[
                ds.scalar(True)
                if file.iteration is None
                else ds.field("iteration") == pa.scalar(file.iteration, pa.int32())
                for file in files
            ],
        )
        for url, files in by_store.items()
    ]
    return ds.dataset(parts) if parts else ds.dataset(table.schema.empty_table())


class _Opening(FSSpecHandler):  # type: ignore[misc]  # pyarrow has no types
    """A file system that opens data files by their keys."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(fsspec.filesystem("memory"))  # nothing but the method below is used
        self._backend = backend

    def open_input_file(self, key: str) -> pa.NativeFile:
        try:
            return pa.PythonFile(self._backend.open(key), mode="r")
        # An exception raised here, in a thread of pyarrow's, can leave it and DuckDB waiting for each other forever. An
        # empty file is refused in an orderly way.
        except OSError:
            return pa.PythonFile(io.BytesIO(b""), mode="r")
