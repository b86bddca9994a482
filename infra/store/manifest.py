"""What a stage's commit holds: its shards, its checkpoints, and everything that it depended on."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from infra.store.records import SCHEMA_VERSION, Frozen, ObjectRef, ShardRef, Weights, sha256_of


class Fingerprint(Frozen):
    """What a stage's output is a function of, besides its config, by name.

    `parts` maps ``stage``, ``version``, ``iteration``, ``input.<stage>``, ``weights.<role>`` and, where the stage reads
    them, ``dataset``, ``reward``, ``tokenizer`` and so on to values or digests. Before schema version 4 it also had
    ``config.<key>``, where that was not the default.
    """

    parts: dict[str, Any]

    @property
    def digest(self) -> str:
        return sha256_of(json.dumps(self.parts, sort_keys=True).encode())


class Manifest(Frozen):
    """The committed output of one stage of one iteration."""

    schema_version: int = SCHEMA_VERSION
    iteration: int
    stage: str
    term: int = Field(alias="epoch")
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
