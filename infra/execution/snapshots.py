"""Snapshots: every trained role's full state after an iteration, written by the workers that hold it.

A snapshot exists once its record is committed; the same record expires older snapshots. With `checkpoint.background`,
workers write while the next iteration generates, and the record is committed when all files are durable. A crash before
that costs only a replay.
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
    """The snapshots of one run, of which at most one is being written."""

    def __init__(self, config: RunConfig, store: RunStore, groups: WorkerGroups) -> None:
        self.config, self.store, self.groups = config, store, groups
        self._lock = threading.RLock()
        self.being_written: int | None = None
        """The version of the uncommitted snapshot that the workers are writing."""

    def begin(self, version: int) -> None:
        """Let the workers start writing their state, which is the state after `version` iterations."""
        with self._lock:
            assert self.being_written is None, "one at a time"
            self._in_all_roles(Worker.begin_save)
            self.being_written = version

    def finish(self) -> list[Commit]:
        """Wait until the snapshot is durable.

        Returns:
            The snapshot and the expiry of older ones, for the caller to commit; empty if there is no snapshot, or if a
            worker died before it was durable.
        """
        with self._lock:
            version, self.being_written = self.being_written, None
            if version is None:
                return []
            roles = self._in_all_roles(Worker.finish_save)
        durable = {role: ref for role, ref in roles.items() if ref is not None}
        if durable.keys() != roles.keys():
            note(f"the snapshot after {version} iterations was lost with a worker; the next one replaces it")
            return []
        existing = self.store.state.snapshots
        kept = kept_snapshots([*existing, version], self.config.checkpoint)
        return [Snapshot(version=version, roles=durable), *(Expire(version=old) for old in existing if old not in kept)]

    def _in_all_roles(self, method: Callable[[Worker, str], R]) -> dict[str, R]:
        """Call a method in every trained role's group, in all pools at the same time; the answers by role."""
        pending = {role: self.groups.of(role).submit(method, role) for role in self.config.trained}
        return {role: answer.result() for role, answer in pending.items()}

    def settle(self, *, wait: bool) -> None:
        """Commit the snapshot that is being written, if it is durable; with `wait`, wait until it is."""
        with self._lock:
            self._settle(wait)

    def _settle(self, wait: bool) -> None:
        if self.being_written is None:
            return
        if wait or all(self.groups.of(role).call(Worker.is_saved, role) for role in self.config.trained):
            self.store.commit_snapshot(self.finish())


def kept_snapshots(versions: list[int], checkpoint: CheckpointConfig) -> set[int]:
    """The versions to keep: the newest `keep.last`, and the multiples of `keep.every`."""
    every = checkpoint.keep.every
    return set(sorted(versions)[-checkpoint.keep.last :]) | {v for v in versions if every and v % every == 0}
