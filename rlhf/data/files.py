"""Read Parquet or JSON lines files at a local path or any fsspec URL."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from typing import Any

from rlhf.errors import RatchetError, UserError, in_one_line


def read(url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Read the rows of a file.

    Args:
        url: path or fsspec URL, such as ``hf://datasets/openai/gsm8k/main/....parquet``. Files that do not end with
            ``.parquet`` are JSON lines.

    Yields:
        The location of a row (file, and row or line number) and the row.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object; the message names the line.
    """
    import pyarrow.parquet as pq

    with _opened(url) as file:
        if url.endswith(".parquet"):
            yield from ((f"{url}, row {number}", row) for number, row in enumerate(pq.read_table(file).to_pylist(), 1))
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield (where := f"{url}, line {number}"), _object(line, where)


def count(url: str) -> int:
    """Count the rows of a file; of a Parquet file, only the footer is read.

    Args:
        url: path or fsspec URL, as for `read`.

    Returns:
        The number of rows.

    Raises:
        UserError: the file cannot be read.
    """
    import pyarrow.parquet as pq

    with _opened(url) as file:
        if url.endswith(".parquet"):
            return int(pq.ParquetFile(file).metadata.num_rows)
        return sum(1 for line in file if line.strip())


def digest(url: str) -> str:
    """sha256 of the file's bytes, in hexadecimal.

    Args:
        url: path or fsspec URL.

    Raises:
        UserError: the file cannot be read.
    """
    with _opened(url) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _opened(url: str) -> Iterator[BufferedReader]:
    """An open file. Raises `UserError` for any error until it is closed."""
    import fsspec

    try:
        with fsspec.open(url, "rb", expand=False) as file:
            yield file
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
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if b"\\u" in line:
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
