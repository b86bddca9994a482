"""Files of rows, Parquet or JSON lines, here or at any fsspec URL."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from typing import Any

from rlhf.errors import RatchetError, UserError, in_one_line


def read(url: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Its rows, such as those of ``hf://datasets/openai/gsm8k/main/....parquet``, and where each stands, for messages.
    Raises `UserError` naming the line."""
    import pyarrow.parquet as pq

    with _opened(url) as file:
        if url.endswith(".parquet"):
            yield from ((f"{url}, row {number}", row) for number, row in enumerate(pq.read_table(file).to_pylist(), 1))
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield (where := f"{url}, line {number}"), _object(line, where)


def digest(url: str) -> str:
    """sha256 of its bytes."""
    with _opened(url) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _opened(url: str) -> Iterator[BufferedReader]:
    """Raises `UserError` for whatever goes wrong, until it is closed."""
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
    except Exception as error:  # every file system has errors of its own
        raise UserError(f"cannot read {url}: {in_one_line(error)}") from None


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line.strip())
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if b"\\u" in line:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            raise UserError(
                f"{where} holds {half}, half of a surrogate pair, which is no character: remove it"
            ) from None
    if not isinstance(found, dict):
        raise UserError(f"{where} is not a JSON object")
    return found
