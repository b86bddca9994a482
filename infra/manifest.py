"""What a stage's commit holds: its shards, its checkpoints, and everything that it depended on."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from infra.records import SCHEMA_VERSION, Frozen, ObjectRef, ShardRef, Weights, sha256_of


class Fingerprint(Frozen):
    """Everything a stage's output is a function of, by name, so that a difference can be named.

    `parts` maps ``stage``, ``version``, ``config.<key>`` (where it is not the default), ``input.<stage>``,
    ``weights.<role>`` and, where the stage reads them, ``dataset``, ``reward``, ``tokenizer`` to values or digests.
    """

    parts: dict[str, Any]

    @property
    def digest(self) -> str:
        return sha256_of(json.dumps(self.parts, sort_keys=True).encode())

    def differences(self, other: Fingerprint) -> list[str]:
        """Lines such as ``config.actor.lr: 1e-05 -> 2e-05``, from this fingerprint to the other."""
        names = sorted(self.parts.keys() | other.parts.keys())
        found = ((name, *(_shown(name, parts) for parts in (self.parts, other.parts))) for name in names)
        return [f"{name}: {before} -> {after}" for name, before, after in found if before != after]


def _shown(name: str, parts: dict[str, Any]) -> str:
    return str(parts.get(name, "the default" if name.startswith("config.") else "none"))


class Manifest(Frozen):
    """The committed output of one stage of one iteration."""

    schema_version: int = SCHEMA_VERSION
    iteration: int
    stage: str
    epoch: int
    attempt: int
    fingerprint: Fingerprint
    config: dict[str, Any]
    """The config the stage saw, hashed keys and operational ones alike: a replay sees the same."""
    columns: tuple[str, ...] = ()
    shards: tuple[ShardRef, ...] = ()
    role: str | None = None
    weights: Weights | None = None
    """For an update: the role's weights after it."""
    metrics: dict[str, float] = {}
    seconds: float = Field(0.0, description="compute time, over all shards")
    began: float = Field(0.0, description="when the attempt that committed it began, in seconds since 1970")
    ended: float = 0.0

    @property
    def digest(self) -> str:
        """Of the content alone: the same rows and weights give the same digest in any attempt."""
        content = [shard.sha256 for shard in self.shards] + ([self.weights.digest] if self.weights else [])
        return sha256_of(json.dumps(content).encode())


class File(ObjectRef):
    """One file of a checkpoint."""

    bytes: int


class Checkpoint(Frozen):
    """A role's full state: safetensors and JSON only, every file with its digest."""

    schema_version: int = SCHEMA_VERSION
    role: str
    weights: Weights
    files: dict[str, File]


class Registration(Frozen):
    """Left in a run's folder, as ``forks/<child>.json``, by a fork that needs its snapshots."""

    schema_version: int = SCHEMA_VERSION
    child: str
    at: str
    snapshots: dict[int, dict[str, ObjectRef]]
