"""A run's folder: data files, manifests, checkpoints, metrics, and the log that commits them.

Everything except the log is immutable and has a unique name, and is written before the record that commits it. Names
contain the term and the attempt, so that writers never collide.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.infra.store.log import Corrupt, Fenced, RunLog, read_model, read_range, read_verified
from ratchet.infra.store.manifest import BLOCK, Checkpoint, File, Manifest, Registration
from ratchet.infra.store.object_store import ObjectStore, StoreUnavailable
from ratchet.infra.store.records import (
    PAGE,
    SCHEMA_VERSION,
    Ahead,
    Commit,
    Expire,
    Finalize,
    Journal,
    ObjectRef,
    Published,
    RunState,
    ShardCommit,
    ShardRef,
    Skip,
    StageCommit,
    Weights,
    named_here,
    sha256_of,
)
from ratchet.rlhf.metrics import VALIDATION, validation_scores
from ratchet.rlhf.schema import TRAJECTORY

WORKERS_FROM = 10**9
"""The least number of an attempt of a rollout worker. Lower ones are a driver's."""
KEPT_BLOCKS = 4
"""Blocks of a checkpoint that a reader keeps in memory."""
CLOSE = "close"
ORIGIN = b"ratchet"
"""The key in a Parquet file's metadata of where its rows come from, as JSON."""
JOURNAL = "journal"
VALIDATE = "validate"
"""The stage whose rows are not training trajectories."""
UPDATE_ACTOR = "update_actor"
SERVED = "served/"
"""Folder of the answers of `ratchet serve`. They are not part of the run's history and need no record."""
PROMPTS = "prompts.jsonl"
"""The dataset of a run that continues a stored trajectory; the run's config names it."""
REPORT = "report.html"
"""An HTML page that users may write into the run's folder; not part of the run."""


