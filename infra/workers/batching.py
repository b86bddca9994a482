"""Batches the inference of shards that are computed in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.train.engine import InferenceEngine, InferencePlan

if TYPE_CHECKING:
    import pyarrow as pa


class Together(InferenceEngine):
    """An engine that infers for all shards of a call at once, although each compute function knows only its own.

    A request for the first shard's batch is computed for the batches of all, because the other shards will ask for the
    same.
    """

    def __init__(self, engine: Callable[[], InferenceEngine], batches: Sequence[TrajectoryBatch]) -> None:
        """Takes a function that returns the engine, ready for inference, and the rows of each shard."""
        self._engine, self._batches = engine, batches
        self._computed: dict[InferencePlan, list[dict[str, pa.Array]]] = {}

    def inferred(self, batch: TrajectoryBatch, plan: InferencePlan) -> dict[str, pa.Array]:
        """Computes the outputs of a shard's batch together with those of the others; any other batch is computed
        alone."""
        number = next((number for number, own in enumerate(self._batches) if own is batch), None)
        if number is None:
            return super().inferred(batch, plan)
        if plan not in self._computed:
            self._computed[plan] = self.infer_each(self._batches, plan)
        return self._computed[plan][number]

    def infer_each(self, batches: Sequence[TrajectoryBatch], plan: InferencePlan) -> list[dict[str, pa.Array]]:
        return self._engine().infer_each(batches, plan)
