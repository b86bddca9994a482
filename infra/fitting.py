"""A fit as a run: rounds of optimizer steps, each committed together with the full state in which it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from infra.claims import begin, claim, run_url
from infra.driver import Stopped, on_signals
from infra.heartbeat import Heartbeat
from infra.manifest import Checkpoint
from infra.objects import Objects
from infra.records import Retire, Snapshot, Weights
from infra.store import RunStore
from rlhf.config import FitConfig
from rlhf.config.fitting import OPERATIONAL
from rlhf.data.datasets import file_digest
from rlhf.engines.model_engine import ModelEngine
from rlhf.errors import UserError
from rlhf.models import initial_digest, tokenizer_digest


@dataclass
class Fitting:
    """A fit that this process drives."""

    store: RunStore
    role: str
    _stop: threading.Event = field(default_factory=threading.Event)

    def request_stop(self, *_: Any) -> None:
        self._stop.set()

    def check_stop(self) -> None:
        """Between two steps: those since the last snapshot are taken again."""
        if self._stop.is_set():
            raise Stopped(f"stopped as asked; the same command goes on from round {self.round}")

    @property
    def round(self) -> int:
        return self.store.state.iteration

    def load(self, engine: ModelEngine) -> None:
        """The state after the last committed round, if there is one."""
        snapshots = self.store.state.snapshots
        if snapshots:
            checkpoint = self.store.checkpoint(snapshots[max(snapshots)][self.role])
            engine.load_state(self.store.read_checkpoint(checkpoint))

    def commit(self, engine: ModelEngine, metrics: dict[str, float]) -> None:
        """The end of a round: metrics and state, in one record. The state before is not needed any more."""
        store, version = self.store, self.round + 1
        weights = Weights(version=version, digest=engine.digest())
        folder = store.checkpoint_folder(self.role, weights)
        files = store.write_checkpoint_files(folder, engine.state())
        checkpoint = Checkpoint(role=self.role, weights=weights, files=files)
        durable = {self.role: store.write_checkpoint_manifest(folder, checkpoint)}
        older = [Retire(version=each) for each in store.state.snapshots]
        store.close(metrics, Snapshot(version=version, roles=durable), *older)


@contextmanager
def fitting(config: FitConfig, role: str, take_over: bool) -> Iterator[Fitting]:
    """Claim the run of a fit, which is made if it does not exist. Raises `UserError` if the run is another fit, and
    `Fenced` if another process drives it."""
    store = RunStore(Objects(run_url(config.run.store, config.run.name)))
    model = initial_digest(config.model, config.run.seed), tokenizer_digest(config.model)
    weights = Weights(version=0, digest=" ".join([*model, file_digest(config.data)]))
    state = store.log.read()
    if state.claim is not None:
        _check_same(config, state.claim.config, state.initial.get(role) == weights)
    begin(store, config, take_over)
    claim(store, config, initial={role: weights})
    fit = Fitting(store, role)
    beat = Heartbeat(store.objects, store.log.epoch, fit.request_stop)
    try:
        with on_signals(fit.request_stop):
            yield fit
    finally:
        beat.close()


def _check_same(config: FitConfig, committed: dict[str, Any], same_start: bool) -> None:
    """A fit is one thing: what it has committed is not gone on with under other settings."""
    now = json.loads(config.model_dump_json())
    for tree in (now, committed := dict(committed)):
        tree["run"] = {"seed": tree.get("run", {}).get("seed")}
    changed = [key for key in now.keys() | committed.keys() if key not in OPERATIONAL]
    changed = sorted(key for key in changed if now.get(key) != committed.get(key))
    if changed or not same_start:
        what = ", ".join(changed) or "the model's files or the examples"
        raise UserError(
            f"run {config.run.name} in {config.run.store} was begun with other settings ({what}): choose another "
            "run.name, or undo the change"
        )
