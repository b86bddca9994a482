"""The commit log of a run: records in numbered slots, created if absent. The only commit point there is.

One driver at a time may append: starting appends a claim of the next term, and a driver that meets a claim of a
higher term is fenced. After an error the slot is read back, so that an answer lost on its way is never taken for
a failure.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from infra.store.object_store import ObjectStore, StoreUnavailable, is_full, is_refusal, is_transient
from infra.store.records import READABLE, Claim, Commit, M, ObjectRef, Record, RunState, seen_from_fork, sha256_of
from rlhf.errors import RatchetError, UserError

TAIL = "log/tail.json"
"""A hint, overwritten at every close: the newest index. Losing it costs a few reads."""
LOOK_BEYOND = (*range(2, 10), 17, 33, 65)
"""So far after the last record is looked for others, before a driver writes the next."""


class Fenced(RatchetError):
    """A newer driver has taken the run over; this one must stop and must not be resumed by any automation."""

    exit_code = 3


class Corrupt(RatchetError):
    """An object of the store is not what the record that names it says."""


class Deleted(RatchetError):
    """The run's folder or log was deleted while its driver was at work."""

    @classmethod
    def of(cls, url: str) -> Deleted:
        return cls(f"the run {url} was deleted while this driver was at work: the driver stops")


def slot_key(slot: int) -> str:
    return f"log/{slot:012d}.json"


