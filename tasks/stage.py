"""Declares stages. `tasks/pipeline.py` lists them in order, and `tasks/runner.py` runs them.

Each stage has its own file: the config it depends on, a function from columns to columns (or, for an update, from
columns to metrics), and a `RowsStage` or `UpdateStage` that declares its inputs, outputs and role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias

from pydantic import JsonValue

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.execution.outside import Outside
from ratchet.infra.workers.calls import (
    C,
    Context,
    Experience,
    ExpertExperience,
    Input,
    S,
    ShardOutput,
    ShardStart,
    ShardSummary,
)
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.roles import ROLES, weights_of
from ratchet.rlhf.schema import Column


@dataclass(frozen=True, kw_only=True)
class _Stage(Generic[C]):
    """Fields shared by all stages."""

    name: str
    """Name in the store, in Prefect and in every command."""
    label: str
    """Short name, for the header of a narrow column."""
    config: type[C]
    """The part of the run's config that the stage reads; changing it invalidates the committed stage."""
    exists: Callable[[RunConfig], bool]
    """True if iterations under a config have this stage."""
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Input stages and the columns to read from each; the stage receives no other columns. Stages that the config does
    not have are ignored. An input without columns only selects the trajectories to work on."""
    outside: tuple[Outside, ...] = ()
    """Inputs outside the store."""
    role: str | None = None
    """The role whose workers and weights compute the stage; None: it needs no model."""
    version: int = 1
    """Increase this when the code computes different results: stages committed by older code then count as changed."""

    @property
    def weights_role(self) -> str | None:
        """The role whose recorded weights the stage computes with; None if it needs none."""
        role = None if self.role is None else weights_of(self.role)
        return None if role is None or not ROLES[role].has_versions else role

    def inputs_of(self, handles: Mapping[str, StageHandle]) -> dict[str, StageHandle]:
        """Selects the handles of the stages that this stage reads, in the order of `reads`."""
        return {name: handles[name] for name in self.reads if name in handles}

    def input_names(self, names: Sequence[str]) -> list[str]:
        """Selects the stages among `names` that this stage reads, in the order of `reads`."""
        return [name for name in self.reads if name in names]

    def inputs(self, handles: Mapping[str, StageHandle], shard: int) -> tuple[Input, ...]:
        """Returns the inputs of one shard: for each input stage, the shards to read and their columns."""
        shards = {
            name: (handle.shard(shard),) if self.reads_shard_of(name) else handle.manifest().shards
            for name, handle in handles.items()
        }
        return tuple((shards[name], self.reads[name]) for name in shards if shards[name])  # an update has none

    def reads_shard_of(self, name: str) -> bool:
        """True if shard i reads only shard i of the input stage `name`; otherwise it reads all shards."""
        return False


@dataclass(frozen=True)
class Until:
    """A stop condition, for a stage that adds shards until there are enough."""

    applies: Callable[[RunConfig], bool]
    """True if the condition is used under a config."""
    follow: tuple[str, ...]
    """Stages to run on each shard as soon as it is committed, in order."""
    expected: Callable[[RunConfig], float]
    """Expected share of the needed rows that one shard has."""
    share: Callable[[RunConfig, Sequence[Mapping[str, JsonValue]]], float]
    """Share of the needed rows that shards have, given their summaries by the last stage in `follow`; 1: enough."""


def last_metrics(summaries: Sequence[ShardSummary]) -> dict[str, float]:
    """Returns the metrics of a stage with one shard."""
    return summaries[-1].metrics


@dataclass(frozen=True, kw_only=True)
class RowsStage(_Stage[C], Generic[C, S]):
    """A stage that writes rows, shard by shard. Each shard is committed as soon as it is written."""

    writes: tuple[Column, ...]
    """Columns, in addition to `trajectory_id`."""
    compute: Callable[[Context[C]], ShardOutput[S]]
    summary: type[S]
    """Type of the small results of a shard, which are stored in the log."""
    begin: Callable[[Context[C]], ShardStart] | None = None
    """Starts the trajectories of a shard, for a stage that generates; `compute` is called when they are complete."""
    metrics: Callable[[Sequence[S]], dict[str, float]] = last_metrics
    """Computes the stage's metrics from the summaries of all shards."""
    sharded: bool = True
    """True if shard i depends only on shard i of each input; otherwise the stage has one shard."""
    count: Callable[[Driver], int] | None = None
    """Returns the number of shards; None: the same as the first input."""
    draws: Callable[[Driver, int, int, C, int], tuple[int, ...] | None] | None = None
    """Draws the prompts of a shard where the worker cannot, given iteration, shard, config and cursor."""
    replays: Callable[[Driver, int, int, C], Mapping[int, Experience | ExpertExperience]] | None = None
    """Draws prompts of a shard with the answers that they got before, given iteration, shard and config."""
    until: Until | None = None
    """Stop condition, for a stage whose number of shards is not known in advance."""
    shared: bool = False
    """True if rollout workers generate its shards, too, with `rollout.workers`."""

    def reads_shard_of(self, name: str) -> bool:
        return self.sharded and bool(self.reads[name])

    @property
    def infers(self) -> bool:
        """True if `compute` may use `Context.engine`, which computes several shards together."""
        return self.begin is None and self.weights_role is not None

    def metrics_of(self, outputs: Sequence[Mapping[str, JsonValue]]) -> dict[str, float]:
        return self.metrics([self.summary.model_validate(output) for output in outputs])


def never(config: RunConfig, iteration: int) -> str | None:
    """Default of `UpdateStage.skipped`: the role learns in every iteration."""
    return None


@dataclass(frozen=True, kw_only=True)
class UpdateStage(_Stage[C]):
    """A stage that updates its role's weights to the next version and returns metrics."""

    role: str
    compute: Callable[[Context[C]], dict[str, float]]
    skipped: Callable[[RunConfig, int], str | None] = never
    """Returns the reason why the role does not learn in an iteration; None: it learns."""
    follows: str | None = None
    """A role of the same workers whose weights after the iteration the update reads."""


AnyUpdateStage: TypeAlias = UpdateStage[Any]
Stage: TypeAlias = RowsStage[Any, Any] | AnyUpdateStage
"""A stage with any config and any summary."""
