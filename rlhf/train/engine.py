"""The protocols of train engines, and the plain data that they exchange."""

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


class InferenceEngine(Protocol):
    """A model that computes outputs: actor and reference give log_probs and entropy, a critic gives values."""

    def infer(
        self, batch: TrajectoryBatch, outputs: Iterable[str], *, temperature: float, micro_batch_tokens: int
    ) -> dict[str, pa.Array]:
        """Compute per-token outputs without gradients.

        Args:
            batch: prompts and responses.
            outputs: names of the outputs: `log_probs` and `entropy` in nats, or `values`.
            temperature: divisor of the logits.
            micro_batch_tokens: maximum number of tokens per forward pass.

        Returns:
            Columns by name: one float32 list per row of the batch, with one value per response token.
        """
        [computed] = self.infer_each([batch], outputs, temperature=temperature, micro_batch_tokens=micro_batch_tokens)
        return computed

    def infer_each(
        self, batches: Sequence[TrajectoryBatch], outputs: Iterable[str], *, temperature: float, micro_batch_tokens: int
    ) -> list[dict[str, pa.Array]]:
        """Compute the outputs of several batches together, so that fewer ranks wait for others.

        Args:
            batches: prompts and responses.
            outputs: see `infer`.
            temperature: see `infer`.
            micro_batch_tokens: see `infer`.

        Returns:
            What `infer` returns for each batch, bit for bit.
        """
        ...


class TrainEngine(InferenceEngine, Protocol):
    """A model that is trained.

    A model may span several processes. Each makes the same calls with the whole batch and gets the whole result (SPMD).
    The engine distributes the work; this changes results by rounding at most. Trajectories are distributed over the
    ranks. With `sequence_parallel` or `tensor_parallel`, adjacent ranks get the same trajectories and split the
    positions of each sequence, or each matrix. The gradient is always that of the whole mini-batch.
    """

    def update(self, batch: TrajectoryBatch, objective: Objective, plan: OptimizerPlan) -> dict[str, float]:
        """Take the optimizer steps of the plan.

        Args:
            batch: prompts, responses and the columns that the objective reads.
            objective: the loss to minimize.
            plan: the optimizer steps.

        Returns:
            Metrics by name, averaged over the steps.

        Raises:
            NotFinite: the norm of a gradient is not finite; the state must be loaded again.
        """
        ...

    def update_flops(self, batch: TrajectoryBatch, plan: OptimizerPlan) -> float:
        """FLOPs of the plan's optimizer steps over all ranks, without recomputation; see `TrainingFlops`."""
        ...

    def digest(self) -> str:
        """Compute the digest of weights and optimizer state as logical tensors, whatever their layout."""
        ...

    def state(self) -> dict[str, bytes]:
        """Return this rank's files of the full state by name: safetensors and JSON, loadable in any layout."""
        ...

    def load_state(self, stored: StoredState) -> None:
        """Load the state from the files of all ranks that wrote it."""
        ...

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Move state to the device or to host memory, to make room for another model.

        Args:
            model: whether the weights stay on the device.
            optimizer: whether the optimizer state stays on the device.
        """
        ...
