"""Writes the heartbeat of a driver: a small object next to the log, rewritten every few seconds.

Safety does not depend on it: fencing makes two drivers harmless, and the heartbeat only keeps users from starting a
second one by mistake. On the driver's host, liveness is checked by its process; elsewhere, by watching for a new beat.
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

from ratchet.infra.execution.standing import Standing, Standings, parent_of
from ratchet.infra.execution.stopping import Stopped, Stopping
from ratchet.infra.store.clock import born, is_same
from ratchet.infra.store.log import TAIL, Deleted, RunLog, slot_key
from ratchet.infra.store.object_store import ObjectStore, StoreUnavailable
from ratchet.infra.store.records import Frozen
from ratchet.infra.store.run_store import is_written
from ratchet.rlhf.errors import RatchetError, in_one_line

KEY = "log/heartbeat.json"
INTERVAL_S = 5.0
LOOK_S = 1.0
"""Seconds in which a beat reads what it says about the run, so that the next beat is in time."""
LAST_LOOK_S = 15.0
"""The same for the last beat, which stays: without an answer, each list reads the run's log."""


class SignOfLife(Frozen):
    """The stored sign of life of a process, with a counter that grows with every beat."""

    host: str
    boot: str
    pid: int
    born: float
    """See `clock.born`."""
    count: int


def this_process(count: int) -> SignOfLife:
    """Makes the sign of life of this process."""
    process = psutil.Process()
    return SignOfLife(host=socket.gethostname(), boot=boot_id(), pid=process.pid, born=born(process), count=count)


class Beat(SignOfLife):
    """The stored heartbeat: the driver's process and term, and how the run stands."""

    term: int
    stopped: bool = False
    failure: str | None = None
    """The error that ended the driver, in one line; None while it drives, and if it finished or was asked to stop."""
    standing: Standing | None = None
    """As of this beat; None if the driver has not found out yet, or cannot: then only the log says it."""


def stop_key(term: int) -> str:
    """Returns the key of an object that asks the driver of a term to stop."""
    return f"log/stop-{term}.json"


@contextmanager
def beating(log: RunLog, stopping: Stopping) -> Iterator[None]:
    """Beats during the `with` statement. Raises `Deleted` instead of an error that the run's deletion caused."""
    beat, failure = Heartbeat(log, stopping), None
    try:
        yield
    except Exception as error:
        failure = None if isinstance(error, Stopped) else in_one_line(error) or type(error).__name__
        deleted = False
        with suppress(StoreUnavailable):
            deleted = not isinstance(error, StoreUnavailable | Deleted) and log.is_deleted()
        if deleted:
            raise Deleted.of(log.objects.url) from error
        raise
    finally:
        beat.close(failure)


class Heartbeat:
    """A thread that beats until closed, and stops the driver on request or when its run is deleted."""

    def __init__(self, log: RunLog, stopping: Stopping) -> None:
        self.log, self.objects, self.term, self.stopping = log, log.objects, log.term, stopping
        self._closed = threading.Event()
        self._count = 0
        self._standings = Standings()
        self._standing: Standing | None = None
        self._parent: str | None = None
        self._look(LOOK_S)
        self._beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self, failure: str | None = None) -> None:
        """Ends the thread, and marks the driver as stopped, by an error if there was one."""
        self._closed.set()
        self._thread.join(timeout=INTERVAL_S)
        self._look(LOOK_S)
        with suppress(StoreUnavailable):  # without new beats the driver counts as dead anyway
            if self.log.is_deleted():
                self._delete_what_is_left()
                return
            if self._is_replaced():
                return
            self._beat(stopped=True, failure=failure)  # first, because a process that ends may be killed soon
            self.objects.delete([stop_key(self.term)])
            if self._standing is None:
                self._look(LAST_LOOK_S)
                if self._standing is not None and not self._is_replaced():
                    self._beat(stopped=True, failure=failure)

    def _is_replaced(self) -> bool:
        """True if the heartbeat is a newer driver's."""
        current = read(self.objects)
        return current is not None and current.term > self.term

    def _delete_what_is_left(self) -> None:
        """Deletes the files that this driver wrote into a deleted run before it noticed the deletion."""
        keys = self.objects.list("")
        # only the log was deleted: keep the data files
        if "run.json" in keys:
            leftovers = []
        else:
            tag = re.compile(rf"[./]{self.term}-\d")
            leftovers = [key for key in keys if is_written(key) and tag.search(key)]
        # otherwise another run has started in its place: keep everything
        if self.objects.get_if_there(slot_key(0)) is None and slot_key(0) not in keys:
            self.objects.delete([KEY, TAIL, stop_key(self.term), *leftovers])
            self.objects.delete_empty_folders()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            self._look(LOOK_S)
            try:
                if self.log.is_deleted():
                    self._delete_what_is_left()
                    self.stopping.fail(Deleted.of(self.objects.url))
                    return
                if self._is_replaced():
                    return  # this driver is fenced at its next commit
                self._beat()
                if self.objects.get_if_there(stop_key(self.term)) is not None:
                    self.stopping.request()
            except RatchetError:
                continue  # one missed beat does no harm

    def _beat(self, stopped: bool = False, failure: str | None = None) -> None:
        self._count += 1
        beat = Beat(
            **this_process(self._count).model_dump(),
            term=self.term,
            stopped=stopped,
            failure=failure,
            standing=self._standing,
        )
        self.objects.put(KEY, beat.model_dump_json().encode())

    def _look(self, limit_s: float) -> None:
        """Finds out how the run stands; no error in that ends a driver."""
        try:
            self._parent = parent_of(self.log) if self._parent is None else self._parent
            last = self.log.last_read(wait_s=LOOK_S)
            self._standing = self._standings.of(self.log, self._parent, *last, limit_s=limit_s)
        except Exception:  # a list reads the log then, and says what is wrong
            self._standing = None


def read(objects: ObjectStore) -> Beat | None:
    """Returns the newest beat; None if it is missing or unreadable."""
    data = objects.get_if_there(KEY)
    try:
        return None if data is None else Beat.model_validate_json(data)
    except ValueError:
        return None


def is_alive(objects: ObjectStore, waiting: Callable[[str], None] = lambda message: None) -> Beat | None:
    """Returns the beat of a live driver, or None.

    Args:
        waiting: receives a message before the beat of a driver on another host is watched, for 2.5 intervals.
    """
    beat = read(objects)
    if beat is None or beat.stopped:
        return None
    if (lives := lives_here(beat)) is not None:
        return beat if lives else None
    if _silent.get(objects.url) == beat:
        return None
    waiting(f"watching whether the driver on {beat.host} is alive ({2.5 * INTERVAL_S:.0f} s)")
    deadline = time.monotonic() + 2.5 * INTERVAL_S
    while time.monotonic() < deadline:
        time.sleep(INTERVAL_S / 5)
        now = read(objects)
        if now is None or now.stopped:
            return None
        if now.count != beat.count or now.term != beat.term:
            return now
    _silent[objects.url] = beat
    return None


_silent: dict[str, Beat] = {}
"""By run, a beat after which this process has watched in vain for another."""


def lives_here(beat: SignOfLife) -> bool | None:
    """True if the process of a beat lives; None if it ran on another host, or on this host before its last boot."""
    if beat.host != socket.gethostname() or beat.boot != boot_id():
        return None
    try:
        return is_same(psutil.Process(beat.pid), beat.born)
    except psutil.NoSuchProcess:
        return False


def boot_id() -> str:
    """Returns what identifies this host's last boot; empty if that is unknown."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
