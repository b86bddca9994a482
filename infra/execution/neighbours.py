"""The processes that generate beside each other: the driver, and rollout workers, which come and go.

Each rewrites a small object every few seconds. Correctness does not depend on it: of two processes that generate a
shard, the first one to commit it wins. It only tells which leases are worth waiting for.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ratchet.infra.execution.heartbeat import INTERVAL_S, KEY, Beat, SignOfLife, lives_here, this_process
from ratchet.infra.execution.stopping import Stopping
from ratchet.infra.store.log import Deleted, RunLog
from ratchet.infra.store.object_store import ObjectStore, StoreUnavailable
from ratchet.rlhf.errors import RatchetError

WORKERS = "log/workers/"
SILENT_S = 4 * INTERVAL_S
"""Seconds without a new beat after which a process counts as dead."""


class WorkerLife:
    """The signs of life of this process, a rollout worker."""

    def __init__(self, objects: ObjectStore) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.shards = 0
        """Number of shards that it has committed."""
        self._objects = objects

    @contextmanager
    def beating(self, log: RunLog, stopping: Stopping) -> Iterator[None]:
        """Beats during the `with` statement, and takes the beat back at its end. Stops the worker if its run is
        deleted."""
        ended = threading.Event()
        thread = threading.Thread(target=self._run, args=(ended, log, stopping), name="worker's beat", daemon=True)
        self._beat(0)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(timeout=INTERVAL_S)
            with suppress(StoreUnavailable):
                self._objects.delete([self._key])
                if log.is_deleted():
                    self._objects.delete_empty_folders()

    @property
    def _key(self) -> str:
        return f"{WORKERS}{self.name}.json"

    def _run(self, ended: threading.Event, log: RunLog, stopping: Stopping) -> None:
        count = 0
        while not ended.wait(INTERVAL_S):
            count += 1
            with suppress(RatchetError):  # one missed beat does no harm
                if log.is_deleted():
                    stopping.fail(Deleted.of(log.objects.url))
                    return
                self._beat(count)

    def _beat(self, count: int) -> None:
        self._objects.put(self._key, this_process(count).model_dump_json().encode())


class Neighbours:
    """Tells which processes are alive, without waiting: those whose beat has changed in the last `SILENT_S`, by the
    clock of this process, except those on this host that are known to have ended."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._seen: dict[str | None, tuple[int, float]] = {}
        """The newest count of each process, and when it was first seen; None: the driver."""
        self._alive: frozenset[str | None] = frozenset()
        self._looked = -float("inf")

    def alive(self) -> frozenset[str | None]:
        """Returns the names of the live rollout workers, and None if the driver lives. Looks again after `INTERVAL_S`,
        and deletes the beats of the dead."""
        now = time.monotonic()
        if now - self._looked >= INTERVAL_S:
            beats = read_all(self._objects)
            self._alive = frozenset(name for name, beat in beats.items() if self._is_alive(name, beat, now))
            self._seen = {name: seen for name, seen in self._seen.items() if name in beats}
            dead = [name for name in beats if name is not None and name not in self._alive]
            self._objects.delete([f"{WORKERS}{name}.json" for name in dead])  # else each look would read them again
            self._looked = now
        return self._alive

    def _is_alive(self, name: str | None, beat: SignOfLife, now: float) -> bool:
        if (isinstance(beat, Beat) and beat.stopped) or lives_here(beat) is False:
            return False
        count, since = self._seen.get(name, (-1, now))
        if beat.count != count:
            self._seen[name] = beat.count, now
            return True
        return now - since < SILENT_S


def workers(objects: ObjectStore) -> list[str]:
    """Returns the names of the rollout workers that are not known to have ended, without a change to the store."""
    beats = read_all(objects)
    return sorted(name for name, beat in beats.items() if name is not None and lives_here(beat) is not False)


def read_all(objects: ObjectStore) -> dict[str | None, SignOfLife]:
    """Reads the newest beats of the driver (None) and of the rollout workers, by name."""
    beats: dict[str | None, SignOfLife] = {}
    for key in [KEY, *objects.list(WORKERS)]:
        data = objects.get_if_there(key)
        with suppress(ValueError):  # it may be half-written
            if data is None:
                continue
            if key == KEY:
                beats[None] = Beat.model_validate_json(data)
            else:
                beats[key.removeprefix(WORKERS).removesuffix(".json")] = SignOfLife.model_validate_json(data)
    return beats
