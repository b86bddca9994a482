"""A run with rows in memory that are not part of it: stages read them as if they were committed."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ratchet.infra.store.records import ShardRef
from ratchet.infra.store.run_store import RunStore, chosen


class WithUncommitted(RunStore):
    """A run as its store has it, and rows that were computed for it, but neither written nor committed."""

    def __init__(self, run: RunStore) -> None:
        """Opens the run as far as the log of `run` was read."""
        super().__init__(run.objects)
        self.log = run.log
        self._rows: dict[str, pa.Table] = {}

    def keep(self, rows: pa.Table) -> ShardRef:
        """Keeps the rows of a shard in memory; returns the reference by which stages read them."""
        key = f"uncommitted/{len(self._rows)}"
        self._rows[key] = rows
        return ShardRef(key=key, sha256="", rows=len(rows), bytes=rows.nbytes)

    def forget(self) -> None:
        """Drops all rows that were kept."""
        self._rows.clear()

    def read_shard(self, ref: ShardRef, columns: Sequence[str] | None = None) -> pa.Table:
        """Reads the rows of a data file, or those in memory; see `RunStore.read_shard`."""
        rows = self._rows.get(ref.key)
        if rows is None:
            return super().read_shard(ref, columns)
        return rows if columns is None else chosen(rows, columns)
