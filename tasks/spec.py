"""What a stage consumes, produces and depends on; and how each trainable role is updated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from infra.lanes import Output
from infra.workers.worker import Input, Update
from rlhf.config import RunConfig
from rlhf.config_view import ConfigView

SPECS: dict[str, StageSpec] = {}
"""Every stage, by name."""


@dataclass(frozen=True)
class StageSpec:
    """What a stage consumes, produces and depends on."""

    name: str
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stages it reads, and the columns of each; a stage that the config leaves out is not read. One that is read for
    no column says which trajectories to work on."""
    writes: tuple[str, ...] = ()
    """Columns it writes, besides trajectory_id."""
    config_keys: tuple[str, ...] = ()
    """Config it depends on: all that it can read, and all that its fingerprint holds."""
    operational_keys: tuple[str, ...] = ()
    """Config it reads that does not change what it computes."""
    digests: tuple[str, ...] = ()
    """Things outside the store that it reads: dataset, validation, reward, tokenizer."""
    role: str | None = None
    """The worker role that computes it; its weights are in the fingerprint."""
    sharded: bool = True
    """Whether a shard depends on just the same shard of each input; if not, there is one shard."""
    version: int = 1
    """Raised when the stage's code comes to compute something else."""

    def __post_init__(self) -> None:
        SPECS[self.name] = self

    def view(self, config: RunConfig) -> ConfigView:
        return ConfigView(config, self.config_keys + self.operational_keys)

    def inputs(self, outputs: Iterable[Output], shard: int) -> tuple[Input, ...]:
        """What computing a shard reads."""
        return tuple(
            (
                (output.shard(shard),) if self.reads_shard_of(output) else output.manifest().shards,
                self.reads[output.stage],
            )
            for output in outputs
        )

    def reads_shard_of(self, output: Output) -> bool:
        """Whether a shard reads just the same shard of an input; if not, all of it."""
        return self.sharded and bool(self.reads[output.stage])


UPDATES: dict[str, tuple[StageSpec, Update]] = {}
"""How each trainable role is updated: what a replay runs again."""
