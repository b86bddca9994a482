"""The commit log of a run: records in numbered slots, created if absent. The only commit point there is.

One driver at a time may append: starting appends a claim of the next epoch, and a driver that meets a claim of a
higher epoch is fenced. After an error the slot is read back, so that an answer lost on its way is never taken for
a failure.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from datetime import UTC, datetime

from infra.objects import Objects, StoreUnavailable, is_transient
from infra.records import SCHEMA_VERSION, Claim, Commit, ObjectRef, Record, RunState, sha256_of
from rlhf.errors import RatchetError, UserError

TAIL = "log/tail.json"
"""A hint, overwritten at every close: the newest index. Losing it costs a few reads."""


class Fenced(RatchetError):
    """A newer driver has taken the run over; this one must stop and must not be resumed by any automation."""

    exit_code = 3


class Corrupt(RatchetError):
    """An object of the store is not what the record that names it says."""


def slot_key(slot: int) -> str:
    return f"log/{slot:012d}.json"


class RunLog:
    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.state = RunState()
        self.epoch = 0
        """This driver's epoch; 0 while it has not claimed."""
        self._lock = threading.RLock()

    # Reading: the cost depends on the open iteration, not on the length of the run.

    def read(self) -> RunState:
        """Catch up with the log, from its newest index."""
        with self._lock:
            if self.state.slot < 0 and (index := self._newest_index()) is not None:
                self.state = self.load_index(index)
            while (data := self.objects.get_if_there(slot_key(self.state.slot + 1))) is not None:
                self._apply(data)
            return self.state

    def load_index(self, ref: ObjectRef) -> RunState:
        """The state before the close that names this index."""
        data = read_verified(self.objects, ref)
        check_version(json.loads(data), ref.key)
        return RunState.model_validate_json(data)

    def claim_of(self, epoch: int) -> Claim:
        """The claim of an epoch that worked on the open iteration."""
        record = self._parse(self.objects.get(slot_key(self.state.open_epochs[epoch].slot)))
        return next(commit for commit in record.commits if isinstance(commit, Claim))

    def _newest_index(self) -> ObjectRef | None:
        hint = self.objects.get_if_there(TAIL)
        if hint is not None:
            try:
                return ObjectRef.model_validate_json(hint)
            except ValueError:
                pass  # a hint is only a hint
        last = self._gallop()
        return None if last is None else self._parse(self.objects.get(slot_key(last))).index

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
        """Take the run: append the claim of the next epoch, after whatever others append meanwhile."""
        with self._lock:
            self.read()
            while True:
                epoch = self.state.epoch + 1
                if self._try_append((claim,), epoch):
                    self.epoch = epoch
                    return

    def append(self, *commits: Commit) -> None:
        """Commit all of `commits` at once. Raises `Fenced` if a newer driver holds the run."""
        with self._lock:
            self._check_epoch()
            if not self._try_append(commits, self.epoch):
                self._check_epoch()
                raise Corrupt(
                    f"log record {self.state.slot} is of epoch {self.epoch}, but this driver did not write it"
                )

    def _check_epoch(self) -> None:
        if self.state.epoch != self.epoch:
            claim = self.state.claim
            raise Fenced(
                f"another driver (epoch {self.state.epoch}{f', on {claim.host}' if claim else ''}) has taken the run "
                f"over from this one (epoch {self.epoch}); it goes on there, and this driver stops"
            )

    def _try_append(self, commits: tuple[Commit, ...], epoch: int) -> bool:
        """Fill the next slot. False if another's record was there: it is applied, and the caller decides."""
        record = Record(
            uuid=uuid.uuid4().hex,
            slot=self.state.slot + 1,
            epoch=epoch,
            previous=self.state.sha256,
            at=datetime.now(UTC),
            commits=commits,
            index=self.state.index,
        )
        key, data = slot_key(record.slot), record.to_bytes()
        deadline = time.monotonic() + self.objects.deadline_s
        attempt = 0
        while True:
            attempt += 1
            error: Exception | None = None
            try:
                self.objects.create(key, data)
                found: bytes | None = data
            except Exception as raised:
                if isinstance(raised, PermissionError):
                    raise UserError(f"the store {self.objects.url} refuses to write {key}: {raised}") from raised
                if not isinstance(raised, FileExistsError) and not is_transient(raised):
                    raise
                error = raised
                found = self.objects.get_if_there(key)
            if found is not None:
                self._apply(found)
                return self._parse(found).uuid == record.uuid
            if time.monotonic() >= deadline:
                raise StoreUnavailable(f"could not append {key} to {self.objects.url}: {error}") from error
            time.sleep(self.objects.pause(attempt))

    def write_tail(self, index: ObjectRef) -> None:
        self.objects.put(TAIL, index.model_dump_json().encode())

    def _apply(self, data: bytes) -> None:
        record = self._parse(data)
        try:
            self.state.apply(record, sha256_of(data))
        except ValueError as error:
            raise Corrupt(f"{self.objects.url}: {error}") from None

    def _parse(self, data: bytes) -> Record:
        tree = json.loads(data)
        check_version(tree, f"log record {tree.get('slot')}")
        return Record.model_validate(tree)


def check_version(tree: dict[str, object], what: str) -> None:
    found = tree.get("schema_version")
    if found != SCHEMA_VERSION:
        raise UserError(
            f"{what} is of schema version {found}, and this release reads version {SCHEMA_VERSION}: "
            "open the run with the release that wrote it"
        )


def read_verified(objects: Objects, ref: ObjectRef) -> bytes:
    """An object's bytes, if they are what its reference says; raises `Corrupt`, naming it, if not."""
    try:
        data = objects.get(ref.key)
    except FileNotFoundError:
        raise Corrupt(
            f"{objects.url}/{ref.key} is gone, though a record commits it: restore it from a backup"
        ) from None
    if sha256_of(data) != ref.sha256:
        raise Corrupt(f"{objects.url}/{ref.key} is damaged (its sha256 is not the committed one): restore it")
    return data
