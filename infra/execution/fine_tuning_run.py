"""Fine-tuning outside the RL loop: rounds of optimizer steps, each committed with the full state after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ratchet.infra.execution.claims import begin, claim, run_url
from ratchet.infra.execution.heartbeat import beating
from ratchet.infra.execution.preflight.models import say_attention
from ratchet.infra.execution.stopping import Stopping
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.manifest import Checkpoint
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Expire, Snapshot, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.checkpoints import stored_state
from ratchet.rlhf.config import FitConfig, differences, validated
from ratchet.rlhf.config.fine_tuning import MAY_CHANGE
from ratchet.rlhf.config.roles import ROLES
from ratchet.rlhf.data import files
from ratchet.rlhf.distributed import determinism
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.model_folders import initial_digest
from ratchet.rlhf.models.tokenizers import tokenizer_digest
from ratchet.rlhf.train.model_engine import ModelEngine


@dataclass
class Fitting:
    """A fine-tuning run that this process drives."""

    store: RunStore
    role: str
    stopping: Stopping

    @property
    def round(self) -> int:
        """The number of committed rounds."""
        return self.store.state.iteration

    def load(self, engine: ModelEngine) -> None:
        """Loads the state after the last committed round, if there is one."""
        snapshots = self.store.state.snapshots
        if snapshots:
            checkpoint = self.store.checkpoint(snapshots[max(snapshots)][self.role])
            engine.load_state(stored_state(self.store, checkpoint))

    def commit(self, engine: ModelEngine, metrics: dict[str, float]) -> None:
        """Commits a round's metrics and state in one record, which also expires the previous state."""
        store, version = self.store, self.round + 1
        weights = Weights(version=version, digest=engine.digest())
        folder = store.checkpoint_folder(self.role, weights)
        files = store.write_checkpoint_files(folder, engine.state())
        checkpoint = Checkpoint(role=self.role, weights=weights, files=files)
        durable = {self.role: store.write_checkpoint_manifest(folder, checkpoint)}
        expired = [Expire(version=older) for older in store.state.snapshots]
        store.close(metrics, Snapshot(version=version, roles=durable), *expired)


@contextmanager
def fitting(config: FitConfig, role: str, take_over: bool) -> Iterator[Fitting]:
    """Claims a fine-tuning run; creates it if it does not exist.

    Raises:
        UserError: the run exists and is another one.
        Fenced: another process drives the run.
    """
    say_attention(config.model)
    if config.run.deterministic:
        determinism.enforce()
    store = RunStore(ObjectStore(run_url(config.run.store, config.run.name)))
    tokenizer = tokenizer_digest(config.model, writes=ROLES[role].head == "policy")
    model = initial_digest(config.model, config.run.seed), tokenizer
    # covers the examples, too, so that a changed file is noticed on resume
    weights = Weights(version=0, digest=" ".join([*model, files.data_digest(config.data)]))
    state = begin(store, config, take_over)
    if state.claim is not None:
        _check_same(config, state.claim.config, state.initial.get(role) == weights)
    claim(store, config, initial={role: weights})
    store.sweep(())
    stopping = Stopping("the same command")
    with stopping.watching(), beating(store.log, stopping):
        try:
            yield Fitting(store, role, stopping)
        except Corrupt:
            store.log.check_claim()  # after a takeover the new driver may have deleted the state
            raise


def _check_same(config: FitConfig, committed: dict[str, Any], same_start: bool) -> None:
    """Raises `UserError` if the settings differ. Models and examples are compared by digest, not by path."""
    before = validated(type(config), committed, "the fit's first settings")
    changed = differences(
        before.model_dump(mode="json", exclude=MAY_CHANGE), config.model_dump(mode="json", exclude=MAY_CHANGE)
    )
    if changed or not same_start:
        differing = "; ".join(changed) or "the model's files or the examples"
        raise UserError(
            f"run {config.run.name} in {config.run.store} was started with different settings ({differing}): undo the "
            "change, or choose another run.name (on the command line: --output)"
        )
