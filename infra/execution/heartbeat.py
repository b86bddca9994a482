"""Is a driver alive? A small object beside the log, rewritten every few seconds, and never trusted for safety.

Fencing makes two drivers harmless; the heartbeat only spares people from starting the second by mistake. On the
driver's own host the process is looked at; from elsewhere the beat is watched until it moves or stays still.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from pydantic import Field

from infra.execution.stopping import Stopping
from infra.store.clock import born, is_same
from infra.store.log import TAIL, Deleted, RunLog, slot_key
from infra.store.object_store import ObjectStore, StoreUnavailable
from infra.store.records import Stored
from rlhf.errors import RatchetError

KEY = "log/heartbeat.json"
INTERVAL_S = 5.0


class Beat(Stored):
    term: int = Field(alias="epoch")
    host: str
    boot: str
    pid: int
    born: float = -1.0
    """Beats of older releases have none, and their drivers pass for dead: fencing is what keeps them apart."""
    count: int
    stopped: bool = False


def stop_key(term: int) -> str:
    """An object that asks the driver of a term to stop."""
    return f"log/stop-{term}.json"


@contextmanager
def beating(log: RunLog, stopping: Stopping) -> Iterator[None]:
    """Beat while a driver is at work. Raises `Deleted` in place of an error that the deletion of its run caused."""
    beat = Heartbeat(log, stopping)
    try:
        yield
    except Exception as error:
        deleted = False
        with suppress(StoreUnavailable):
            deleted = not isinstance(error, StoreUnavailable | Deleted) and log.is_deleted()
        if deleted:
            raise Deleted.of(log.objects.url) from error
        raise
    finally:
        beat.close()


class Heartbeat:
    """Beats from a thread of its own until closed; stops the driver when somebody asks for it, or deletes its run."""

    def __init__(self, log: RunLog, stopping: Stopping) -> None:
        self.log, self.objects, self.term, self.stopping = log, log.objects, log.term, stopping
        self._closed = threading.Event()
        self._count = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=INTERVAL_S)
        with suppress(StoreUnavailable):  # the beat has stopped anyway
            if self.log.is_deleted():
                self._delete_what_is_left()
                return
            current = read(self.objects)
            if current is None or current.term <= self.term:
                self._beat(stopped=True)
                self.objects.delete([stop_key(self.term)])

    def _delete_what_is_left(self) -> None:
        """Of a run that was deleted: what this driver wrote before it knew. If only its log was, the rest is left to
        whoever kept it; if another run was begun in its place, everything is."""
        there = self.objects.list("")
        if "run.json" in there:
            mine = []
        else:
            tag = re.compile(rf"[./]{self.term}-\d")
            mine = [key for key in there if tag.search(key)]
        if self.objects.get_if_there(slot_key(0)) is None and slot_key(0) not in there:
            self.objects.delete([KEY, TAIL, stop_key(self.term), *mine])
            self.objects.delete_empty_folders()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            try:
                if self.log.is_deleted():
                    self._delete_what_is_left()
                    self.stopping.fail(Deleted.of(self.objects.url))
                    return
                current = read(self.objects)
                if current is not None and current.term > self.term:
                    return  # a newer driver beats now; the log tells this one at its next commit
                self._beat()
                if self.objects.get_if_there(stop_key(self.term)) is not None:
                    self.stopping.request()
            except RatchetError:
                continue  # a missed beat is not an error: the next may pass

    def _beat(self, stopped: bool = False) -> None:
        self._count += 1
        me = psutil.Process()
        beat = Beat(
            term=self.term,
            host=socket.gethostname(),
            boot=_boot_id(),
            pid=me.pid,
            born=born(me),
            count=self._count,
            stopped=stopped,
        )
        self.objects.put(KEY, beat.model_dump_json().encode())


def read(objects: ObjectStore) -> Beat | None:
    """The newest beat; None if there is none that can be read."""
    data = objects.get_if_there(KEY)
    try:
        return None if data is None else Beat.model_validate_json(data)
    except ValueError:
        return None


def is_alive(objects: ObjectStore, waiting: Callable[[str], None] = lambda message: None) -> Beat | None:
    """The beat of a live driver, if there is one. May watch for a while if the driver was on another host."""
    beat = read(objects)
    if beat is None or beat.stopped:
        return None
    if beat.host == socket.gethostname() and beat.boot == _boot_id():
        return beat if _runs(beat) else None
    waiting(f"watching whether the driver on {beat.host} is alive ({2.5 * INTERVAL_S:.0f} s)")
    deadline = time.monotonic() + 2.5 * INTERVAL_S
    while time.monotonic() < deadline:
        time.sleep(INTERVAL_S / 5)
        now = read(objects)
        if now is None or now.stopped:
            return None
        if now.count != beat.count or now.term != beat.term:
            return now
    return None


def _runs(beat: Beat) -> bool:
    try:
        return is_same(psutil.Process(beat.pid), beat.born)
    except psutil.NoSuchProcess:
        return False


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
