"""Calls to workers and their results, and the arguments and results of a stage's compute function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from ratchet.infra.store.records import ShardRef, Weights
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.role_engines import Engines
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.schema import Column
from ratchet.rlhf.stage_config import StageConfig

if TYPE_CHECKING:
    from ratchet.infra.store.images import Images
    from ratchet.rlhf.agents.agent_loop import Rules
    from ratchet.rlhf.environments.dialogues import Dialogue
    from ratchet.rlhf.train.engine import InferenceEngine, TrainEngine


class ShardSummary(BaseModel):
    """Small results of a shard, committed with its rows. A stage with more results adds fields in a subclass.

    Fields that stored runs lack need defaults.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    metrics: dict[str, float] = {}
    cursor: int | None = None
    """Number of prompts drawn since the run began, if the stage draws prompts."""
    controllers: dict[str, float] | None = None
    """The controllers' coefficients for the next iteration, if the stage sets any."""


C = TypeVar("C", bound=StageConfig)
S = TypeVar("S", bound=ShardSummary)
R_co = TypeVar("R_co", covariant=True)
C_co = TypeVar("C_co", bound=StageConfig, covariant=True)

Input = tuple[tuple[ShardRef, ...], tuple[str, ...]]
"""The shards and columns of a stage that is read. Without columns, it only selects the trajectories to work on."""

ShardKey = tuple[str, int, int]
"""Stage, iteration and number of a shard."""


@dataclass(frozen=True)
class ShardOutput(Generic[S]):
    """The result of a compute function for one shard."""

    batch: TrajectoryBatch
    summary: S


@dataclass(frozen=True)
class Experience:
    """A prompt with the answers that it got in an earlier iteration or another run."""

    row: int
    """Its row in the files of the dataset."""
    prompt_id: str
    """Its id among the rows of `shard`."""
    shard: ShardRef
    source: str
    """Run and iteration of its answers, in readable form."""


@dataclass(frozen=True)
class ExpertExperience:
    """A prompt with answers of experts."""

    row: int
    """Its row in the files of the dataset."""
    files: tuple[str, ...]
    answers: tuple[int, ...]
    """Numbers of its answers in the files; see `ExpertAnswers`."""


@dataclass(frozen=True)
class ReplayedAnswer:
    """A stored answer to a prompt, which takes the place of a generated one."""

    ids: list[int]
    log_probs: list[float]
    """Log-probs of the tokens under the policy that drew them, in nats."""
    mask: list[int]
    versions: list[int]
    """Version of the weights that drew each token."""
    finish_reason: str
    source: str
    """Its origin, in readable form."""
    by_expert: bool = False
    routes: list[int] | None = None
    """The stored `routed_experts`; None: there are none."""


@dataclass(frozen=True)
class Call(Generic[C_co]):
    """One shard of a stage, or one update, as the workers receive it.

    Example:
        >>> from ratchet.infra.store.records import Weights
        >>> from ratchet.infra.workers.calls import Call
        >>> from ratchet.rlhf.stage_config import StageConfig
        >>> weights = Weights(version=3, digest="sum:9f")
        >>> call = Call(term=1, stage="score", iteration=3, config=StageConfig(), role="actor", weights=weights)
        >>> call.needs == {"actor": weights}
        True
    """

    term: int
    stage: str
    iteration: int
    config: C_co
    inputs: tuple[Input, ...] = ()
    shard: int = 0
    attempt: int = 0
    role: str | None = None
    weights: Weights | None = None
    """The weights that the role must hold; a worker with other weights refuses the call."""
    follows: Mapping[str, Weights] = field(default_factory=dict)
    """The weights that other roles of the worker must hold, too."""
    cursor: int = 0
    drawn: tuple[int, ...] | None = None
    """The prompts of the shard, as indices into the dataset; None: the worker draws them."""
    replayed: Mapping[int, Experience | ExpertExperience] = field(default_factory=dict)
    """Prompts of the shard that are drawn with their answers, by their number in the iteration."""
    controllers: Mapping[str, float] = field(default_factory=dict)
    journal: tuple[ShardRef, ...] = ()
    """Files of trajectories that an earlier driver generated for incomplete shards."""

    @property
    def needs(self) -> dict[str, Weights]:
        """The weights that roles of the worker must hold."""
        own = {} if self.role is None or self.weights is None else {self.role: self.weights}
        return {**self.follows, **own}


@dataclass(frozen=True)
class ShardStart:
    """The trajectories of a shard before generation."""

    dialogues: tuple[Dialogue, ...]
    rules: Rules


@dataclass(frozen=True)
class RowsCall(Generic[C, S]):
    """A call to compute one shard."""

    call: Call[C]
    compute: Callable[[Context[C]], ShardOutput[S]]
    writes: tuple[Column, ...]
    begin: Callable[[Context[C]], ShardStart] | None = None
    """Makes the trajectories of a stage that generates; they are complete when `compute` is called. None for other
    stages."""

    @property
    def key(self) -> ShardKey:
        return self.call.stage, self.call.iteration, self.call.shard


@dataclass(frozen=True)
class UpdateCall(Generic[C]):
    """A call to update a role's weights."""

    call: Call[C]
    compute: Callable[[Context[C]], dict[str, float]]


@dataclass(frozen=True)
class ComputedShard(Generic[S]):
    """A shard that was computed and written, but not committed."""

    shard: ShardRef | None
    """The file, on the rank that wrote it."""
    summary: S
    seconds: float


class Pending(Protocol[R_co]):
    """A call in progress; `result` waits for its answer."""

    def result(self) -> R_co: ...


@dataclass(frozen=True)
class Updated:
    before: Weights
    weights: Weights
    metrics: dict[str, float]
    seconds: float
    device: str
    """The device type that computed it: cpu or cuda."""


@dataclass
class Context(Generic[C]):
    """The argument of a stage's compute function: the columns and the config that the stage declares, and its role's
    engine."""

    call: Call[C]
    batch: TrajectoryBatch
    engines: Engines
    resources: Resources
    replayed: Mapping[int, Sequence[ReplayedAnswer]] = field(default_factory=dict)
    """Stored answers by the prompt's number, for prompts that are drawn with answers. They become its first
    trajectories."""
    dialogues: Sequence[Dialogue] = ()
    """The complete trajectories of the shard, in the order of `RowsCall.begin`, for a stage that generates."""
    together: InferenceEngine | None = None
    """The model of the stage's role, if it computes this shard together with others."""

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
        """The model of the stage's role, for inference."""
        return self.engines.inference(self._role) if self.together is None else self.together

    @property
    def trainer(self) -> TrainEngine:
        """The model of the stage's role, for training."""
        return self.engines.model(self._role, learns=True)

    def follow_actor(self, share: float) -> None:
        """Moves the weights of the stage's role a share of the way to the actor's."""
        self.engines.follow_actor(self._role, share)

    @property
    def images(self) -> Images:
        """The images of the run."""
        assert self.resources.images is not None, "a worker has them"
        return self.resources.images

    def stored_images(self, digests: Sequence[str] | None) -> tuple[bytes, ...]:
        """Reads the images that a row names."""
        return tuple(self.images.get(digest) for digest in digests or ())

    @property
    def _role(self) -> str:
        assert self.call.role is not None, "a stage without a role has no engine"
        return self.call.role
