"""What a stage is: data. `tasks/pipeline.py` lists them in order, and `tasks/runner.py` runs them.

A stage lies in one file: the config that it depends on, a function from columns to columns (or, for an update, from
columns to metrics), and a `RowsStage` or `UpdateStage` that says the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias

from pydantic import JsonValue

from infra.execution.driver import Driver, Outside
from infra.execution.executors import StageHandle
from infra.workers.calls import C, Context, Input, S, ShardOutput, ShardSummary
from rlhf.config import RunConfig
from rlhf.schema import Column


@dataclass(frozen=True, kw_only=True)
class _Stage(Generic[C]):
    """What stages have in common."""

    name: str
    """As the store, Prefect and every command name it."""
    label: str
    """For the head of a narrow column."""
    config: type[C]
    """All of the run's config that it can read, and that decides whether it stays what it is."""
    exists: Callable[[RunConfig], bool]
    """Whether iterations under this config have it."""
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stages that it reads, if the config has them, and the columns of each: all the columns that it is given. A stage
    that is read for no column says which trajectories to work on."""
    outside: tuple[Outside, ...] = ()
    """What it reads outside the store."""
    role: str | None = None
    """The role whose workers compute it; with the weights of that role."""
    version: int = 1
    """Raise it when the code comes to compute something else: what is committed counts as changed then."""

    def inputs_of(self, handles: Mapping[str, StageHandle]) -> dict[str, StageHandle]:
        """Of the stages that an iteration has, those that this one reads, in the order in which it names them."""
        return {name: handles[name] for name in self.reads if name in handles}

    def input_names(self, names: Sequence[str]) -> list[str]:
        return [name for name in self.reads if name in names]

    def inputs(self, handles: Mapping[str, StageHandle], shard: int) -> tuple[Input, ...]:
        """What computing a shard reads."""
        return tuple(
            (
                (handle.shard(shard),) if self.reads_shard_of(name) else handle.manifest().shards,
                self.reads[name],
            )
            for name, handle in handles.items()
        )

    def reads_shard_of(self, name: str) -> bool:
        """Whether a shard reads just the same shard of an input; if not, all of it."""
        return False


@dataclass(frozen=True)
class Until:
    """A stage that goes on, shard by shard, until what follows from the shards is enough."""

    applies: Callable[[RunConfig], bool]
    follow: tuple[str, ...]
    """Stages that compute each of its shards as soon as it is committed, in order."""
    enough: Callable[[RunConfig, Sequence[Mapping[str, JsonValue]]], bool]
    """From what the last of them says of each shard so far."""


def last_metrics(summaries: Sequence[ShardSummary]) -> dict[str, float]:
    """Of a stage with one shard."""
    return summaries[-1].metrics


@dataclass(frozen=True, kw_only=True)
class RowsStage(_Stage[C], Generic[C, S]):
    """A stage that writes rows, shard by shard; each is committed as soon as it is written."""

    writes: tuple[Column, ...]
    """Columns, besides `trajectory_id`."""
    compute: Callable[[Context[C]], ShardOutput[S]]
    summary: type[S]
    """Small results of each shard."""
    metrics: Callable[[Sequence[S]], dict[str, float]] = last_metrics
    """From those of all shards to the stage's metrics."""
    sharded: bool = True
    """Whether a shard depends on just the same shard of each input; if not, there is one shard."""
    count: Callable[[Driver], int] | None = None
    """How many shards there are; None: as many as the first input has."""
    until: Until | None = None

    def reads_shard_of(self, name: str) -> bool:
        return self.sharded and bool(self.reads[name])

    def metrics_of(self, outputs: Sequence[Mapping[str, JsonValue]]) -> dict[str, float]:
        """From the committed small results of all shards."""
        return self.metrics([self.summary.model_validate(output) for output in outputs])


def never(config: RunConfig, iteration: int) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class UpdateStage(_Stage[C]):
    """A stage that moves its role's weights to the next version, and gives metrics."""

    role: str
    compute: Callable[[Context[C]], dict[str, float]]
    skipped: Callable[[RunConfig, int], str | None] = never
    """Why the role does not learn in an iteration; None: it does."""


AnyUpdateStage: TypeAlias = UpdateStage[Any]
Stage: TypeAlias = RowsStage[Any, Any] | AnyUpdateStage
"""Of any config and any small results."""
