"""Writes the Parquet files that commands produce for other programs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.run_store import parquet_bytes


def write_parquet(table: pa.Table, output: str) -> None:
    """Writes a Parquet file, which appears whole or not at all, and replaces an existing file.

    Args:
        output: path of the file in an existing folder, or fsspec URL.

    Raises:
        UserError: the store refuses access, or fsspec does not support the protocol.
    """
    content = parquet_bytes(table)
    if "://" in output:
        folder, _, name = output.rpartition("/")
        ObjectStore(folder).put(name, content)
    else:
        written = Path(output).with_name(f".{Path(output).name}")
        written.write_bytes(content)
        written.replace(output)
