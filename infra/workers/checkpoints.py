"""Checkpoints in a run's store, as engines read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet.infra.store.manifest import Checkpoint
from ratchet.infra.store.run_store import RunStore

if TYPE_CHECKING:
    from ratchet.rlhf.weights.stored_state import StoredState


def stored_state(store: RunStore, checkpoint: Checkpoint) -> StoredState:
    """Open a checkpoint, whose tensors are then read by range and verified.

    Args:
        store: the run's store.
        checkpoint: the checkpoint's manifest.

    Returns:
        The stored state.
    """
    from ratchet.rlhf.weights.stored_state import StoredState

    return StoredState({name: file.bytes for name, file in checkpoint.files.items()}, store.ranges(checkpoint))
