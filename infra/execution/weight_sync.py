"""Gives the rollout the actor's new weights, from process to process, and measures the cost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ratchet.infra.progress import note
from ratchet.infra.store.records import Weights
from ratchet.infra.workers.worker import Worker
from ratchet.infra.workers.worker_groups import WorkerGroup
from ratchet.rlhf.config import RunConfig


@dataclass
class Transfers:
    """The transfers of weights to the rollout since the last iteration was closed."""

    seconds: float = 0.0
    nbytes: int = 0
    """Bytes received by each process of the rollout."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics; empty without a transfer."""
        if not self.seconds:
            return {}
        return {"timing_s/update_weights": self.seconds, "perf/weight_sync_bytes": float(self.nbytes)}


class WeightSync:
    """The connection between the workers that train the actor and those of a rollout in other processes."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._url: str | None = None
        """The URL of the newest link's rendezvous."""
        self._transfers = Transfers()

    def between(self, actor: WorkerGroup, rollout: WorkerGroup, weights: Weights) -> int | None:
        """Broadcasts the actor's weights to the rollout. Returns the bytes sent; None: there is no connection, or it
        failed."""
        if not self._connected(actor, rollout):
            return None
        with ThreadPoolExecutor(1) as thread:
            # in another thread, because the broadcast needs both sides at once
            receiving = thread.submit(rollout.call, Worker.receive_weights, weights)
            sent = actor.call(Worker.send_weights, weights)
            return sent if receiving.result() else None

    def _connected(self, actor: WorkerGroup, rollout: WorkerGroup) -> bool:
        if self._url is not None and all(group.call(Worker.is_connected, self._url) for group in (actor, rollout)):
            return True
        pool = self._config.pool_of("rollout")
        # rank 0 of the trainer, and all ranks of the rollout
        count = 1 + (1 if pool is None else self._config.pools[pool].workers)
        self._url = url = actor.call(Worker.open_rendezvous)
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(rollout.call, Worker.connect, url, count, sends=False)
            joined = actor.call(Worker.connect, url, count, sends=True)
            if joining.result() and joined:
                return True
        note("the rollout's workers cannot be reached from the trainer's: new weights go through the store")
        return False

    def count(self, seconds: float, nbytes: int) -> None:
        """Counts a transfer, unless the rollout loaded stored weights (0 bytes)."""
        if nbytes:
            self._transfers.seconds += seconds
            self._transfers.nbytes += nbytes

    def take(self) -> Transfers:
        """Returns the transfers since the last call."""
        taken, self._transfers = self._transfers, Transfers()
        return taken
