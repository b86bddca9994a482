"""The interfaces of train engines, and the plain data that they exchange."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ratchet.rlhf.algorithms.optimizers import Optimizer

if TYPE_CHECKING:
    import pyarrow as pa

    from ratchet.rlhf.algorithms.objectives import Objective
    from ratchet.rlhf.batch import TrajectoryBatch
    from ratchet.rlhf.weights.stored_state import StoredState


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer steps of an update."""

    lr: float
    optimizer: Optimizer
    grad_clip: float | None
    micro_batch_tokens: int
    mini_batches: tuple[tuple[int, ...], ...]
    """Rows of the batch for each optimizer step."""
    temperature: float


@dataclass(frozen=True)
class InferencePlan:
    """What to compute without gradients."""

    outputs: tuple[str, ...]
    """Names of the outputs; see `InferenceEngine.infer`."""
    temperature: float
    micro_batch_tokens: int
    top_k: int = 0
    """Number of most likely tokens."""


class InferenceEngine(Protocol):
    """A model that computes outputs: actor and reference give log_probs and entropy, a critic gives values."""

    def infer(
        self,
        batch: TrajectoryBatch,
        outputs: Iterable[str],
        *,
        temperature: float,
        micro_batch_tokens: int,
        top_k: int = 0,
    ) -> dict[str, pa.Array]:
        """Computes per-token outputs without gradients.

        Args:
            outputs: names of the outputs: `log_probs` and `entropy` in nats and `sum_pi_squared`, or `values`;
                `topk_ids`, `topk_log_probs` and `tail_log_probs` describe the most likely tokens.
            top_k: number of most likely tokens.

        Returns:
            Columns by name: one float32 list per row of the batch, with one value per response token, or `top_k` of
            `topk_ids` and `topk_log_probs`.
        """
        return self.inferred(batch, InferencePlan(tuple(outputs), temperature, micro_batch_tokens, top_k))

    def inferred(self, batch: TrajectoryBatch, plan: InferencePlan) -> dict[str, pa.Array]:
        """Computes what `infer` is asked for."""
        [computed] = self.infer_each([batch], plan)
        return computed

    def infer_each(self, batches: Sequence[TrajectoryBatch], plan: InferencePlan) -> list[dict[str, pa.Array]]:
        """Computes the outputs of several batches as `infer` does, bit for bit; together, so that fewer ranks wait."""
        ...


class TrainEngine(InferenceEngine, Protocol):
    """A model that is trained.

    It may span several processes. Each makes the same calls with the whole batch and gets the whole result (SPMD). The
    engine distributes trajectories over the ranks; this changes results by rounding at most. With `sequence_parallel`
    or `tensor_parallel`, adjacent ranks get the same trajectories and split the positions of each sequence, or each
    matrix. The gradient is always that of the whole mini-batch.
    """

    def update(self, batch: TrajectoryBatch, objective: Objective, plan: OptimizerPlan) -> dict[str, float]:
        """Takes the optimizer steps of the plan; returns metrics by name, averaged over the steps.

        `batch` needs the columns that the objective reads.

        Raises:
            NotFinite: the norm of a gradient is not finite; the state must be loaded again.
        """
        ...

    def update_flops(self, batch: TrajectoryBatch, plan: OptimizerPlan) -> float:
        """Returns the FLOPs of the plan's optimizer steps over all ranks; see `TrainingFlops`."""
        ...

    def digest(self) -> str:
        """Computes the digest of weights and optimizer state as logical tensors, whatever their layout."""
        ...

    def state(self, *, optimizer: bool = True) -> dict[str, bytes]:
        """Returns this rank's files of the full state by name: safetensors and JSON, loadable in any layout. Without
        `optimizer`, only the model's."""
        ...

    def load_state(self, stored: StoredState) -> None:
        """Loads the state from the files of all ranks that wrote it."""
        ...

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Moves state to the device, or to host memory to make room for another model."""
        ...
