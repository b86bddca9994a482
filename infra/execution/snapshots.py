"""Snapshots: every trained role's full state after an iteration, written by the workers that hold it.

A snapshot exists once its record is committed; the same record expires older snapshots. With `checkpoint.background`,
workers write while the next iterations compute, and the record is committed when all files are durable. A crash before
that costs only a replay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich import filesize

from ratchet.infra.progress import note
from ratchet.infra.store.records import Commit, Expire, Snapshot
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.worker import Worker
from ratchet.infra.workers.worker_groups import WorkerGroups
from ratchet.rlhf.config import CheckpointConfig, RunConfig
from ratchet.rlhf.errors import counted
from ratchet.rlhf.models.model_folders import model_folder, parameter_count

R = TypeVar("R")
FLOAT32 = 4
"""Bytes of a float32."""


class Snapshots:
    """The snapshots of one run, of which at most one is being written."""

    def __init__(self, config: RunConfig, store: RunStore, groups: WorkerGroups) -> None:
        self.config, self.store, self.groups = config, store, groups
        self._lock = threading.RLock()
        self.being_written: int | None = None
        """The version of the uncommitted snapshot that the workers are writing."""
        self._began = time.monotonic()
        """Start of the last snapshot, or of the driver."""
        self._cost_s = 0.0
        """Seconds for which the run has waited for the last snapshot."""

    def is_due(self, version: int) -> bool:
        """True if a snapshot of the state after `version` iterations is due, according to `checkpoint`."""
        checkpoint = self.config.checkpoint
        if checkpoint.keep.best and self.config.validates(version):
            return True
        if self.config.syncs_reference(version - 1):  # replaying this needs the actor's weights of that time
            return True
        if checkpoint.every is not None:
            return version % checkpoint.every == 0
        replayed, kept = version - max(self.store.state.snapshots, default=0), checkpoint.keep.every
        if replayed >= checkpoint.max_replay or (kept is not None and version % kept == 0):
            return True
        elapsed_s = time.monotonic() - self._began
        return self.being_written is None and is_affordable(self._cost_s, elapsed_s, checkpoint.max_share)

    def begin(self, version: int) -> None:
        """Makes the workers start writing their state, which is the state after `version` iterations."""
        with self._lock:
            assert self.being_written is None, "one at a time"
            self._began, self._cost_s = time.monotonic(), 0.0
            with self._waiting():
                self._in_all_roles(Worker.begin_save)
            self.being_written = version

    def finish(self) -> list[Commit]:
        """Waits until the snapshot is durable, during which the run waits, too. Returns as `_finished`."""
        with self._waiting():
            return self._finished()

    def _finished(self) -> list[Commit]:
        """Makes the workers write the manifests of a durable snapshot.

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
            note(f"the snapshot after {counted(version, 'iteration')} was lost with a worker; the next one replaces it")
            return []
        existing = self.store.state.snapshots
        kept = kept_snapshots([*existing, version], self.config.checkpoint) | self._best(existing)
        return [Snapshot(version=version, roles=durable), *(Expire(version=old) for old in existing if old not in kept)]

    def _best(self, versions: Iterable[int]) -> set[int]:
        """Returns the versions with the best validations, at most `keep.best`."""
        best = self.config.checkpoint.keep.best
        scores = self.store.validation_scores(versions, self.config.validation.metric) if best else {}
        return set(sorted(scores, key=lambda version: scores[version], reverse=True)[:best])

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._cost_s += time.monotonic() - started

    def _in_all_roles(self, method: Callable[[Worker, str], R]) -> dict[str, R]:
        """Calls a method in every trained role's group, in all pools at the same time. Returns the answers by role."""
        pending = {role: self.groups.of(role).submit(method, role) for role in self.config.trained}
        return {role: answer.result() for role, answer in pending.items()}

    def settle(self, *, wait: bool) -> None:
        """Commits the snapshot that is being written, if it is durable; with `wait`, waits until it is."""
        with self._lock:
            self._settle(wait)

    def _settle(self, wait: bool) -> None:
        if self.being_written is None:
            return
        if all(self.groups.of(role).call(Worker.is_saved, role) for role in self.config.trained):
            self.store.commit_snapshot(self._finished())
        elif wait:
            self.store.commit_snapshot(self.finish())


def describe(config: RunConfig) -> str:
    """Describes the size and the frequency of snapshots."""
    checkpoint, sizes = config.checkpoint, _sizes(config)
    size = "snapshots" if sizes is None else f"snapshots of {filesize.decimal(sum(sizes))}"
    if checkpoint.every is not None:
        return f"{size} every {'iteration' if checkpoint.every == 1 else f'{checkpoint.every} iterations'}"
    return (
        f"{size} at least every {checkpoint.max_replay} iterations, more often if they take no more than "
        f"{100 * checkpoint.max_share:g} % of the time"
    )


def _sizes(config: RunConfig) -> list[int] | None:
    """Returns the bytes of each trained role's state; None: unknown, because it has adapters."""
    models = {role: config.model_of(role) for role in config.trained}
    if any(model.lora is not None for model in models.values()):
        return None
    tensors = dict.fromkeys(config.averages, 1)
    tensors |= {role: 1 + len(trainer.optimizer.state) for role, trainer in config.trainers.items()}
    return [FLOAT32 * tensors[role] * parameter_count(model_folder(model)) for role, model in models.items()]


def kept_snapshots(versions: list[int], checkpoint: CheckpointConfig) -> set[int]:
    """Returns the versions to keep: the newest `keep.last`, and the multiples of `keep.every`."""
    every = checkpoint.keep.every
    return set(sorted(versions)[-checkpoint.keep.last :]) | {v for v in versions if every and v % every == 0}


def is_affordable(cost_s: float, elapsed_s: float, max_share: float) -> bool:
    """True if another snapshot that costs as much as the last one takes at most `max_share` of the time.

    Args:
        cost_s: seconds for which the run waited for the last snapshot; 0 before the first.
        elapsed_s: seconds since the last snapshot began.
    """
    return cost_s <= max_share * elapsed_s
