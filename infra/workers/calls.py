"""What a worker is asked, and what a stage's compute function is given and gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from infra.store.records import ShardRef, Weights
from infra.workers.engines import Engines
from infra.workers.resources import Resources
from rlhf.batch import TrajectoryBatch
from rlhf.engines.generation import Interruptible
from rlhf.schema import Column
from rlhf.stage_config import StageConfig

if TYPE_CHECKING:
    from rlhf.engines.base import Generation, InferenceEngine, Request, RolloutEngine, Sampling, TrainEngine


class ShardSummary(BaseModel):
    """Small results of a shard, committed beside its rows. A stage that has others adds fields, with defaults if runs
    that are stored already do not have them."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    metrics: dict[str, float] = {}
    cursor: int | None = None
    """Prompts drawn since the run began, where the stage draws some."""
    controllers: dict[str, float] | None = None
    """Coefficients of the next iteration, where the stage steers some."""


C = TypeVar("C", bound=StageConfig)
S = TypeVar("S", bound=ShardSummary)
C_co = TypeVar("C_co", bound=StageConfig, covariant=True)

Input = tuple[tuple[ShardRef, ...], tuple[str, ...]]
"""Of a stage that is read: its shards, and the columns. With no column, it says which trajectories to work on."""

GenerationKey = tuple[str, int, int]
"""Stage, iteration and shard."""


@dataclass(frozen=True)
class ShardOutput(Generic[S]):
    """What a stage computes of one shard."""

    batch: TrajectoryBatch
    summary: S


@dataclass(frozen=True)
class Call(Generic[C_co]):
    """One shard of a stage, or one update."""

    term: int
    stage: str
    iteration: int
    config: C_co
    inputs: tuple[Input, ...] = ()
    shard: int = 0
    attempt: int = 0
    role: str | None = None
    weights: Weights | None = None
    """What the role's weights are: a worker that holds others refuses the call."""
    cursor: int = 0
    controllers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RowsCall(Generic[C, S]):
    """A shard to compute."""

    call: Call[C]
    compute: Callable[[Context[C]], ShardOutput[S]]
    writes: tuple[Column, ...]


@dataclass(frozen=True)
class UpdateCall(Generic[C]):
    """An update to make."""

    call: Call[C]
    compute: Callable[[Context[C]], dict[str, float]]


@dataclass(frozen=True)
class Rows(Generic[S]):
    """A shard that was computed and written."""

    shard: ShardRef | None
    """What was written, by the rank that writes."""
    summary: S
    seconds: float


@dataclass(frozen=True)
class Updated:
    before: Weights
    weights: Weights
    metrics: dict[str, float]
    seconds: float
    device: str
    """What computed it: cpu or cuda."""


class Interrupted(Exception):
    """A generation is not complete: new weights may come, and whoever asks again continues it."""


@dataclass
class Context(Generic[C]):
    """What a stage's compute function is given: the columns and the config that it declares, and the engine of its
    role."""

    call: Call[C]
    batch: TrajectoryBatch
    engines: Engines
    resources: Resources
    generations: dict[GenerationKey, Interruptible] = field(default_factory=dict)
    """Generations that were interrupted, and continue when they are asked for again."""
    earlier_s: float = 0.0
    """Seconds that earlier pieces of an interrupted generation took."""

    @property
    def config(self) -> C:
        return self.call.config

    @property
    def iteration(self) -> int:
        return self.call.iteration

    @property
    def shard(self) -> int:
        return self.call.shard

    @property
    def engine(self) -> InferenceEngine:
        """The model of the stage's role, to be asked."""
        return self.engines.inference(self._role)

    @property
    def trainer(self) -> TrainEngine:
        """The model of the stage's role, to be updated."""
        return self.engines.model(self._role, learns=True)

    @property
    def rollout(self) -> RolloutEngine:
        return self.engines.rollout()

    @property
    def _role(self) -> str:
        assert self.call.role is not None, "a stage without a role has no engine"
        return self.call.role

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, piece_tokens: int | None = None
    ) -> tuple[list[Generation], list[list[int]]]:
        """Responses, and the version of the policy that drew each of their tokens.

        Args:
            requests: what to respond to.
            sampling: how.
            piece_tokens: after so many tokens, new weights may come; None: not before all responses are complete.

        Raises:
            Interrupted: not all of them are complete; asked again, it continues.
        """
        assert self.call.weights is not None
        key = self.call.stage, self.iteration, self.shard
        generation = self.generations.setdefault(key, Interruptible(requests))
        tokens = sampling.max_tokens if piece_tokens is None else piece_tokens
        started = time.perf_counter()
        try:
            complete = generation.go_on(self.rollout, sampling, tokens, self.call.weights.version)
        except BaseException:
            del self.generations[key]
            raise
        if not complete:
            generation.seconds += time.perf_counter() - started
            raise Interrupted(key)
        del self.generations[key]
        self.earlier_s = generation.seconds
        return generation.generations, generation.versions
