"""Snapshots: every trained role's full state after an iteration, written by the workers that hold it.

One exists when its record is committed; those that are no longer to be kept go with it. In the background
(`checkpoint.background`) workers write while the next iteration generates, and the record follows when all is durable:
a crash before it costs a replay, nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from infra.progress import note
from infra.store.records import Commit, Expire, Snapshot
from infra.store.run_store import RunStore
from infra.workers.groups import WorkerGroups
from infra.workers.worker import Worker
from rlhf.config import CheckpointConfig, RunConfig

R = TypeVar("R")


class Snapshots:
    def __init__(self, config: RunConfig, store: RunStore, groups: WorkerGroups) -> None:
        self.config, self.store, self.groups = config, store, groups
        self._lock = threading.RLock()
        self.being_written: int | None = None
        """The version of the snapshot that the workers are writing: it is not committed yet."""

    def begin(self, version: int) -> None:
        """Let the workers write what they hold, which is the state after `version` iterations."""
        with self._lock:
            assert self.being_written is None, "one at a time"
            self._in_all_roles(Worker.begin_save)
            self.being_written = version

    def finish(self) -> list[Commit]:
        """Wait until it is durable; the records that say so, which the caller commits."""
        with self._lock:
            version, self.being_written = self.being_written, None
            if version is None:
                return []
            roles = self._in_all_roles(Worker.finish_save)
        durable = {role: ref for role, ref in roles.items() if ref is not None}
        if durable.keys() != roles.keys():
            note(f"the snapshot after {version} iterations went with a worker; the next one will do")
            return []
        there = self.store.state.snapshots
        kept = kept_snapshots([*there, version], self.config.checkpoint)
        return [Snapshot(version=version, roles=durable), *(Expire(version=old) for old in there if old not in kept)]

    def _in_all_roles(self, method: Callable[[Worker, str], R]) -> dict[str, R]:
        """What each role's workers answer; those of different pools at the same time."""
        pending = {role: self.groups.of(role).submit(method, role) for role in self.config.trained}
        return {role: answer.result() for role, answer in pending.items()}

    def settle(self, *, wait: bool) -> None:
        """Commit the snapshot that is being written, once it is durable."""
        with self._lock:
            self._settle(wait)

    def _settle(self, wait: bool) -> None:
        if self.being_written is None:
            return
        if wait or all(self.groups.of(role).call(Worker.is_saved, role) for role in self.config.trained):
            self.store.commit_snapshot(self.finish())


def kept_snapshots(versions: list[int], checkpoint: CheckpointConfig) -> set[int]:
    """The newest `keep.last`, and those of every `keep.every` iterations."""
    every = checkpoint.keep.every
    return set(sorted(versions)[-checkpoint.keep.last :]) | {v for v in versions if every and v % every == 0}
