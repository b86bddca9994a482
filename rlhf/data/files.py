"""Reads the rows of Parquet, JSON, CSV and Arrow files, at a local path or any fsspec URL.

A large file is not held in memory: its rows are read in place, by row group (Parquet) or by offset (JSON lines), or are
memory-mapped (Arrow).
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedReader, BytesIO, TextIOWrapper
from itertools import accumulate, chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Protocol

from ratchet.rlhf.config.sections import ENDINGS
from ratchet.rlhf.data.folders import data_files, unread
from ratchet.rlhf.data.formats import IMAGES, PROMPTS, image_values, without_nulls
from ratchet.rlhf.data.harbor import is_task, row_of, task_digest
from ratchet.rlhf.data.images import ImageError, digest_of, image_bytes, is_named
from ratchet.rlhf.errors import RatchetError, UserError, in_one_line

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Row = tuple[str, Mapping[str, Any]]
"""A row's location, for errors (file, and row or line number), and the row."""
HELD_BYTES = 256 * 2**20
"""Maximum size of a JSON lines file, and of the row groups of a Parquet file, kept in memory."""
BATCH_ROWS = 1024
"""Largest number of rows of a table converted to Python objects at a time."""
BATCH_BYTES = 2**25
"""Size of such rows, unless a single one is larger."""
BUFFER_BYTES = 2**20
"""Bytes that are read at a time from each column of a row group too large to be kept in memory."""
HEAD_BYTES = 1024
"""Bytes of a file that are read to detect its format."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
LISTS = ("prompt", "messages", "tools", "conversations", "completion", "response", "chosen", "rejected")
"""Columns that may hold lists of messages or tools, as JSON in a CSV file."""
OBJECTS = ("reward_model", "extra_info")
"""Columns whose cells in a CSV file are objects, as JSON."""


class RowReader(Protocol):
    """The rows of a file. Reading them raises UserError if the file or a row is malformed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]: ...


def open_rows(url: str) -> RowReader:
    """Indexes the rows of a file.

    Args:
        url: path or fsspec URL, such as ``hf://datasets/openai/gsm8k/main/....parquet``. The ending selects the format,
            one of `folders.FORMATS`; a file with another ending may hold JSON. ``.arrow`` is the format of
            `datasets.Dataset.save_to_disk`. The cells of ``.csv`` and ``.tsv`` are texts, and empty ones None; see
            `LISTS` and `OBJECTS`. A task folder of Harbor is one row.

    Returns:
        The rows. Those of a JSON array, of CSV and of a compressed file are held in memory. A JSON object over several
        lines is one row.
    """
    if is_task(Path(url)):
        return _Held(url, [row_of(Path(url))])
    if url.endswith(".parquet"):
        return _Parquet(url)
    if url.endswith(".arrow"):
        return _Arrow(url)
    name = url.removesuffix(".gz")
    if separator := SEPARATORS.get(name[-4:]):
        return _Held(url, _csv(url, separator))
    if name.endswith(".jsonl"):
        return _Lines(url)
    with _opened(url) as file:
        head = file.read(HEAD_BYTES).lstrip()
    begins, (first, *others) = head[:1], head.split(b"\n", 1)
    if not url.endswith(ENDINGS) and begins not in (b"{", b"["):
        raise unread(url)
    # the object of a line ends where the line does; otherwise the file is one object, over several lines
    is_one = begins == b"{" and bool(others) and not first.rstrip().endswith(b"}")
    return _Held(url, _whole(url)) if begins == b"[" or is_one else _Lines(url)


def folder_of(where: str) -> str:
    """Returns the folder, or the URL of it, of the file in which a row is, by the row's location."""
    return where.rpartition(", ")[0].rpartition("/")[0]


def read(url: str) -> Iterator[Row]:
    """Reads the rows of a file or a local folder in order, with their locations (file, and row or line number)."""
    for file in data_files(url):
        yield from open_rows(file)


