"""The commit log of a run: records in numbered slots, each created if absent. It is the only commit point.

Only one driver at a time may append. A driver starts by appending a claim with the next term; a driver that finds a
claim with a higher term is fenced. Rollout workers append beside the newest driver, in its term. A process that finds
its slot taken by such a neighbour appends behind it, unless that record makes its own commits late. After an error a
process reads the slot back, so that a lost answer is never mistaken for a failure.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from ratchet.infra.store.object_store import ObjectStore, StoreUnavailable, is_full, is_refusal, is_transient
from ratchet.infra.store.records import (
    SCHEMA_VERSION,
    Claim,
    Commit,
    M,
    ObjectRef,
    Record,
    RunState,
    seen_from_fork,
    sha256_of,
)
from ratchet.rlhf.errors import RatchetError, UserError

TAIL = "log/tail.json"
"""A hint: the reference to the newest index, overwritten at every close. Losing it costs a few reads."""
LOOK_BEYOND = (*range(2, 10), 17, 33, 65)
"""Distances after the last record at which a driver looks for later records before it claims the run."""


class Fenced(RatchetError):
    """A newer driver has taken over the run. This driver must stop, and no automation may restart it."""

    exit_code = 3


class Late(RatchetError):
    """A neighbour has committed what this process was about to commit: nothing was appended."""


class Corrupt(RatchetError):
    """An object is missing, or differs from what was committed."""


class Deleted(RatchetError):
    """The run's folder or log was deleted while its driver was at work."""

    @classmethod
    def of(cls, url: str) -> Deleted:
        """Makes the error for the run at `url`."""
        return cls(f"the run {url} was deleted while this driver was at work: the driver stops")


def slot_key(slot: int) -> str:
    """Returns the key of a log record; slots count from 0."""
    return f"log/{slot:012d}.json"


