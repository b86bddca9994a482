"""Stored descriptions of committed data: stage manifests, checkpoints, and registrations of forks."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from ratchet.infra.store.records import SCHEMA_VERSION, Frozen, ObjectRef, ShardRef, Weights, sha256_of


class Fingerprint(Frozen):
    """The dependencies of a stage's output, except its config.

    `parts` maps ``stage``, ``version``, ``iteration``, ``input.<stage>`` and ``weights.<role>`` to values or digests,
    as well as ``dataset``, ``reward``, ``tokenizer`` and so on if the stage reads them.
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
    term: int
    attempt: int
    fingerprint: Fingerprint
    config: dict[str, Any]
    """The stage's whole config, including operational keys, so that a replay uses the same."""
    columns: tuple[str, ...] = ()
    shards: tuple[ShardRef, ...] = ()
    role: str | None = None
    weights: Weights | None = None
    """The role's weights after an update."""
    metrics: dict[str, float] = {}
    seconds: float = Field(0.0, description="compute time, over all shards")
    began: float = Field(0.0, description="when the attempt that committed it began, in seconds since 1970")
    ended: float = 0.0

    @property
    def digest(self) -> str:
        """A digest of the rows and weights only: equal content gives an equal digest in any attempt."""
        content = [shard.sha256 for shard in self.shards] + ([self.weights.digest] if self.weights else [])
        return sha256_of(json.dumps(content).encode())


BLOCK = 2**24
"""Bytes in a block of a checkpoint file."""


class File(ObjectRef):
    """One file of a checkpoint."""

    bytes: int
    blocks: tuple[str, ...] = ()
    """SHA-256 of each block of `BLOCK` bytes, so that a range can be verified; empty if there is only one block."""


class Checkpoint(Frozen):
    """The files of a role's full state, safetensors and JSON only, with their digests."""

    schema_version: int = SCHEMA_VERSION
    role: str
    weights: Weights
    files: dict[str, File]


class Registration(Frozen):
    """A file ``forks/<child>.json`` in a run's folder, written by a fork that needs the run's snapshots."""

    schema_version: int = SCHEMA_VERSION
    child: str
    at: str
    snapshots: dict[int, dict[str, ObjectRef]]
