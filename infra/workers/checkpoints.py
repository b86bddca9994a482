"""Checkpoints in a run's store: workers write them, and engines read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ratchet.infra.store.manifest import Checkpoint, File
from ratchet.infra.store.records import ObjectRef, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.distributed import ranks

if TYPE_CHECKING:
    from ratchet.rlhf.weights.stored_state import StoredState

T = TypeVar("T")


def stored_state(store: RunStore, checkpoint: Checkpoint) -> StoredState:
    """Opens a checkpoint; its tensors are read by range and verified."""
    from ratchet.rlhf.weights.stored_state import StoredState

    return StoredState({name: file.bytes for name, file in checkpoint.files.items()}, store.ranges(checkpoint))


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written."""

    folder: str
    weights: Weights
    written: Future[dict[str, File]]


class CheckpointWriter:
    """A background writer of this rank's share of the roles' checkpoints."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._saving: dict[str, Saving] = {}

    def begin(self, role: str, weights: Weights, files: Mapping[str, bytes]) -> None:
        """Starts to write this rank's files of a role's state."""
        folder = self._store.checkpoint_folder(role, weights)
        written = in_background(lambda: self._store.write_checkpoint_files(folder, files))
        self._saving[role] = Saving(folder, weights, written)

    def is_done(self, role: str) -> bool:
        """True if this rank has no pending write for the role."""
        return role not in self._saving or self._saving[role].written.done()

    def finish(self, role: str) -> ObjectRef | None:
        """See `Worker.finish_save`."""
        saving = self._saving.pop(role, None)
        own_share = None if saving is None else saving.written.result()
        shares = ranks.gathered(own_share)
        # a rank that restarted since `begin` has no share
        if saving is None or None in shares:
            return None
        files = {name: file for share in shares for name, file in share.items()}
        checkpoint = Checkpoint(role=role, weights=saving.weights, files=files)
        return self._store.write_checkpoint_manifest(saving.folder, checkpoint) if ranks.rank() == 0 else None

    def close(self) -> None:
        """Waits for pending writes if the run was deleted, so that the driver can delete their files, too."""
        if self._saving and self._store.log.is_deleted():
            wait([saving.written for saving in self._saving.values()])


def in_background(work: Callable[[], T]) -> Future[T]:
    """Runs `work` in a thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # the process may exit before a daemon thread is done: its files count only once a record names them
    threading.Thread(target=run, daemon=True).start()
    return future
