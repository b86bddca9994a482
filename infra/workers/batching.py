"""Batches the inference of shards that are computed in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.train.engine import InferenceEngine

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
        self._computed: dict[tuple[tuple[str, ...], float, int, int], list[dict[str, pa.Array]]] = {}

    def infer(
        self,
        batch: TrajectoryBatch,
        outputs: Iterable[str],
        *,
        temperature: float,
        micro_batch_tokens: int,
        top_k: int = 0,
    ) -> dict[str, pa.Array]:
        """Computes the outputs of a shard's batch together with those of the others; any other batch is computed
        alone."""
        names = tuple(outputs)
        number = next((number for number, own in enumerate(self._batches) if own is batch), None)
        if number is None:
            return super().infer(
                batch, names, temperature=temperature, micro_batch_tokens=micro_batch_tokens, top_k=top_k
            )
        asked = (names, temperature, micro_batch_tokens, top_k)
        if asked not in self._computed:
            self._computed[asked] = self.infer_each(
                self._batches, names, temperature=temperature, micro_batch_tokens=micro_batch_tokens, top_k=top_k
            )
        return self._computed[asked][number]

    def infer_each(
        self,
        batches: Sequence[TrajectoryBatch],
        outputs: Iterable[str],
        *,
        temperature: float,
        micro_batch_tokens: int,
        top_k: int = 0,
    ) -> list[dict[str, pa.Array]]:
        infer_each = self._engine().infer_each
        return infer_each(batches, outputs, temperature=temperature, micro_batch_tokens=micro_batch_tokens, top_k=top_k)
