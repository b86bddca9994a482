"""Reads and checks the whole log from its first record, for `verify` and `vacuum`. A resume never does this.

Each record names the sha256 of the previous record, and contains its own digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from ratchet.infra.progress import StepProgress, report
from ratchet.infra.store.log import slot_key
from ratchet.infra.store.records import Record, sha256_of
from ratchet.infra.store.run_store import RunStore

AT_ONCE = 16
"""Number of concurrent requests to the store."""
PART = 512
"""Number of records between two progress reports."""


@dataclass(frozen=True)
class Broken:
    """A record that is missing or damaged."""

    key: str
    what: str


class Chain:
    """The records of a run in order, each checked against the previous one."""

    def __init__(self, store: RunStore) -> None:
        """Starts before the first record."""
        self.store = store
        self.slot = -1
        """The slot of the last record that was read."""
        self._sha256 = ""
        """The sha256 of that record's bytes; empty if it was missing or damaged."""

    def read(self, last: int) -> Iterator[Record | Broken]:
        """Yields the records after `slot`, up to slot `last`. Raises `StoreUnavailable` if the store does not answer.

        A `Broken` replaces an unreadable record, or follows one that does not fit its predecessor.
        """
        slots = iter(range(self.slot + 1, last + 1))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while part := list(islice(slots, PART)):
                for data in pool.map(self._get, part):
                    yield from self._next(data)
                report(StepProgress(what="log records", done=self.slot + 1, total=last + 1))

    def _get(self, slot: int) -> bytes | None:
        return self.store.objects.get_if_there(slot_key(slot))

    def _next(self, data: bytes | None) -> Iterator[Record | Broken]:
        previous, self._sha256 = self._sha256, ""
        self.slot += 1
        key = slot_key(self.slot)
        if data is None:
            yield Broken(key, "is gone")
            return
        try:
            record = Record.from_bytes(data)
        except ValueError:
            yield Broken(key, "is damaged")
            return
        self._sha256 = sha256_of(data)
        yield record
        # a broken predecessor was reported already
        follows = record.previous == previous or (self.slot > 0 and not previous)
        if record.slot != self.slot or not follows:
            yield Broken(key, f"does not follow record {self.slot - 1}: one of the two was changed")


def last_slot(keys: list[str]) -> int:
    """Returns the highest slot of the log records among a run's keys; -1 if there are none."""
    names = (key.removeprefix("log/").removesuffix(".json") for key in keys if key.startswith("log/"))
    return max((int(name) for name in names if name.isdecimal()), default=-1)
