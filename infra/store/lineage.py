"""The runs that a run was forked from, which hold what it shares with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ratchet.infra.store.log import Corrupt, RunLog
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Fork


class Lineage:
    """The folders of a run and of its ancestors, newest first. An ancestor's log is read only when it is asked for.
    Thread-safe."""

    def __init__(self, objects: ObjectStore) -> None:
        self._lock = threading.Lock()
        self._runs: list[ObjectStore] = [objects]
        self._is_whole = False

    def __iter__(self) -> Iterator[ObjectStore]:
        """Yields the folders. It ends where a log cannot be read; raises `StoreUnavailable` if a store does not
        answer."""
        number = 0
        while (run := self._at(number)) is not None:
            yield run
            number += 1

    def _at(self, number: int) -> ObjectStore | None:
        with self._lock:
            while number >= len(self._runs) and not self._is_whole:
                parent = _parent_of(self._runs[-1])  # may fail, and is asked again then
                if parent is None:
                    self._is_whole = True
                else:
                    self._runs.append(parent)
            return self._runs[number] if number < len(self._runs) else None


def _parent_of(run: ObjectStore) -> ObjectStore | None:
    """Returns the run that a run was forked from; None if there is none, or its log cannot be read."""
    try:
        commits = RunLog(run).record(0).commits
    except Corrupt:
        return None
    return next((run.of_run(commit.parent) for commit in commits if isinstance(commit, Fork)), None)