def count(url: str) -> int:
    """Counts rows; of a Parquet file, only the footer is read. `url` is as for `read`."""
    return sum(len(open_rows(file)) for file in data_files(url))


def data_digest(url: str) -> str:
    """Returns the digest of a file or folder; if rows name images in files of their own, it is over theirs, too."""
    images = [_image_digest(image, file) for file in data_files(url) for image in _named_images(file)]
    content = digest(url)
    return hashlib.sha256("".join([content, *images]).encode()).hexdigest() if images else content


def digest(url: str) -> str:
    """Returns the sha256 of a file's content, in hexadecimal; of a folder, over the digests of its files."""
    files = data_files(url)
    if files != [url]:
        return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()
    if is_task(Path(url)):
        return task_digest(Path(url))
    with _errors_of(url):
        located, path = _located(url)
        if "hf" in located.protocol and (large := located.info(path).get("lfs")) is not None:
            return str(large.sha256)  # the hub has computed it
        version = str(located.ukey(path))
    return _digest(url, version)


@lru_cache(maxsize=1024)  # a start computes it twice: before it waits for Prefect, and before it claims the run
def _digest(url: str, version: str) -> str:
    """Returns the sha256 of a file; `version`, its file system's version of the file, is part of the cache's key."""
    with _opened(url) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _named_images(url: str) -> Iterator[object]:
    """Yields the images of a file's rows that are in files of their own."""
    if _may_have_images(url):
        for _, row in open_rows(url):
            yield from filter(is_named, image_values(row))


def _image_digest(image: object, url: str) -> str:
    try:
        return digest_of(image_bytes(image, url.rpartition("/")[0], url))
    except ImageError:  # which the check of the prompts reports, with all others
        return "missing"


def _may_have_images(url: str) -> bool:
    """Returns False if it is clear without parsing rows that none has an image."""
    if is_task(Path(url)):
        return False
    if url.endswith((".parquet", ".arrow")):
        rows = open_rows(url)
        assert isinstance(rows, _Parquet | _Arrow)
        columns = {field.name: str(field.type) for field in rows.schema}
        return any(name in IMAGES or (name in PROMPTS and "image" in kind) for name, kind in columns.items())
    with _opened(url) as file:
        end = b""
        while chunk := file.read(2**20):
            if b"image" in end + chunk:
                return True
            end = chunk[-8:]
    return False


