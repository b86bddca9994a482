"""A run of bare commits, without models: claimed, written and closed by the calls that the tasks make."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from ratchet.infra.store.manifest import Fingerprint, Manifest
from ratchet.infra.store.records import Claim, ShardCommit, ShardRef, StageCommit, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.schema import TRAJECTORY
from tests import tiny

COLUMNS = ("trajectory_id", *TRAJECTORY.names("generate"))


def claim(store: RunStore) -> None:
    actor, config = Weights(version=0, digest="first"), tiny.config(Path("nowhere")).model_dump(mode="json")
    store.log.claim(Claim(config=config, code="", packages={}, threads=1, host="here", initial={"actor": actor}))


def claimed(url: str) -> RunStore:
    store = RunStore.at(url)
    claim(store)
    store.sweep(["generate", "score"])
    return store


def rows(iteration: int, shard: int, samples: int = 2) -> pa.Table:
    """Returns trajectories of one prompt, by the schema."""
    values = {
        name: [TRAJECTORY[name].type.to_pandas_dtype()(0) if pa.types.is_primitive(TRAJECTORY[name].type) else None]
        for name in COLUMNS
    }
    values |= {"response_ids": [[5, 6, 7]], "rollout_log_probs": [[-0.5, -0.25, -1.0]], "response": ["5 + 6"]}
    columns = {name: value * samples for name, value in values.items()}
    columns["trajectory_id"] = [f"it{iteration:06d}-p{shard:05d}-s{sample:02d}" for sample in range(samples)]
    return pa.table(columns, schema=TRAJECTORY.arrow(COLUMNS))


def write(store: RunStore, shard: int, attempt: int = 0) -> ShardCommit:
    iteration = store.state.iteration
    data = store.write_shard(iteration, "generate", attempt, shard, rows(iteration, shard))
    return ShardCommit(
        iteration=iteration,
        stage="generate",
        shard=shard,
        term=store.log.term,
        data=data,
        seconds=0.1,
    )


def complete(store: RunStore, *data: ShardRef) -> StageCommit:
    iteration, fingerprint = store.state.iteration, Fingerprint(parts={"stage": "generate"})
    manifest = Manifest(
        iteration=iteration,
        stage="generate",
        term=store.log.term,
        attempt=0,
        fingerprint=fingerprint,
        config={},
        shards=data,
    )
    reference = store.write_manifest(manifest)
    return StageCommit(iteration=iteration, stage="generate", manifest=reference, fingerprint=fingerprint.digest)