class RunLog:
    """The log of one run, and the run's state as far as the log was read. Thread-safe.

    All methods that access the store raise `StoreUnavailable` if it does not answer, except `write_tail`. Those that
    read raise `Corrupt` if a record or an index is missing or damaged, and `UserError` if this release does not read
    its schema version.
    """

    def __init__(self, objects: ObjectStore) -> None:
        """Opens the log; this reads nothing."""
        self.objects = objects
        self.term = 0
        """This driver's term; 0 until it claims the run. A rollout worker's: that of the driver beside which it
        writes."""
        self.worker: str | None = None
        """The name of the rollout worker that this process is; None: it is a driver, or only reads."""
        self.first = ""
        """The uuid of the first record when this driver claimed the run; empty if that record could not be read."""
        self._state = RunState()
        self._at = datetime.min.replace(tzinfo=UTC)
        """The time of the last record that was read or written."""
        self._doubtful: Record | None = None
        """A record that `append` tried to write, with an unknown outcome."""
        self._lock = threading.RLock()

    @property
    def state(self) -> RunState:
        """The run's state, as far as the log was read.

        Resolves an append with an unknown outcome first, so that a retry cannot commit the same work twice. If that is
        impossible, raises `StoreUnavailable`; if a newer driver's record is found, `Fenced`; if the run is found
        deleted, `Deleted`.
        """
        with self._lock:
            self._settle()
            return self._state

    @contextmanager
    def held(self) -> Iterator[RunState]:
        """Holds the log during a `with` statement, so that no other thread appends. Yields and raises as `state`."""
        with self._lock:
            yield self.state

    def last_read(self, wait_s: float = 0.0) -> tuple[RunState, datetime]:
        """Returns a copy of the state as far as the log was read, and the time of its last record.

        Unlike `state`, this appends nothing, so any thread may ask. Raises `StoreUnavailable` if the outcome of an
        append is unknown, or if another thread appends for longer than `wait_s` seconds.
        """
        if not self._lock.acquire(timeout=wait_s):
            raise StoreUnavailable(f"a record is being appended to the log of {self.objects.url}")
        try:
            if self._doubtful is not None:
                raise StoreUnavailable(f"it is unknown whether the log of {self.objects.url} has another record")
            state = self._state
            copies = {"recent": [*state.recent], "pages": [*state.pages], "stages": {**state.stages}}
            return state.model_copy(update=copies), self._at
        finally:
            self._lock.release()

    # Reading: the cost depends on the open iteration, not on the length of the run.

    def read(self) -> RunState:
        """Reads the log from its newest index, or from where the last read ended, to its end.

        Resolves an append with an unknown outcome first, as `state` does. The state's slot is -1 if there is no log.
        """
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
        """Raises `Corrupt` if the log does not end after the last record that was read.

        A lost record looks like the end of the log, and a sweep would then delete the committed files after it.
        """
        with self._lock:
            while (beyond := self._beyond_the_end()) is not None:
                before = self._state.slot
                self._catch_up()
                if self._state.slot == before:  # otherwise another driver has appended
                    raise Corrupt(
                        f"{self.objects.url}/{slot_key(before + 1)} is gone, though {beyond} is there: restore it "
                        "from a backup; nothing was changed (`ratchet verify` lists the consequences)"
                    )

    def _beyond_the_end(self) -> str | None:
        """Returns the key of an object that exists only if the log continues: a record, or the index in the hint."""
        end = self._state.slot
        for distance in LOOK_BEYOND:
            if self._filled(end + distance):
                return slot_key(end + distance)
        hint = self.objects.get_if_there(TAIL)
        with suppress(ValueError, Corrupt):  # a hint may be wrong
            # an index's slot precedes the record that closes its iteration; the hint is written after that record
            if hint is not None and self.load_index(ref := ObjectRef.model_validate_json(hint)).slot >= end:
                return ref.key
        return None

    def load_index(self, ref: ObjectRef) -> RunState:
        """Reads an index, perhaps of another run: the state just before the record that names it."""
        return read_model(self.objects, ref, RunState)

    def claim_of(self, term: int) -> Claim:
        """Reads the claim of a term that worked on the open iteration (`RunState.open_terms`)."""
        return self.claim_at(self.state.open_terms[term].slot)

    def claim_at(self, slot: int) -> Claim:
        """Reads the claim in a slot that is known to hold one."""
        return next(commit for commit in self.record(slot).commits if isinstance(commit, Claim))

    def record(self, slot: int) -> Record:
        data = self.objects.get_if_there(slot_key(slot))
        if data is None:
            raise Corrupt(f"{self.objects.url}/{slot_key(slot)} is gone: restore it from a backup")
        return self._parse(data, slot)

    def _newest_summary(self) -> RunState:
        """Returns the newest index or a slightly older one; the empty state if there is none."""
        hint = self.objects.get_if_there(TAIL)
        if hint is not None:
            try:
                return self.load_index(ObjectRef.model_validate_json(hint))
            except (ValueError, Corrupt):
                pass  # a hint may be wrong
        last = self._gallop()
        index = None if last is None else self._parse(self.objects.get(slot_key(last)), last).index
        return RunState() if index is None else self.load_index(index)

    def _gallop(self) -> int | None:
        """Finds the last filled slot by doubling steps, then bisection; None if the log is empty."""
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
        """Takes the run: appends a claim with the next term, retrying behind records that other drivers append.

        Raises `StoreUnavailable` if it is unknown whether the claim was written.
        """
        with self._lock:
            self.read()
            self.check_end()
            while True:
                term = self._state.term + 1
                mine = self._next_record((claim,), term)
                if self._fill(mine).uuid == mine.uuid:
                    self.term = term
                    self.first = self._uuid_of_the_first() or ""
                    return

    def join(self, worker: str) -> None:
        """Reads the log, and writes records beside its newest driver from now on, as the rollout worker `worker`."""
        with self._lock:
            self.read()
            self.term, self.worker = self._state.term, worker
            self.first = self._uuid_of_the_first() or ""

    def append(self, *commits: Commit) -> None:
        """Commits all of `commits` atomically in one record, which applies them in order.

        Raises:
            Fenced: a newer driver holds the run.
            Late: a neighbour's record makes one of `commits` late (`RunState.is_late`).
            Deleted: the run was deleted.
            Corrupt: the slot holds a damaged record, or one of this driver's term that it did not write.
            UserError: the store refuses the write.
            StoreUnavailable: it is unknown whether they were committed; `state` resolves that once the store answers.
        """
        with self._lock:
            self._settle()
            self._check_term()
            # stays set if the write raises, so that the next access resolves its outcome
            self._doubtful = self._next_record(commits, self.term)
            if not self._settle():
                raise Late(f"another process has committed part of record {self._state.slot + 1}")

    def check_claim(self) -> None:
        """Raises `Fenced` if a newer driver holds the run, to find out whether a takeover explains an error."""
        with self._lock:
            self.read()
            self._check_term()

    def _settle(self) -> bool:
        """Resolves an append with an unknown outcome by writing the identical record again, or behind the records of
        neighbours. Returns False if one of them makes it late."""
        while self._doubtful is not None:
            mine = self._doubtful
            try:
                stored = self._fill(mine)
            except Deleted:
                self._doubtful = None
                raise
            self._doubtful = None
            if stored.uuid == mine.uuid:
                break
            self._check_term()
            if stored.worker is None and self.worker is None:
                raise Corrupt(f"log record {stored.slot} is of term {self.term}, but this driver did not write it")
            self._catch_up()  # rather than trying one taken slot after the other
            self._check_term()
            if any(map(self._state.is_late, mine.commits)):
                return False
            self._doubtful = self._next_record(mine.commits, mine.term)
        return True

    def _check_term(self) -> None:
        newest, claim = self._state.term, self._state.claim
        if newest != self.term:
            raise Fenced(
                f"another driver (term {newest}{f', on {claim.host}' if claim else ''}) has taken the run "
                f"over from this one (term {self.term}); it continues there, and this driver stops"
            )

    def _next_record(self, commits: tuple[Commit, ...], term: int) -> Record:
        return Record(
            uuid=uuid.uuid4().hex,
            slot=self._state.slot + 1,
            term=term,
            worker=self.worker,
            previous=self._state.sha256,
            at=datetime.now(UTC),
            commits=commits,
            index=self._state.index,
        )

    def _fill(self, record: Record) -> Record:
        """Writes the record into its slot, and applies what the slot then holds: the record, or another process's.
        Returns it."""
        key, data = slot_key(record.slot), record.to_bytes()
        deadline = self.objects.clock.monotonic() + self.objects.deadline_s
        attempt = 0
        while True:
            attempt += 1
            error: Exception | None = None
            try:
                self.objects.create(key, data)
                stored: bytes | None = data
            except Exception as raised:
                if is_refusal(raised):
                    raise UserError(f"the store {self.objects.url} refuses to write {key}: {raised}") from raised
                if isinstance(raised, FileNotFoundError):
                    raise self.objects.nowhere(raised) from raised
                if not isinstance(raised, FileExistsError) and not is_transient(raised):
                    raise
                error = raised
                # the answer may have been lost after the write: only the slot itself tells
                stored = self.objects.get_if_there(key)
            if stored is not None:
                # in a deleted folder the slot is free, so the create succeeds
                if self.term > 0 and self.is_deleted(record.slot):
                    if stored == data:  # a record without its predecessors is not a log
                        self.objects.delete([key])
                    raise Deleted.of(self.objects.url)
                return self._apply(stored)
            if error is not None and is_full(error):
                raise self.objects.full(f"append {key}") from error
            if self.objects.clock.monotonic() >= deadline:
                raise StoreUnavailable(f"could not append {key} to {self.objects.url}: {error}") from error
            self.objects.clock.sleep(self.objects.pause(attempt))

    def is_deleted(self, slot: int = 2) -> bool:
        """True if the run that this driver claimed was deleted.

        It was if its first two records are missing, or another run has started in its place. Only records before `slot`
        count.
        """
        first = self._uuid_of_the_first()
        if first is not None:
            return bool(first and self.first) and first != self.first
        # a single missing or damaged record does not count: the other records are worth saving
        return slot < 2 or not self._filled(1)

    def _uuid_of_the_first(self) -> str | None:
        """Returns the uuid of the first record; empty if it is unreadable, None if it is missing."""
        data = self.objects.get_if_there(slot_key(0))
        with suppress(ValueError):
            return None if data is None else Record.from_bytes(data).uuid
        return ""

    def write_tail(self, index: ObjectRef) -> None:
        """Writes the hint that names the newest index. Does nothing if the store does not answer."""
        with suppress(StoreUnavailable):  # the log is readable without the hint
            self.objects.put(TAIL, index.model_dump_json().encode())

    def _apply(self, data: bytes) -> Record:
        record = self._parse(data, self._state.slot + 1)
        try:
            self._state.apply(record, sha256_of(data))
        except ValueError as error:
            raise Corrupt(f"{self.objects.url}: {error}") from None
        self._at = record.at
        return record

    def _parse(self, data: bytes, slot: int) -> Record:
        try:
            tree = json.loads(data)
            check_version(tree, f"log record {slot}")
            return Record.from_bytes(data)
        except (ValueError, AttributeError):
            raise Corrupt(
                f"{self.objects.url}/{slot_key(slot)} is damaged: restore it from a backup (`ratchet verify` lists "
                "all damage)"
            ) from None