class _Parquet:
    """Keeps the row groups that were read last, up to `HELD_BYTES`, and at least one.

    A larger one, as of images, is copied to a temporary file, and mapped into memory from there.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._held: OrderedDict[int, pa.Table] = OrderedDict()
        self._held_bytes = 0
        self._mapped: dict[int, pa.Table] = {}
        with _errors_of(url):
            files, path = _located(url)
            self._file = _parquet(files.open(path, "rb"))
        self._groups = [self._file.metadata.row_group(group) for group in range(self._file.num_row_groups)]
        self._starts: list[int] = list(accumulate((group.num_rows for group in self._groups), initial=0))

    @property
    def schema(self) -> pa.Schema:
        return self._file.schema_arrow

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        group = bisect_right(self._starts, index) - 1
        return next(_numbered(self.url, self._group(group).slice(index - self._starts[group], 1), index))

    def __iter__(self) -> Iterator[Row]:
        import pyarrow as pa

        with _opened(self.url) as opened:
            file = _parquet(opened)  # a separate one, so that the row groups in use stay in memory
            for group, number in enumerate(self._starts[:-1]):
                for batch in self._batches(file, group):
                    yield from _numbered(self.url, pa.Table.from_batches([batch]), number)
                    number += batch.num_rows

    def _batches(self, file: pq.ParquetFile, group: int) -> Iterator[pa.RecordBatch]:
        """Reads a row group, a part at a time."""
        size = self._groups[group]
        yield from file.iter_batches(_batch_rows(size.total_byte_size, size.num_rows), row_groups=[group])

    def _group(self, group: int) -> pa.Table:
        with self._lock, _errors_of(self.url):
            if group in self._mapped:
                return self._mapped[group]
            if self._groups[group].total_byte_size > HELD_BYTES:
                return self._mapped.setdefault(group, self._copy(group))
            if group in self._held:
                self._held.move_to_end(group)
            else:
                self._held[group] = self._file.read_row_group(group)
                self._held_bytes += self._held[group].nbytes
            while len(self._held) > 1 and self._held_bytes > HELD_BYTES:
                self._held_bytes -= self._held.popitem(last=False)[1].nbytes
            return self._held[group]

    def _copy(self, group: int) -> pa.Table:
        """Copies a row group to a temporary file, which is deleted when it is no longer mapped."""
        import pyarrow as pa

        with NamedTemporaryFile(suffix=".arrow") as file:
            with pa.ipc.new_stream(file, self.schema) as writer:
                for batch in self._batches(self._file, group):
                    writer.write_batch(batch)
            file.flush()
            return pa.ipc.open_stream(pa.memory_map(file.name)).read_all()


def _parquet(file: BufferedReader) -> pq.ParquetFile:
    """Opens a Parquet file; columns of large row groups are read a part at a time."""
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(file)
    groups = (metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    if any(size > HELD_BYTES for size in groups):
        return pq.ParquetFile(file, metadata=metadata, buffer_size=BUFFER_BYTES, pre_buffer=False)
    return pq.ParquetFile(file, metadata=metadata)


class _Arrow:
    def __init__(self, url: str) -> None:
        import pyarrow as pa

        self.url = url
        with _errors_of(url):
            files, path = _located(url)
            is_local = "file" in files.protocol
            source = pa.memory_map(path) if is_local else pa.BufferReader(files.cat_file(path))
            self._table = pa.ipc.open_stream(source).read_all()

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        return next(_numbered(self.url, self._table.slice(index, 1), index))

    def __iter__(self) -> Iterator[Row]:
        return _numbered(self.url, self._table, 0)


class _Held:
    """Rows in memory."""

    def __init__(self, url: str, rows: Sequence[Any]) -> None:
        self.url = url
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        where = f"{self.url}, row {index + 1}"
        return where, _checked(self._rows[index], where)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


class _Lines:
    """Skips empty lines, but counts them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._starts, self._ends, self._numbers = array("q"), array("q"), array("q")
        """For each row: its first byte, the byte after its last, and its line number."""
        self._content: bytes | None = None
        with _errors_of(url):
            self._files, self._path = _located(url)
            self._is_of = self._files.ukey(self._path)
            size = self._files.size(self._path)
        with _opened(url) as file:
            if size is None or size <= HELD_BYTES or url.endswith(".gz"):  # compressed lines cannot be read by offset
                self._content = file.read()
            position = 0
            for number, line in enumerate(file if self._content is None else BytesIO(self._content), 1):
                if line.strip():
                    self._starts.append(position)
                    self._ends.append(position + len(line))
                    self._numbers.append(number)
                position += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        start, end = self._starts[index], self._ends[index]
        where = f"{self.url}, line {self._numbers[index]}"
        if self._content is not None:
            return where, _object(self._content[start:end], where)
        with _errors_of(self.url):
            if self._files.ukey(self._path) != self._is_of:
                raise UserError(f"{self.url} has changed since the run opened it: restore it, and resume the run")
            line = self._files.cat_file(self._path, start=start, end=end)
        return where, _object(line, where)

    def __iter__(self) -> Iterator[Row]:
        if self._content is not None:
            yield from (self[index] for index in range(len(self)))
            return
        with _opened(self.url) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield (where := f"{self.url}, line {number}"), _object(line, where)


def _numbered(url: str, table: pa.Table, start: int) -> Iterator[Row]:
    """Yields the rows of a table."""
    number = start
    for batch in table.to_batches(max_chunksize=_batch_rows(table.nbytes, table.num_rows)):
        for row in batch.to_pylist():
            number += 1
            # in a table each message, tool, and the arguments of each call, have the keys of all others as nulls
            lists = {column: without_nulls(row[column]) for column in LISTS if column in row}
            yield f"{url}, row {number}", {**row, **lists}


