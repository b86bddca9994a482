"""The whole log, from its first record: what a resume never reads, and what must hold before anything is deleted.

Every record names the sha256 of the one before it, and since schema version 3 has a digest of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from infra.progress import StepProgress, report
from infra.store.log import slot_key
from infra.store.records import Record, sha256_of
from infra.store.run_store import RunStore

AT_ONCE = 16
"""Requests to the store at the same time."""
PART = 512
"""Records between two reports."""


@dataclass(frozen=True)
class Broken:
    """A record that is not as it was written."""

    key: str
    what: str


class Chain:
    """The records of a run in order, each checked against the one before it."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.slot = -1
        """Of the last record that was read."""
        self._sha256 = ""
        """Of its bytes; empty if nobody knows what they were."""

    def read(self, last: int) -> Iterator[Record | Broken]:
        """Every record from where the chain stood up to this slot; after it, or in its place, what is wrong with it."""
        slots = iter(range(self.slot + 1, last + 1))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while part := list(islice(slots, PART)):
                for data in pool.map(self._get, part):
                    yield from self._next(data)
                report(StepProgress(what="log records", done=self.slot + 1, total=last + 1))

    def _get(self, slot: int) -> bytes | None:
        return self.store.objects.get_if_there(slot_key(slot))

    def _next(self, data: bytes | None) -> Iterator[Record | Broken]:
        before, self._sha256 = self._sha256, ""
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
        follows = record.previous == before or (self.slot > 0 and not before)
        if record.slot != self.slot or not follows:
            yield Broken(key, f"does not follow record {self.slot - 1}: one of the two was changed")


def last_slot(keys: list[str]) -> int:
    """Of the log records among the keys of a run; -1 if there is none."""
    names = (key.removeprefix("log/").removesuffix(".json") for key in keys if key.startswith("log/"))
    return max((int(name) for name in names if name.isdecimal()), default=-1)
