"""The answers of `ratchet serve`: files beside a run's history, each written before the clients get its answers."""

from __future__ import annotations

import pyarrow as pa

from ratchet.infra.runs.run import OnDamage, refuse
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.call_log import CALLS

MERGED = 256
"""Number of files that are merged into one: a busy server writes several files a second."""


class ServedLog:
    """A log of one server's answers. A crash loses none, but may leave some in two files, which readers notice."""

    def __init__(self, store: RunStore, server: str) -> None:
        """Takes the run, and a unique name of the server."""
        self._store, self._server = store, server
        self._number = 0
        self._small: list[str] = []
        """Keys of the files that are not merged."""
        self._tables: list[pa.Table] = []
        """Contents of these files."""

    def write(self, table: pa.Table) -> None:
        """Stores answers, which have the columns `CALLS`."""
        self._small.append(self._write(table))
        self._tables.append(table)
        if len(self._small) >= MERGED:  # more, if the last merge failed
            self._write(pa.concat_tables(self._tables))
            # after the merged file is written, so that a crash loses nothing
            self._store.objects.delete(self._small)
            self._small, self._tables = [], []

    def _write(self, table: pa.Table) -> str:
        key = self._store.write_served(f"{self._server}-{self._number:08d}", table)
        self._number += 1
        return key


def served(store: RunStore, damaged: OnDamage = refuse) -> pa.Table:
    """Reads the answers of all servers of a run, in the order in which they were stored; columns `CALLS`.

    Args:
        damaged: called with each error of a missing or damaged file, whose answers are then left out.
    """
    tables = [CALLS.empty_table()]
    for key in store.served_keys():
        try:
            tables.append(store.read_served(key))
        except Corrupt as damage:
            if key in store.served_keys():  # otherwise a server has merged it meanwhile
                damaged(damage)
            else:
                return served(store, damaged)
    table = pa.concat_tables(tables)
    # a crash during a merge leaves answers in two files
    first = dict[str, int]()
    for row, call in enumerate(table["call_id"].to_pylist()):
        first.setdefault(call, row)
    return table.take(pa.array(first.values(), pa.int64()))
