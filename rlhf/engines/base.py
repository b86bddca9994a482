"""The two protocols, and the plain data that crosses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhf import seeding
from rlhf.engines.optimizers import Optimizer

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from rlhf.algorithms.objectives import Objective
    from rlhf.batch import TrajectoryBatch


@dataclass(frozen=True)
class Request:
    """One trajectory to generate."""

    trajectory_id: str
    prompt_ids: tuple[int, ...]
    begun: int = 0
    """So many of them are tokens of the response, written before: it goes on from there."""
    max_tokens: int | None = None
    """At most so many, where that is fewer than the sampling's."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the noise of a trajectory depends on `seed` and its id alone."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Texts that end a response, which keeps them."""


@dataclass(frozen=True)
class Generation:
    """A response: its tokens (end-of-sequence included), their log-probs, and why it ended."""

    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str


def limit_of(request: Request, sampling: Sampling) -> int:
    """The most tokens that a request may be answered with."""
    return sampling.max_tokens if request.max_tokens is None else min(request.max_tokens, sampling.max_tokens)


def seed_of(request: Request, sampling: Sampling) -> int:
    """For an engine that takes a seed with each request."""
    place = [request.begun] if request.begun else []
    return int(seeding.generator(sampling.seed, "generate", request.trajectory_id, *place).integers(2**63))


class RolloutEngine(Protocol):
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
        """Responses in the order of the requests. The same requests and weights give the same responses.

        Log-probs are those of the temperature-scaled logits, before any truncation by `top_p`; at temperature 0
        (greedy) they are those of the plain logits.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> None:
        """Take over the policy's weights, in place, named as in a checkpoint; with PEFT's config of an adapter, the
        adapter's."""
        ...

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Make room: what lies on the device, and what in host memory."""
        ...

    def close(self) -> None:
        """End what does not end by itself."""
        ...


@dataclass(frozen=True)
class OptimizerPlan:
    """An update, as one optimizer step after the other."""

    lr: float
    optimizer: Optimizer
    grad_clip: float | None
    micro_batch_tokens: int
    mini_batches: tuple[tuple[int, ...], ...]
    """Rows of the batch, for each optimizer step."""
    temperature: float


class InferenceEngine(Protocol):
    """A model that is asked: actor and reference give log_probs and entropy, a critic values."""

    def infer(
        self, batch: TrajectoryBatch, outputs: Iterable[str], *, temperature: float, micro_batch_tokens: int
    ) -> dict[str, pa.Array]:
        """Per-token columns by name (`log_probs`, `entropy`, `values`), in the order of the batch."""
        ...


class TrainEngine(InferenceEngine, Protocol):
    """A model that is trained.

    One model may be many processes. Each makes the same calls with the whole batch, and has the whole result (SPMD).
    How they share out the work is the engine's own affair, and changes results by rounding at most: trajectories are
    dealt out; with `sequence_parallel` or `tensor_parallel`, ranks in a row are dealt the same ones, and
    share each sequence's positions, or each matrix. The gradient is always that of the whole mini-batch.
    """

    def update(self, batch: TrajectoryBatch, objective: Objective, plan: OptimizerPlan) -> dict[str, float]:
        """Take the optimizer steps of the plan; metrics are means over them. Raises `NotFinite`."""
        ...

    def digest(self) -> str:
        """Over weights and optimizer state, as logical tensors: not of how they are laid out."""
        ...

    def state(self) -> dict[str, bytes]:
        """The full state as files: safetensors and JSON, loadable by any layout."""
        ...

    def load_state(self, files: Mapping[str, bytes]) -> None: ...

    def place(self, *, model: bool, optimizer: bool) -> None:
        """Make room for another model: what lies on the device, and what in host memory."""
        ...