class RunLog:
    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self.term = 0
        """This driver's term; 0 while it has not claimed."""
        self._first = ""
        """The first record's uuid, as this driver found it when it claimed; empty if it was lost before."""
        self._state = RunState()
        self._doubtful: Record | None = None
        """What `append` began to write and has not learnt the fate of."""
        self._lock = threading.RLock()

    @property
    def state(self) -> RunState:
        """What the log says, as far as it was read. An append that was left in doubt is first brought to an end, so
        that nobody who tries again does a second time what the log may hold already."""
        with self._lock:
            self._settle()
            return self._state

    @contextmanager
    def held(self) -> Iterator[RunState]:
        """What the log says, while nobody else appends."""
        with self._lock:
            yield self.state

    # Reading: the cost depends on the open iteration, not on the length of the run.

    def read(self) -> RunState:
        """Catch up with the log, from its newest index."""
        with self._lock:
            self._settle()
            if self._state.slot < 0:
                self._state = self._newest_summary()
            self._catch_up()
            return self._state

    def _catch_up(self) -> None:
        while (data := self.objects.get_if_there(slot_key(self._state.slot + 1))) is not None:
            self._apply(data)

    def check_end(self) -> None:
        """Whether the log ends where it seems to. A record that was lost looks like the end, and what is after it would
        be taken for leavings and swept away. Raises `Corrupt`, naming the lost record."""
        with self._lock:
            while (beyond := self._beyond_the_end()) is not None:
                before = self._state.slot
                self._catch_up()
                if self._state.slot == before:  # else somebody appended meanwhile
                    raise Corrupt(
                        f"{self.objects.url}/{slot_key(before + 1)} is gone, though {beyond} is there: restore it "
                        "from a backup; nothing was changed (`ratchet verify` says what depends on it)"
                    )

    def _beyond_the_end(self) -> str | None:
        """Something that is only there if the log goes on: a later record, or the index that the hint names."""
        end = self._state.slot
        for distance in LOOK_BEYOND:
            if self._filled(end + distance):
                return slot_key(end + distance)
        hint = self.objects.get_if_there(TAIL)
        with suppress(ValueError, Corrupt):  # a hint is only a hint
            # an index stands before the record that closes its iteration, and the hint is written after that record
            if hint is not None and self.load_index(ref := ObjectRef.model_validate_json(hint)).slot >= end:
                return ref.key
        return None

    def load_index(self, ref: ObjectRef) -> RunState:
        """The state before the close that names this index."""
        return read_model(self.objects, ref, RunState)

    def claim_of(self, term: int) -> Claim:
        """The claim of a term that worked on the open iteration."""
        return self.claim_at(self.state.open_terms[term].slot)

    def claim_at(self, slot: int) -> Claim:
        return next(commit for commit in self.record(slot).commits if isinstance(commit, Claim))

    def record(self, slot: int) -> Record:
        """Any record. Raises `Corrupt` if it is gone or damaged."""
        data = self.objects.get_if_there(slot_key(slot))
        if data is None:
            raise Corrupt(f"{self.objects.url}/{slot_key(slot)} is gone: restore it from a backup")
        return self._parse(data, slot)

    def _newest_summary(self) -> RunState:
        """The newest index, or one not much older; the empty state if there is none."""
        hint = self.objects.get_if_there(TAIL)
        if hint is not None:
            try:
                return self.load_index(ObjectRef.model_validate_json(hint))
            except (ValueError, Corrupt):
                pass  # a hint is only a hint
        last = self._gallop()
        index = None if last is None else self._parse(self.objects.get(slot_key(last)), last).index
        return RunState() if index is None else self.load_index(index)

    def _gallop(self) -> int | None:
        """The last filled slot, by doubling steps and then halving them."""
        if not self._filled(0):
            return None
        step = 1
        while self._filled(step):
            step *= 2
        low, high = step // 2, step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._filled(middle) else (low, middle)
        return low

    def _filled(self, slot: int) -> bool:
        return self.objects.get_if_there(slot_key(slot)) is not None

    # Writing.

    def claim(self, claim: Claim) -> None:
        """Take the run: append the claim of the next term, after whatever others append meanwhile."""
        with self._lock:
            self.read()
            self.check_end()
            while True:
                term = self._state.term + 1
                if self._fill(self._next_record((claim,), term)):
                    self.term = term
                    self._first = self._uuid_of_the_first() or ""
                    return

    def append(self, *commits: Commit) -> None:
        """Commit all of `commits` at once. Raises `Fenced` if a newer driver holds the run, and `StoreUnavailable` if
        nobody can say whether they are committed: `state` then knows, as soon as the store answers again."""
        with self._lock:
            self._settle()
            self._check_term()
            self._doubtful = self._next_record(commits, self.term)
            self._settle()

    def check_claim(self) -> None:
        """Raises `Fenced` if a newer driver holds the run: to be asked where it may be why something failed."""
        with self._lock:
            self.read()
            self._check_term()

    def _settle(self) -> None:
        """Bring an append to its end: the very record that may be there already is written, never another."""
        if self._doubtful is None:
            return
        try:
            mine = self._fill(self._doubtful)
        except Deleted:
            self._doubtful = None
            raise
        self._doubtful = None
        if not mine:
            self._check_term()
            raise Corrupt(f"log record {self._state.slot} is of term {self.term}, but this driver did not write it")

    def _check_term(self) -> None:
        newest, claim = self._state.term, self._state.claim
        if newest != self.term:
            raise Fenced(
                f"another driver (term {newest}{f', on {claim.host}' if claim else ''}) has taken the run "
                f"over from this one (term {self.term}); it goes on there, and this driver stops"
            )

    def _next_record(self, commits: tuple[Commit, ...], term: int) -> Record:
        return Record(
            uuid=uuid.uuid4().hex,
            slot=self._state.slot + 1,
            term=term,
            previous=self._state.sha256,
            at=datetime.now(UTC),
            commits=commits,
            index=self._state.index,
        )

    def _fill(self, record: Record) -> bool:
        """Write the record into its slot. False if another's was there: it is applied, and the caller decides."""
        key, data = slot_key(record.slot), record.to_bytes()
        deadline = self.objects.clock.monotonic() + self.objects.deadline_s
        attempt = 0
        while True:
            attempt += 1
            error: Exception | None = None
            try:
                self.objects.create(key, data)
                found: bytes | None = data
            except Exception as raised:
                if is_refusal(raised):
                    raise UserError(f"the store {self.objects.url} refuses to write {key}: {raised}") from raised
                if isinstance(raised, FileNotFoundError):
                    raise self.objects.no_bucket(raised) from raised
                if not isinstance(raised, FileExistsError) and not is_transient(raised):
                    raise
                error = raised
                found = self.objects.get_if_there(key)
            if found is not None:
                if self.term > 0 and self.is_deleted(record.slot):
                    if found == data:  # without those before it, it is no log
                        self.objects.delete([key])
                    raise Deleted.of(self.objects.url)
                return self._apply(found).uuid == record.uuid
            if error is not None and is_full(error):
                raise self.objects.full(f"append {key}") from error
            if self.objects.clock.monotonic() >= deadline:
                raise StoreUnavailable(f"could not append {key} to {self.objects.url}: {error}") from error
            self.objects.clock.sleep(self.objects.pause(attempt))

    def is_deleted(self, slot: int = 2) -> bool:
        """Whether the run that this driver claimed has been deleted: the first two of the records before `slot` are
        gone, or another run was begun in its place. (A single one that is lost or damaged is no such sign: the others
        are worth saving.)"""
        first = self._uuid_of_the_first()
        if first is not None:
            return bool(first and self._first) and first != self._first
        return slot < 2 or not self._filled(1)

    def _uuid_of_the_first(self) -> str | None:
        """Empty if it cannot be read; None if it is gone."""
        data = self.objects.get_if_there(slot_key(0))
        with suppress(ValueError):
            return None if data is None else Record.from_bytes(data).uuid
        return ""

    def write_tail(self, index: ObjectRef) -> None:
        with suppress(StoreUnavailable):  # a hint is only a hint
            self.objects.put(TAIL, index.model_dump_json().encode())

    def _apply(self, data: bytes) -> Record:
        record = self._parse(data, self._state.slot + 1)
        try:
            self._state.apply(record, sha256_of(data))
        except ValueError as error:
            raise Corrupt(f"{self.objects.url}: {error}") from None
        return record

    def _parse(self, data: bytes, slot: int) -> Record:
        try:
            tree = json.loads(data)
            check_version(tree, f"log record {slot}")
            return Record.from_bytes(data)
        except (ValueError, AttributeError):
            raise Corrupt(
                f"{self.objects.url}/{slot_key(slot)} is damaged: restore it from a backup (`ratchet verify` says "
                "what else is)"
            ) from None


def check_version(tree: dict[str, object], what: str) -> None:
    found = tree.get("schema_version")
    if found not in READABLE:
        raise UserError(
            f"{what} is of schema version {found}, and this release reads versions {READABLE[0]} to {READABLE[-1]}: "
            "open the run with the release that wrote it"
        )


def read_verified(objects: ObjectStore, ref: ObjectRef) -> bytes:
    """An object's bytes, if they are what its reference says; raises `Corrupt`, naming it, if not."""
    holder = objects.of_run(ref.run)
    try:
        data = holder.get(ref.key)
    except FileNotFoundError:
        raise Corrupt(f"{holder.url}/{ref.key} is gone, though a record commits it: restore it from a backup") from None
    if sha256_of(data) != ref.sha256:
        raise Corrupt(f"{holder.url}/{ref.key} is damaged (its sha256 is not the committed one): restore it")
    return data


def read_model(objects: ObjectStore, ref: ObjectRef, model: type[M]) -> M:
    """A JSON object of this schema version; what it refers to is held by the run that holds it."""
    data = read_verified(objects, ref)
    check_version(json.loads(data), ref.key)
    found = model.model_validate_json(data)
    return found if ref.run is None else seen_from_fork(ref.run, found)
