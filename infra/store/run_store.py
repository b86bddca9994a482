"""A run's folder: data files, manifests, checkpoints, metrics and the log that makes them exist.

Everything but the log is immutable and uniquely named, and is written before the record that commits it. A name holds
the term and the attempt, so that a writer never meets another's file.
"""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq

from infra.store.log import Corrupt, Fenced, RunLog, read_model, read_verified
from infra.store.manifest import Checkpoint, File, Manifest, Registration
from infra.store.object_store import ObjectStore, StoreUnavailable
from infra.store.records import (
    PAGE,
    SCHEMA_VERSION,
    Ahead,
    Commit,
    Expire,
    Finalize,
    ObjectRef,
    RunState,
    ShardCommit,
    ShardRef,
    Skip,
    StageCommit,
    Weights,
    named_here,
    sha256_of,
)
from rlhf.schema import TRAJECTORY

CLOSE = "close"
VALIDATE = "validate"
"""The stage whose rows are no trajectories that the iteration learns from."""
REPORT = "report.html"
"""Not part of the run: a page that may lie in its folder."""


class RunStore:
    """One run in one folder; reading needs no claim."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self.log = RunLog(objects)
        self._lock = threading.Lock()
        self._attempts: dict[tuple[int, str], int] = {}
        self._manifests: dict[ObjectRef, Manifest] = {}
        """Manifests read or written since the last close: they are immutable."""

    @classmethod
    def at(cls, url: str) -> RunStore:
        return cls(ObjectStore(url))

    @property
    def state(self) -> RunState:
        return self.log.state

    @property
    def url(self) -> str:
        return self.objects.url

    # Stages.

    def begin_attempt(self, iteration: int, stage: str) -> int:
        """A new number for this driver's next try at a stage; what its earlier tries left uncommitted is deleted."""
        with self._lock:
            attempt = self._attempts.get((iteration, stage), -1) + 1
            self._attempts[iteration, stage] = attempt
        if attempt:
            mine = [key for key in self._uncommitted(iteration, stage) if _term_of(key) == self.log.term]
            self.objects.delete(mine)
        return attempt

    def write_shard(self, iteration: int, stage: str, attempt: int, shard: int, table: pa.Table) -> ShardRef:
        return self._write_table(_shard_key(iteration, stage, self._tag(attempt), shard), table)

    def write_manifest(self, manifest: Manifest) -> ObjectRef:
        key = f"manifests/iteration={manifest.iteration:06d}/{manifest.stage}.{self._tag(manifest.attempt)}.json"
        ref = self._write(key, manifest.model_dump_json().encode())
        self._manifests[ref] = manifest
        return ref

    def commit(self, *commits: Commit) -> None:
        """Make it so, all at once. A fenced driver deletes its files: they came too late for the new driver's sweep."""
        try:
            self.log.append(*commits)
        except Fenced:
            with suppress(StoreUnavailable):  # tidiness; being fenced is the news
                self.objects.delete(ref.key for commit in commits for ref in named_here(commit))
            raise

    def committed_shards(self, stage: str, iteration: int | None = None) -> dict[int, ShardCommit]:
        """Shards of an iteration, by default of the open one, whether or not their stage is complete."""
        state = self.state if iteration is None else self.iteration_state(iteration)
        return state.shards.get(stage, {})

    def committed_stage(self, iteration: int, stage: str) -> StageCommit | Skip | None:
        return self.iteration_state(iteration).stages.get(stage)

    def manifest(self, stage: StageCommit) -> Manifest:
        ref, known = stage.manifest, self._manifests
        if (found := known.get(ref)) is None:
            found = known[ref] = read_model(self.objects, ref, Manifest)
        return found

    def shards_of(self, state: RunState, stage: str) -> list[ShardRef]:
        """The data files that a stage has committed in an iteration, whether or not it is complete."""
        committed = state.stages.get(stage)
        if isinstance(committed, StageCommit):
            return list(self.manifest(committed).shards)
        return [shard.data for _, shard in sorted(state.shards.get(stage, {}).items())]

    def manifests(self, iteration: int) -> dict[str, Manifest]:
        """Every stage that an iteration has committed with a manifest, in the order in which they were committed."""
        stages = self.iteration_state(iteration).stages
        return {name: self.manifest(stage) for name, stage in stages.items() if isinstance(stage, StageCommit)}

    def columns_of(self, state: RunState, stage: str) -> tuple[str, ...]:
        """The columns that a stage has committed in an iteration, besides `trajectory_id`."""
        if stage in TRAJECTORY.stages:
            return TRAJECTORY.names(stage)
        committed = state.stages.get(stage)
        if isinstance(committed, Skip):
            return ()
        if committed is not None:
            return self.manifest(committed).columns[1:]
        shards = self.shards_of(state, stage)
        return tuple(self.read_shard(shards[0]).column_names[1:]) if shards else ()

    def read_shard(self, ref: ShardRef, columns: Sequence[str] | None = None) -> pa.Table:
        """Its rows; a column that is younger than the file is null."""
        file = pq.ParquetFile(pa.BufferReader(read_verified(self.objects, ref)))
        there = file.schema_arrow.names
        if columns is None:
            return file.read()
        table = file.read([name for name in columns if name in there])
        for name in columns:
            if name not in there:
                table = table.append_column(name, pa.nulls(len(table), TRAJECTORY.type_of(name) or pa.null()))
        return table.select(list(columns))

    # Iterations.

    def iteration_state(self, iteration: int) -> RunState:
        """The state in which an iteration's stages stand: the open one's, or that of a closed one's index; of a later
        one, no more than what is committed of it."""
        with self.log.held() as state:
            if iteration == state.iteration:
                return state
            if iteration > state.iteration:
                begun = state.ahead.get(iteration, Ahead())
                later = RunState(iteration=iteration)
                later.shards, later.stages, later.assigned = begun.shards, begun.stages, begun.assigned
                return later
        return self.log.load_index(self.index_of(iteration))

    def index_of(self, iteration: int) -> ObjectRef:
        """The index that a closed iteration's last record names."""
        page, place = divmod(iteration, PAGE)
        if page >= len(self.state.pages):
            return self.state.recent[place]
        last = self.state.pages[page]
        return last if place == PAGE - 1 else self.log.load_index(last).recent[place]

    def close(self, metrics: Mapping[str, float], *also: Commit) -> None:
        """Close the open iteration, together with other commits, in one record."""
        with self.log.held() as state:  # what is committed ahead meanwhile waits, or the index would be torn
            iteration = state.iteration
            assert state.stages or also, (
                f"iteration {iteration} has not begun: is it the one before that was to be closed?"
            )
            tag = self._tag(self.begin_attempt(iteration, CLOSE))
            row = pa.table({"iteration": [iteration], **{name: [float(value)] for name, value in metrics.items()}})
            metrics_ref = self._write_table(_metrics_key(iteration, tag), row)
            values = {name: float(value) for name, value in metrics.items()}
            now = {"metrics": metrics_ref, "metric_values": values, "schema_version": SCHEMA_VERSION}
            summary = state.model_copy(update=now)
            index = self._write(f"index/{iteration:06d}.{tag}.json", summary.model_dump_json().encode())
            self.commit_snapshot([Finalize(iteration=iteration, index=index, metrics=metrics_ref), *also])
        self.log.write_tail(index)
        with self._lock:
            self._attempts = {key: count for key, count in self._attempts.items() if key[0] > iteration}
        self._manifests = {}

    def sweep(self, stages: Iterable[str]) -> None:
        """Delete what drivers of older terms wrote into the open iteration, or ahead of it, and never committed."""
        self.objects.delete_leavings()
        older = {term: found.ahead for term, found in self.state.open_terms.items() if term < self.log.term}
        if not older:
            return
        iterations = range(self.state.iteration, self.state.iteration + 1 + max(older.values()))
        left = [key for stage in (*stages, CLOSE) for k in iterations for key in self._uncommitted(k, stage)]
        self.objects.delete(key for key in left if _term_of(key) < self.log.term)

    def _uncommitted(self, iteration: int, stage: str) -> list[str]:
        """Files of a stage of an iteration, or of its close, that no record names."""
        if stage == CLOSE:
            return self.objects.list(_metrics_prefix(iteration))
        committed = {shard.data.key for shard in self.committed_shards(stage, iteration).values()}
        return [key for key in self.objects.list(f"{_shard_folder(iteration, stage)}/") if key not in committed]

    # Checkpoints.

    def checkpoint_folder(self, role: str, weights: Weights) -> str:
        """Where this driver's checkpoint of a role goes."""
        return f"checkpoints/{role}/{weights.version:06d}.{self._tag(0)}"

    def write_checkpoint_files(self, folder: str, files: Mapping[str, bytes]) -> dict[str, File]:
        """Write files of a role's full state: all of them, or those of one rank."""
        written = {}
        for name, data in files.items():
            ref = self._write(f"{folder}/{name}", data)
            written[name] = File(key=ref.key, bytes=len(data), sha256=ref.sha256)
        return written

    def write_checkpoint_manifest(self, folder: str, checkpoint: Checkpoint) -> ObjectRef:
        """What makes files a checkpoint; it exists once a `Snapshot` names what is returned."""
        return self._write(f"{folder}/manifest.json", checkpoint.model_dump_json().encode())

    def checkpoint(self, ref: ObjectRef) -> Checkpoint:
        return read_model(self.objects, ref, Checkpoint)

    def read_checkpoint(self, checkpoint: Checkpoint, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """Files of a checkpoint, verified."""
        wanted = checkpoint.files if names is None else names
        return {name: read_verified(self.objects, checkpoint.files[name]) for name in wanted}

    def snapshot_at_or_before(self, version: int, role: str) -> int | None:
        """The newest snapshot of a role that is not newer than `version`."""
        snapshots = self.state.snapshots.items()
        return max((found for found, roles in snapshots if found <= version and role in roles), default=None)

    def forks(self) -> list[Registration]:
        """What forks of this run need of it."""
        found = []
        for key in self.objects.list("forks/"):
            if not key.endswith(".json"):
                continue  # a marker of a folder, say
            try:
                found.append(Registration.model_validate_json(self.objects.get(key)))
            except ValueError:
                raise Corrupt(
                    f"{self.url}/{key} is damaged, so that nobody can say what the fork needs: restore it from a backup"
                ) from None
        return found

    def commit_snapshot(self, commits: Sequence[Commit]) -> None:
        """Commit, and then delete what the commits retire."""
        expired = [commit.version for commit in commits if isinstance(commit, Expire)]
        doomed = [ref for version in expired for ref in self.state.snapshots[version].values()]
        if commits:
            self.commit(*commits)
        self._delete_checkpoints(doomed)

    def _delete_checkpoints(self, refs: Iterable[ObjectRef]) -> None:
        """Delete the files of snapshots whose retirement is committed; not those of another run, nor what a fork needs.

        A fork registers first and reads the log then: one that this does not see yet sees the retirement.
        """
        doomed = [ref for ref in refs if ref.run is None]
        if not doomed:
            return
        shared = {ref.key for fork in self.forks() for roles in fork.snapshots.values() for ref in roles.values()}
        for ref in doomed:
            if ref.key not in shared:
                with suppress(Corrupt):  # nobody needs it any more, and `vacuum` finds its files
                    self.objects.delete([*(file.key for file in self.checkpoint(ref).files.values()), ref.key])

    # Writing immutable objects.

    def write_as(self, term: int) -> None:
        """Name what is written after this term: for a worker in another process than the driver that claimed."""
        self.log.term = term

    def _tag(self, attempt: int) -> str:
        return f"{self.log.term}-{attempt}"

    def _write(self, key: str, data: bytes) -> ObjectRef:
        self.objects.put(key, data)
        return ObjectRef(key=key, sha256=sha256_of(data))

    def _write_table(self, key: str, table: pa.Table) -> ShardRef:
        data = parquet_bytes(table)
        ref = self._write(key, data)
        return ShardRef(key=ref.key, rows=table.num_rows, bytes=len(data), sha256=ref.sha256)


def _shard_folder(iteration: int, stage: str) -> str:
    return f"trajectories/{stage}/iteration={iteration:06d}"


def _shard_key(iteration: int, stage: str, tag: str, shard: int) -> str:
    return f"{_shard_folder(iteration, stage)}/{tag}-part-{shard:05d}.parquet"


def _term_of(key: str) -> int:
    """The term in a file's tag."""
    tag = re.search(r"[/.](\d+)-\d+(-part-\d+)?\.parquet$", key)
    return int(tag[1]) if tag is not None else sys.maxsize


def _metrics_prefix(iteration: int) -> str:
    return f"metrics/iteration={iteration:06d}."


def _metrics_key(iteration: int, tag: str) -> str:
    return f"{_metrics_prefix(iteration)}{tag}.parquet"


def parquet_bytes(table: pa.Table) -> bytes:
    """Parquet with zstd; per-token floats are split by byte, which is what makes log-probs compress."""
    split = [
        f"{field.name}.list.element"
        for field in table.schema
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    ]
    plain = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    sink = io.BytesIO()
    pq.write_table(
        table, sink, compression="zstd", compression_level=1, use_dictionary=plain, use_byte_stream_split=split
    )
    return sink.getvalue()