def check_version(tree: dict[str, object], name: str) -> None:
    """Raises `UserError` if a stored object is not of the current schema. Migrations of older schemas go here."""
    version = tree.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{name} is of schema version {version}, and this release reads version {SCHEMA_VERSION}: open the run "
            "with the release that wrote it"
        )


def read_verified(objects: ObjectStore, ref: ObjectRef) -> bytes:
    """Reads an object, perhaps of another run, and verifies its digest.

    Raises:
        Corrupt: the object is missing or damaged; the message names it.
        StoreUnavailable: the store does not answer.
    """
    holder = objects.of_run(ref.run)
    return _verified(holder, ref, ref.sha256, lambda: holder.get(ref.key))


def read_range(objects: ObjectStore, ref: ObjectRef, first: int, last: int, sha256: str) -> bytes:
    """Reads and verifies the bytes from `first` to before `last`, whose digest is `sha256`. Raises as
    `read_verified`."""
    holder = objects.of_run(ref.run)
    return _verified(holder, ref, sha256, lambda: holder.read(ref.key, first, last))


def _verified(holder: ObjectStore, ref: ObjectRef, sha256: str, read: Callable[[], bytes]) -> bytes:
    try:
        data = read()
    except FileNotFoundError:
        raise Corrupt(f"{holder.url}/{ref.key} is gone, though a record commits it: restore it from a backup") from None
    if sha256_of(data) != sha256:
        raise Corrupt(f"{holder.url}/{ref.key} is damaged (its sha256 is not the committed one): restore it")
    return data


def read_model(objects: ObjectStore, ref: ObjectRef, model: type[M]) -> M:
    """Reads a JSON object, perhaps of another run, and verifies its digest. Raises as `read_verified`.

    References in it name the run that holds their objects.

    Raises:
        UserError: this release does not read the object's schema version.
    """
    data = read_verified(objects, ref)
    # before the validation, which would blame a field of another schema
    check_version(json.loads(data), ref.key)
    document = model.model_validate_json(data)
    return document if ref.run is None else seen_from_fork(ref.run, document)