class RunStore:
    """One run in one folder. Reading needs no claim.

    Reading methods raise `Corrupt` if an object is missing or damaged; all methods raise `StoreUnavailable` if the
    store does not answer.
    """

    def __init__(self, objects: ObjectStore) -> None:
        """Opens the run; this reads nothing."""
        self.objects = objects
        self.log = RunLog(objects)
        self._lock = threading.Lock()
        self._attempts: dict[tuple[int, str], int] = {}
        self._first_attempt = 0
        self._manifests: dict[ObjectRef, Manifest] = {}
        """Manifests read or written since the last close. They are immutable, so a cached one is never stale."""

    @classmethod
    def at(cls, url: str) -> RunStore:
        """Opens a run by any fsspec URL or a local path. Raises `UserError` as `backend_for`."""
        return cls(ObjectStore(url))

    @property
    def state(self) -> RunState:
        """The run's state, as far as the log was read; see `RunLog.state`."""
        return self.log.state

    @property
    def url(self) -> str:
        return self.objects.url

    def join(self, worker: str) -> None:
        """Writes beside the newest driver from now on, as a rollout worker; see `RunLog.join`."""
        self.log.join(worker)
        with self._lock:
            # far from those of other workers, whose files may be in the same folders
            self._first_attempt = WORKERS_FROM * (1 + secrets.randbelow(10**9))
            self._attempts = {}

    # Stages.

    def begin_attempt(self, iteration: int, stage: str) -> int:
        """Starts this driver's next attempt at a stage, and deletes the uncommitted files of its earlier attempts.

        Returns:
            The attempt's number, from 0.
        """
        with self._lock:
            attempt = self._attempts.get((iteration, stage), self._first_attempt - 1) + 1
            self._attempts[iteration, stage] = attempt
        # older terms' files were swept when this driver claimed the run
        if 0 < attempt < WORKERS_FROM:
            leftovers = [key for key in self.uncommitted(iteration, stage) if _is_of_driver(key, self.log.term)]
            self.objects.delete(leftovers)
        return attempt

    def write_shard(self, iteration: int, stage: str, attempt: int, shard: int, table: pa.Table) -> ShardRef:
        """Writes the rows of one shard. The returned reference must still be committed by a record.

        The file's metadata say where it comes from, for readers that have only the file.
        """
        origin = {
            "run": self.url.rpartition("/")[2],
            "stage": stage,
            "iteration": iteration,
            "schema_version": SCHEMA_VERSION,
        }
        table = table.replace_schema_metadata({ORIGIN: json.dumps(origin)})
        return self._write_table(_shard_key(iteration, stage, self._tag(attempt), shard), table)

    def write_journal(self, iteration: int, stage: str, number: int, table: pa.Table) -> ShardRef:
        """Writes a worker's trajectories of a stage's incomplete shards. A `Journal` commits the file.

        Args:
            number: distinguishes the journals of this driver.
        """
        return self._write_table(f"{_journal_prefix(iteration)}{stage}.{self._tag(number)}.parquet", table)

    def write_canary(self, version: int, table: pa.Table) -> ShardRef:
        """Writes a check of the rollout's weights of a version. A `CanaryCheck` commits the file."""
        return self._write_table(f"canaries/{version:06d}.{self._tag(next(_numbers))}.parquet", table)

    def write_calls(self, iteration: int, stage: str, term: int, table: pa.Table) -> None:
        """Writes answers before agents' programs receive them, or turns before and after a durable environment answers
        them. A driver that resumes the stage adopts the file."""
        name = f"{next(_numbers):08d}{secrets.token_hex(4)}"  # other workers write beside this one
        self._write_table(f"{_calls_prefix(iteration, stage)}{name}.{term}-0.parquet", table)

    def write_served(self, name: str, table: pa.Table) -> str:
        """Writes answers of `ratchet serve` under a unique name. The returned key holds their digest, because no record
        does."""
        data = parquet_bytes(table)
        key = f"{SERVED}{name}.{sha256_of(data)}.parquet"
        self.objects.put(key, data)
        return key

    def served_keys(self) -> list[str]:
        """Lists the files of answers of `ratchet serve`, in order."""
        return [key for key in self.objects.list(SERVED) if is_served(key)]

    def read_served(self, key: str) -> pa.Table:
        """Reads a file of answers of `ratchet serve`."""
        data = self.objects.get_if_there(key)
        if data is None or sha256_of(data) != served_digest(key):
            what = "is gone" if data is None else "is damaged"
            raise Corrupt(f"{self.url}/{key} {what}: restore it from a backup, or delete it; its answers are lost")
        return pq.read_table(io.BytesIO(data))

    def calls(self, iteration: int, stage: str) -> dict[int, list[str]]:
        """Lists the files of answers that no journal names, in the order of writing, by the term of their driver."""
        adopted = {part.key for journal in self.journals(iteration, stage) for part in journal.parts}
        by_term: dict[int, list[str]] = {}
        for key in sorted(self.objects.list(_calls_prefix(iteration, stage))):
            if key not in adopted:
                by_term.setdefault(term_of(key), []).append(key)
        return by_term

    def reference(self, key: str) -> ShardRef | None:
        """Makes a reference to a data file that no record names yet; None if the file is damaged."""
        data = self.objects.get(key)
        try:
            rows = pq.ParquetFile(pa.BufferReader(data)).metadata.num_rows
        except pa.ArrowInvalid:
            return None
        return ShardRef(key=key, rows=rows, bytes=len(data), sha256=sha256_of(data))

    def delete_calls(self, iteration: int, stage: str) -> None:
        """Deletes the answers of a complete stage, whose rows contain them."""
        self.objects.delete(self.objects.list(_calls_prefix(iteration, stage)))

    def journals(self, iteration: int, stage: str) -> list[Journal]:
        """Returns the newest journals of a stage, in the open iteration or in one ahead: of the driver, and of rollout
        workers."""
        with self.log.held() as state:
            place = state if iteration == state.iteration else state.ahead.get(iteration)
            return [] if place is None else [journal for journal in place.journals.values() if journal.stage == stage]

    def replace_journal(self, commit: Journal) -> None:
        """Commits a journal, then deletes the one that it replaces."""
        before = [old for old in self.journals(commit.iteration, commit.stage) if old.place == commit.place]
        self.commit(commit)
        self.delete_journals(before)

    def delete_journals(self, journals: Iterable[Journal]) -> None:
        """Deletes the files of superseded journals."""
        self.objects.delete([part.key for journal in journals for part in journal.parts])

    def write_manifest(self, manifest: Manifest) -> ObjectRef:
        """Writes a stage's manifest. The returned reference must still be committed by a record."""
        key = f"manifests/iteration={manifest.iteration:06d}/{manifest.stage}.{self._tag(manifest.attempt)}.json"
        ref = self._write(key, manifest.model_dump_json().encode())
        self._manifests[ref] = manifest
        return ref

    def commit(self, *commits: Commit) -> None:
        """Commits all of `commits` atomically; raises as `RunLog.append`. The objects that they name must be written
        already."""
        try:
            self.log.append(*commits)
        except Fenced:
            # the new driver's sweep may have run before these files were written
            with suppress(StoreUnavailable):  # the caller needs to see Fenced; the files are only garbage
                self.objects.delete(ref.key for commit in commits for ref in named_here(commit))
            raise

    def committed_shards(self, stage: str, iteration: int | None = None) -> dict[int, ShardCommit]:
        """Returns the committed shards of a stage by number, by default in the open iteration."""
        state = self.state if iteration is None else self.iteration_state(iteration)
        return state.shards.get(stage, {})

    def committed_stage(self, iteration: int, stage: str) -> StageCommit | Skip | None:
        """Returns the commit that completed or skipped a stage; None if the stage is incomplete."""
        return self.iteration_state(iteration).stages.get(stage)

    def manifest(self, stage: StageCommit) -> Manifest:
        """Reads the manifest that a stage's commit names."""
        ref, cache = stage.manifest, self._manifests
        if (manifest := cache.get(ref)) is None:
            manifest = cache[ref] = read_model(self.objects, ref, Manifest)
        return manifest

    def shards_of(self, state: RunState, stage: str) -> list[ShardRef]:
        """Lists the data files that a stage has committed, complete or not, in the order of the shards."""
        committed = state.stages.get(stage)
        if isinstance(committed, StageCommit):
            return list(self.manifest(committed).shards)
        return [shard.data for _, shard in sorted(state.shards.get(stage, {}).items())]

    def manifests(self, iteration: int) -> dict[str, Manifest]:
        """Reads the manifests of an iteration's completed stages, in commit order; skipped stages have none."""
        stages = self.iteration_state(iteration).stages
        return {name: self.manifest(stage) for name, stage in stages.items() if isinstance(stage, StageCommit)}

    def columns_of(self, state: RunState, stage: str) -> tuple[str, ...]:
        """Returns the columns of a stage in an iteration, without `trajectory_id`: those of the schema, or else those
        committed."""
        if stage in TRAJECTORY.stages:
            return TRAJECTORY.names(stage)
        committed = state.stages.get(stage)
        if isinstance(committed, Skip):
            return ()
        if committed is not None:
            # the first is `trajectory_id`
            return self.manifest(committed).columns[1:]
        shards = self.shards_of(state, stage)
        return tuple(self.read_shard(shards[0]).column_names[1:]) if shards else ()

    def read_shard(self, ref: ShardRef, columns: Sequence[str] | None = None) -> pa.Table:
        """Reads the rows of a data file.

        Args:
            columns: the columns to read, in this order; None for all. Columns that are not in the file are null.
        """
        file = pq.ParquetFile(pa.BufferReader(read_verified(self.objects, ref)))
        stored_columns = file.schema_arrow.names
        if columns is None:
            return file.read()
        return chosen(file.read([name for name in columns if name in stored_columns]), columns)

    # Iterations.

    def iteration_state(self, iteration: int) -> RunState:
        """Returns the state of an iteration.

        For the open iteration, this is the run's state; for a closed one, its index; for a later one, a state that
        holds only the iteration's own commits.
        """
        with self.log.held() as state:
            if iteration == state.iteration:
                return state
            if iteration > state.iteration:
                ahead = state.ahead.get(iteration, Ahead())
                later = RunState(iteration=iteration)
                later.shards, later.stages, later.assigned = ahead.shards, ahead.stages, ahead.assigned
                return later
        return self.log.load_index(self.index_of(iteration))

    def validation_scores(self, versions: Iterable[int], metric: str | None) -> dict[int, float]:
        """Returns validation scores by version, without versions that were not validated, or not by that metric.

        Args:
            versions: numbers of iterations after which the weights were validated.
            metric: None for the mean score of the first data source.
        """
        scores = validation_scores({version: self.validation_metrics(version) for version in versions}, metric)
        return {version: value for version, (_, value) in scores.items()}

    def validation_metrics(self, version: int) -> dict[str, float]:
        """Returns the validation metrics of the weights after `version` iterations; empty if they were not
        validated."""
        state = self.iteration_state(version)
        commit = state.stages.get(VALIDATE)
        metrics = self.manifest(commit).metrics if isinstance(commit, StageCommit) else state.metric_values
        return {name: value for name, value in metrics.items() if name.startswith(VALIDATION)}

    def index_of(self, iteration: int) -> ObjectRef:
        """Returns the reference to the index of a closed iteration."""
        # only the last index of each full page is in the state; it lists the others of its page
        page, place = divmod(iteration, PAGE)
        if page >= len(self.state.pages):
            return self.state.recent[place]
        last = self.state.pages[page]
        return last if place == PAGE - 1 else self.log.load_index(last).recent[place]

    def close(
        self, metrics: Mapping[str, float], *also: Commit, columns: Iterable[str] = (), has_stages: bool = True
    ) -> None:
        """Closes the open iteration and makes other commits, in one record; raises as `RunLog.append`.

        Args:
            also: commits for the same record, such as a snapshot.
            columns: columns of the metrics file in addition to those of `metrics`; null if `metrics` has no value.
            has_stages: False for an iteration of metrics alone.
        """
        with self.log.held() as state:  # other threads must not commit ahead while the index is written
            iteration = state.iteration
            assert state.stages or also or not has_stages, (
                f"iteration {iteration} has not begun: should the previous one be closed instead?"
            )
            tag = self._tag(self.begin_attempt(iteration, CLOSE))
            values = {name: float(value) for name, value in metrics.items()}
            row = {name: pa.array([values.get(name)], pa.float64()) for name in dict.fromkeys((*columns, *values))}
            metrics_ref = self._write_table(_metrics_key(iteration, tag), pa.table({"iteration": [iteration], **row}))
            now = {"metrics": metrics_ref, "metric_values": values, "schema_version": SCHEMA_VERSION}
            summary = state.model_copy(update=now)
            index = self._write(f"index/{iteration:06d}.{tag}.json", summary.model_dump_json().encode())
            self.commit_snapshot([Finalize(iteration=iteration, index=index, metrics=metrics_ref), *also])
        # after the commit: the hint must never name an index that no record names
        self.log.write_tail(index)
        with self._lock:
            self._attempts = {key: count for key, count in self._attempts.items() if key[0] > iteration}
        self._manifests = {}

    def sweep(self, stages: Iterable[str]) -> None:
        """Deletes the uncommitted files of older terms, in the open iteration and in those generated ahead."""
        self.objects.delete_leftovers()
        older = {term: opened.ahead for term, opened in self.state.open_terms.items() if term < self.log.term}
        if not older:
            return
        iterations = range(self.state.iteration, self.state.iteration + 1 + max(older.values()))
        places = (*stages, CLOSE, JOURNAL)
        uncommitted = [key for place in places for k in iterations for key in self.uncommitted(k, place)]
        self.objects.delete(key for key in uncommitted if term_of(key) < self.log.term)

    def uncommitted(self, iteration: int, stage: str) -> list[str]:
        """Lists the keys that no record names: those of a stage, of the iteration's close, or of its journals."""
        if stage == JOURNAL:
            state = self.state if iteration == self.state.iteration else self.state.ahead.get(iteration)
            journals = [] if state is None else state.journals.values()
            parts = {part.key for journal in journals for part in journal.parts}
            keys = self.objects.list(_journal_prefix(iteration))
            return [key for key in keys if key not in parts and not is_call_file(key)]  # call files are adopted later
        if stage == CLOSE:
            # the iteration is not closed, so no record names its metrics
            return self.objects.list(_metrics_prefix(iteration))
        committed = {shard.data.key for shard in self.committed_shards(stage, iteration).values()}
        return [key for key in self.objects.list(f"{_shard_folder(iteration, stage)}/") if key not in committed]

    # Checkpoints.

    def checkpoint_folder(self, role: str, weights: Weights) -> str:
        """Names the folder for this driver's checkpoint of a role, without a trailing slash."""
        return f"checkpoints/{role}/{weights.version:06d}.{self._tag(0)}"

    def write_checkpoint_files(self, folder: str, files: Mapping[str, bytes]) -> dict[str, File]:
        """Writes files of a role's full state into its `checkpoint_folder`: all of them, or one rank's share."""
        written = {}
        for name, data in files.items():
            ref = self._write(f"{folder}/{name}", data)
            view = memoryview(data)
            blocks = [sha256_of(view[first : first + BLOCK]) for first in range(0, len(data), BLOCK)]
            written[name] = File(
                key=ref.key, bytes=len(data), sha256=ref.sha256, blocks=tuple(blocks) if len(blocks) > 1 else ()
            )
        return written

    def write_checkpoint_manifest(self, folder: str, checkpoint: Checkpoint) -> ObjectRef:
        """Writes the manifest of a checkpoint, whose files must be written already. A `Snapshot` commits the
        checkpoint."""
        return self._write(f"{folder}/manifest.json", checkpoint.model_dump_json().encode())

    def checkpoint(self, ref: ObjectRef) -> Checkpoint:
        """Reads the manifest of a checkpoint, as a `Snapshot` names it."""
        return read_model(self.objects, ref, Checkpoint)

    def ranges(self, checkpoint: Checkpoint) -> Callable[[str, int, int], bytes]:
        """Opens a checkpoint for reading byte ranges of its files, verified against their digests.

        Returns:
            A function of a file's name, the first byte, and the byte after the last one. It raises `Corrupt`.
        """

        @lru_cache(maxsize=KEPT_BLOCKS)
        def block(name: str, number: int) -> bytes:
            file, first = checkpoint.files[name], number * BLOCK
            # a file of one block has no block digests: it is read and verified whole
            if not file.blocks:
                return read_verified(self.objects, file)
            return read_range(self.objects, file, first, min(first + BLOCK, file.bytes), file.blocks[number])

        def read(name: str, start: int, end: int) -> bytes:
            size = BLOCK if checkpoint.files[name].blocks else max(checkpoint.files[name].bytes, 1)
            data = []
            for number in range(start // size, -(-end // size)):
                first = number * size
                data.append(memoryview(block(name, number))[max(start - first, 0) : end - first])
            return b"".join(data)

        return read

    def read_checkpoint(self, checkpoint: Checkpoint, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """Reads files of a checkpoint, all if `names` is None, verified against their digests."""
        wanted = checkpoint.files if names is None else names
        return {name: read_verified(self.objects, checkpoint.files[name]) for name in wanted}

    def actor_weights(self, weights: Weights) -> ObjectRef | None:
        """Returns a checkpoint with these weights of the actor: of a snapshot, or for rollout workers; None without
        one."""
        if (snapshot := self.state.snapshots.get(weights.version)) is not None and "actor" in snapshot:
            return snapshot["actor"]
        published = self.state.published
        return published.checkpoint if published is not None and published.weights == weights else None

    def publish(self, commit: Published) -> None:
        """Commits weights for rollout workers, then deletes those that they replace."""
        before = self.state.published
        self.commit(commit)
        if before is not None:
            self._delete_checkpoints([before.checkpoint])

    def snapshot_at_or_before(self, version: int, role: str) -> int | None:
        """Returns the version of a role's newest snapshot up to `version`; None if there is none."""
        snapshots = self.state.snapshots.items()
        return max((number for number, roles in snapshots if number <= version and role in roles), default=None)

    def forks(self) -> list[Registration]:
        """Reads the registrations of this run's forks. Raises `Corrupt` if one is damaged."""
        registrations = []
        for key in self.objects.list("forks/"):
            if not key.endswith(".json"):
                continue  # such as a folder marker of an object store
            try:
                registrations.append(Registration.model_validate_json(self.objects.get(key)))
            except ValueError:
                raise Corrupt(
                    f"{self.url}/{key} is damaged, so the snapshots that the fork needs are unknown: restore it from a "
                    "backup"
                ) from None
        return registrations

    def commit_snapshot(self, commits: Sequence[Commit]) -> None:
        """Commits snapshots, then deletes the files of snapshots that the commits expire; raises as `RunLog.append`.

        Args:
            commits: snapshots, expirations and any other commits, in one record; if empty, nothing is written.

        Raises:
            Corrupt: a fork's registration is damaged, so the files that it needs are unknown; the commits are made.
        """
        expired = [commit.version for commit in commits if isinstance(commit, Expire)]
        # before the commit, which removes the expired snapshots from the state
        doomed = [ref for version in expired for ref in self.state.snapshots[version].values()]
        if commits:
            self.commit(*commits)
        self._delete_checkpoints(doomed)

    def _delete_checkpoints(self, refs: Iterable[ObjectRef]) -> None:
        """Deletes the files of expired snapshots, except those that another run holds and those that a fork needs."""
        doomed = [ref for ref in refs if ref.run is None]
        if not doomed:
            return
        # Safe against concurrent forks: a fork registers first and reads the log after that. A fork that is not
        # registered yet will see that the snapshot is expired.
        shared = {ref.key for fork in self.forks() for roles in fork.snapshots.values() for ref in roles.values()}
        for ref in doomed:
            if ref.key not in shared:
                with suppress(Corrupt):  # the checkpoint is expired anyway, and `vacuum` deletes its files
                    self.objects.delete([*(file.key for file in self.checkpoint(ref).files.values()), ref.key])

    # Writing immutable objects.

    def write_as(self, term: int) -> None:
        """Uses a driver's term in the names of new files, for workers outside its process."""
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


def chosen(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Selects columns, in this order; those that the table lacks are null."""
    for name in columns:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), TRAJECTORY.type_of(name) or pa.null()))
    return table.select(list(columns))


def _shard_folder(iteration: int, stage: str) -> str:
    return f"trajectories/{stage}/iteration={iteration:06d}"


def _shard_key(iteration: int, stage: str, tag: str, shard: int) -> str:
    return f"{_shard_folder(iteration, stage)}/{tag}-part-{shard:05d}.parquet"


_TAGGED = re.compile(r"[/.](\d+)-(\d+)(-part-\d+)?\.parquet$")
"""A data file, with its term and its attempt."""


def term_of(key: str) -> int:
    """Returns the term in a file's name; the largest integer if there is none."""
    tag = _TAGGED.search(key)
    # sorts after every real term, so a sweep never deletes a file that it cannot attribute
    return int(tag[1]) if tag is not None else sys.maxsize


def _is_of_driver(key: str, term: int) -> bool:
    """True if the driver of a term wrote a file, and no rollout worker beside it."""
    tag = _TAGGED.search(key)
    return tag is not None and int(tag[1]) == term and int(tag[2]) < WORKERS_FROM


def _journal_prefix(iteration: int) -> str:
    return f"journals/iteration={iteration:06d}/"


def _calls_prefix(iteration: int, stage: str) -> str:
    return f"{_journal_prefix(iteration)}calls/{stage}/"


_TAG = r"\d+-\d+"
_WRITTEN = re.compile(
    "|".join(
        (
            rf"trajectories/[^/]+/iteration=\d+/{_TAG}-part-\d+\.parquet",
            rf"journals/iteration=\d+/(calls/[^/]+/[0-9a-f]+|[^/]+)\.{_TAG}\.parquet",
            rf"manifests/iteration=\d+/[^/]+\.{_TAG}\.json",
            rf"canaries/\d+\.{_TAG}\.parquet",
            rf"metrics/iteration=\d+\.{_TAG}\.parquet",
            rf"index/\d+\.{_TAG}\.json",
            r"images/[0-9a-f]{64}",
            rf"checkpoints/[^/]+/\d+\.{_TAG}/"
            r"(manifest|state|(adapter_)?(config|model|optimizer))[-\w]*\.(safetensors|json|safetensors\.index\.json)",
        )
    )
)


def is_written(key: str) -> bool:
    """True if this module gave the file its name. All other files have a fixed name, or were not written by Ratchet."""
    return _WRITTEN.fullmatch(key) is not None


def is_call_file(key: str) -> bool:
    """True if a file holds answers to agents' programs, or turns with durable environments: no record names it until a
    driver adopts it."""
    return key.startswith("journals/") and "/calls/" in key


def is_served(key: str) -> bool:
    """True if a file holds answers of `ratchet serve`."""
    return key.startswith(SERVED) and key.endswith(".parquet")


def served_digest(key: str) -> str:
    """Returns the sha256 in the key of a file of answers of `ratchet serve`."""
    return key.split(".")[-2]


_numbers = itertools.count()
"""Numbers of the files of answers, which sort in the order in which this process wrote them."""


def _metrics_prefix(iteration: int) -> str:
    return f"metrics/iteration={iteration:06d}."


def _metrics_key(iteration: int, tag: str) -> str:
    return f"{_metrics_prefix(iteration)}{tag}.parquet"


def parquet_bytes(table: pa.Table) -> bytes:
    """Encodes a table as Parquet with zstd."""
    # without byte-stream split, log-probs do not compress
    split = [
        f"{field.name}.list.element"
        for field in table.schema
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    ]
    # a dictionary would take precedence over byte-stream split
    dictionaries = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    # Parquet has no 16-bit integers: by a dictionary, a value takes as many bits as the number of different ones needs
    dictionaries += [
        f"{field.name}.list.element"
        for field in table.schema
        if pa.types.is_nested(field.type) and field.type in (pa.list_(pa.int16()), pa.large_list(pa.int16()))
    ]
    # rows about the same prompt have the same images
    dictionaries += [f"{field.name}.list.element.bytes" for field in table.schema if _holds_bytes(field.type)]
    sink = io.BytesIO()
    pq.write_table(
        table, sink, compression="zstd", compression_level=1, use_dictionary=dictionaries, use_byte_stream_split=split
    )
    return sink.getvalue()


def _holds_bytes(kind: pa.DataType) -> bool:
    """True for lists of structures with the field `bytes`, such as images."""
    return (
        pa.types.is_list(kind) and pa.types.is_struct(kind.value_type) and kind.value_type.get_field_index("bytes") >= 0
    )