def _batch_rows(size: int, rows: int) -> int:
    """Returns how many rows of a table of so many bytes are handled at a time."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def _whole(url: str) -> list[Any]:
    """Reads the rows of an array, or the object that the file holds."""
    with _opened(url) as file:
        try:
            value = json.load(file)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{url} is not JSON: {in_one_line(error)}") from None
    return value if isinstance(value, list) else [value]


def _csv(url: str, separator: str) -> list[dict[str, Any]]:
    """Reads a table of texts with a header, as pandas writes it."""
    rows: list[dict[str, Any]] = []
    csv.field_size_limit(2**31 - 1)  # for the whole process: the default forbids texts of 128 KiB
    with _opened(url) as file:
        text = TextIOWrapper(file, "utf-8-sig", newline="")
        try:
            header = text.readline()
            _check_separator(url, header, separator)
            for row in csv.DictReader(chain([header], text), delimiter=separator, strict=True):
                where = f"{url}, row {len(rows) + 1}"
                if None in row:
                    raise UserError(f"{where} has more cells than the header: quote texts that hold {separator!r}")
                rows.append({column: _cell(column, cell or None, where) for column, cell in row.items()})
        except (csv.Error, UnicodeDecodeError) as error:
            reason = str(error).replace("\t", "\\t")
            raise UserError(f"{url}, row {len(rows) + 1} is not CSV in UTF-8: {reason}") from None
    return rows


def _check_separator(url: str, header: str, separator: str) -> None:
    """Raises UserError if only another separator is in the header, outside quotes."""
    names = re.sub('"[^"]*("|$)', "", header)
    if separator in names or (found := next((other for other in ",;\t|" if other in names), None)) is None:
        return
    fitting = next((ending for ending, other in SEPARATORS.items() if other == found), None)
    save = (
        "save it with commas, or as .tsv with tabs" if separator == "," else "save it with tabs, or as .csv with commas"
    )
    remedy = save if fitting is None else f"name it {fitting}"
    raise UserError(f"{url}: its cells are separated by {found!r}, not by {separator!r}: {remedy}")


def _cell(column: str, cell: str | None, where: str) -> Any:
    """Returns a text, or the structure that it encodes as JSON."""
    if cell is None or not (column in OBJECTS or (column in LISTS and cell.lstrip().startswith("[{"))):
        return cell
    try:
        return json.loads(cell)
    except ValueError as error:
        raise UserError(f"{where}: {column} is not JSON ({error}): write lists and objects by json.dumps") from None


def _located(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path there."""
    import fsspec

    files, path = fsspec.core.url_to_fs(url)
    return files, str(path)


@contextmanager
def _opened(url: str) -> Iterator[BufferedReader]:
    """Opens a file, decompressed. Raises UserError for any error until it is closed."""
    import fsspec

    compression = "gzip" if url.endswith(".gz") else None
    with _errors_of(url), fsspec.open(url, "rb", compression=compression, expand=False) as file:
        yield file


@contextmanager
def _errors_of(url: str) -> Iterator[None]:
    """Raises UserError for any error in reading a file."""
    try:
        yield
    except RatchetError:
        raise
    except FileNotFoundError:
        raise UserError(
            f"{url} does not exist (`ratchet data countdown`, gsm8k, math and prompts write such files)"
        ) from None
    except IsADirectoryError:
        raise UserError(f"{url} is a folder: name a file in it") from None
    except Exception as error:  # each file system raises its own errors
        raise UserError(f"cannot read {url}: {in_one_line(error)}") from None


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {in_one_line(error)}") from None
    return _checked(row, where, may_hold_surrogates=b"\\u" in line)


def _checked(row: Any, where: str, *, may_hold_surrogates: bool = True) -> Mapping[str, Any]:
    if may_hold_surrogates:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            raise UserError(
                f"{where} holds {half}, half of a surrogate pair, which is not a character: remove it"
            ) from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object")
    return row
