"""A run's folder: data files, manifests, checkpoints, metrics, and the log that commits them.

Everything except the log is immutable and has a unique name, and is written before the record that commits it. Names
contain the term and the attempt, so that writers never collide.
"""

from __future__ import annotations

import io
import itertools
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

KEPT_BLOCKS = 4
"""Blocks of a checkpoint that a reader keeps in memory."""
CLOSE = "close"
JOURNAL = "journal"
VALIDATE = "validate"
"""The stage whose rows are not training trajectories."""
UPDATE_ACTOR = "update_actor"
"""The stage that updates the policy."""
SERVED = "served/"
"""Folder of the answers of `ratchet serve`, which are no part of the run's history and need no record."""
REPORT = "report.html"
"""An HTML page that users may write into the run's folder; not part of the run."""


class RunStore:
    """One run in one folder. Reading needs no claim.

    Methods that read raise `Corrupt` if an object is missing or damaged; all raise `StoreUnavailable` if the store does
    not answer.
    """

    def __init__(self, objects: ObjectStore) -> None:
        """Open the run; this reads nothing.

        Args:
            objects: the run's folder.
        """
        self.objects = objects
        self.log = RunLog(objects)
        self._lock = threading.Lock()
        self._attempts: dict[tuple[int, str], int] = {}
        self._manifests: dict[ObjectRef, Manifest] = {}
        """Manifests read or written since the last close; they are immutable, so they can be cached."""

    @classmethod
    def at(cls, url: str) -> RunStore:
        """Open a run by its URL.

        Args:
            url: the run's folder, as any fsspec URL or a local path.

        Returns:
            The run.

        Raises:
            UserError: fsspec does not support the protocol, or its package is not installed.
        """
        return cls(ObjectStore(url))

    @property
    def state(self) -> RunState:
        """The run's state, as far as the log was read; see `RunLog.state`."""
        return self.log.state

    @property
    def url(self) -> str:
        """The run's URL."""
        return self.objects.url

    # Stages.

    def begin_attempt(self, iteration: int, stage: str) -> int:
        """Start this driver's next attempt at a stage, and delete the uncommitted files of its earlier attempts.

        Args:
            iteration: the iteration's number.
            stage: the stage's name.

        Returns:
            The attempt's number, from 0.
        """
        with self._lock:
            attempt = self._attempts.get((iteration, stage), -1) + 1
            self._attempts[iteration, stage] = attempt
        if attempt:
            leftovers = [key for key in self._uncommitted(iteration, stage) if _term_of(key) == self.log.term]
            self.objects.delete(leftovers)
        return attempt

    def write_shard(self, iteration: int, stage: str, attempt: int, shard: int, table: pa.Table) -> ShardRef:
        """Write the rows of one shard.

        Args:
            iteration: the iteration's number.
            stage: the stage's name.
            attempt: from `begin_attempt`.
            shard: the shard's number.
            table: the rows.

        Returns:
            A reference to the new file, which a record must commit.
        """
        return self._write_table(_shard_key(iteration, stage, self._tag(attempt), shard), table)

    def write_journal(self, iteration: int, stage: str, number: int, table: pa.Table) -> ShardRef:
        """Write what a worker has generated of a stage's incomplete shards.

        Args:
            iteration: the stage's iteration.
            stage: the stage's name.
            number: distinguishes the journals of this driver.
            table: the trajectories.

        Returns:
            A reference to the file. A `Journal` commits it.
        """
        return self._write_table(f"{_journal_prefix(iteration)}{stage}.{self._tag(number)}.parquet", table)

    def write_calls(self, iteration: int, stage: str, term: int, table: pa.Table) -> None:
        """Write answers that the programs of agents are about to get. A driver that resumes the stage adopts the file.

        Args:
            iteration: the stage's iteration.
            stage: the stage's name.
            term: term of the driver.
            table: the answers.
        """
        name = f"{next(_numbers):08d}{secrets.token_hex(4)}"  # other workers write beside this one
        self._write_table(f"{_calls_prefix(iteration, stage)}{name}.{term}-0.parquet", table)

    def write_served(self, name: str, table: pa.Table) -> str:
        """Write answers of `ratchet serve`. The key holds their digest, because no record does.

        Args:
            name: unique name of the file.
            table: the answers.

        Returns:
            The key.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        data = parquet_bytes(table)
        key = f"{SERVED}{name}.{sha256_of(data)}.parquet"
        self.objects.put(key, data)
        return key

    def served_keys(self) -> list[str]:
        """The files of answers of `ratchet serve`, in order."""
        return [key for key in self.objects.list(SERVED) if is_served(key)]

    def read_served(self, key: str) -> pa.Table:
        """Read answers of `ratchet serve`.

        Args:
            key: a key of `served_keys`.

        Raises:
            Corrupt: the file is missing or damaged.
        """
        data = self.objects.get_if_there(key)
        if data is None or sha256_of(data) != served_digest(key):
            what = "is gone" if data is None else "is damaged"
            raise Corrupt(f"{self.url}/{key} {what}: restore it from a backup, or delete it; its answers are lost")
        return pq.read_table(io.BytesIO(data))

    def calls(self, iteration: int, stage: str) -> dict[int, list[str]]:
        """The files of answers that no journal names, in the order of their writing, by the term of their driver."""
        journal = self.journal(iteration, stage)
        adopted = set() if journal is None else {part.key for part in journal.parts}
        by_term: dict[int, list[str]] = {}
        for key in sorted(self.objects.list(_calls_prefix(iteration, stage))):
            if key not in adopted:
                by_term.setdefault(_term_of(key), []).append(key)
        return by_term

    def reference(self, key: str) -> ShardRef | None:
        """Refer to a data file that no record names yet; None: it is damaged."""
        data = self.objects.get(key)
        try:
            rows = pq.ParquetFile(pa.BufferReader(data)).metadata.num_rows
        except pa.ArrowInvalid:
            return None
        return ShardRef(key=key, rows=rows, bytes=len(data), sha256=sha256_of(data))

    def delete_calls(self, iteration: int, stage: str) -> None:
        """Delete the answers of a stage that is complete: its rows have them."""
        self.objects.delete(self.objects.list(_calls_prefix(iteration, stage)))

    def journal(self, iteration: int, stage: str) -> Journal | None:
        """The newest journal of a stage, of the open iteration or of one ahead; None if there is none."""
        with self.log.held() as state:
            place = state if iteration == state.iteration else state.ahead.get(iteration)
            return None if place is None else place.journals.get(stage)

    def replace_journal(self, commit: Journal) -> None:
        """Commit a journal, then delete the one that it replaces.

        Args:
            commit: the new journal.

        Raises:
            Fenced: a newer driver holds the run.
        """
        before = self.journal(commit.iteration, commit.stage)
        self.commit(commit)
        self.delete_journal(before)

    def delete_journal(self, journal: Journal | None) -> None:
        """Delete the files of a journal that no longer counts."""
        if journal is not None:
            self.objects.delete(part.key for part in journal.parts)

    def write_manifest(self, manifest: Manifest) -> ObjectRef:
        """Write a stage's manifest.

        Args:
            manifest: the manifest.

        Returns:
            A reference to the new file, which a record must commit.
        """
        key = f"manifests/iteration={manifest.iteration:06d}/{manifest.stage}.{self._tag(manifest.attempt)}.json"
        ref = self._write(key, manifest.model_dump_json().encode())
        self._manifests[ref] = manifest
        return ref

    def commit(self, *commits: Commit) -> None:
        """Commit all of `commits` atomically.

        If this driver is fenced, it deletes the files that the commits name: the new driver's sweep may have missed
        them.

        Args:
            commits: what to commit; the objects that they name must be written.

        Raises:
            Fenced: a newer driver holds the run.
            Deleted: the run was deleted.
        """
        try:
            self.log.append(*commits)
        except Fenced:
            with suppress(StoreUnavailable):  # the caller needs to see Fenced; the files are only garbage
                self.objects.delete(ref.key for commit in commits for ref in named_here(commit))
            raise

    def committed_shards(self, stage: str, iteration: int | None = None) -> dict[int, ShardCommit]:
        """The committed shards of a stage, complete or not.

        Args:
            stage: the stage's name.
            iteration: None for the open iteration.

        Returns:
            Commits by shard number.
        """
        state = self.state if iteration is None else self.iteration_state(iteration)
        return state.shards.get(stage, {})

    def committed_stage(self, iteration: int, stage: str) -> StageCommit | Skip | None:
        """Find the commit that completed or skipped a stage.

        Args:
            iteration: the iteration's number.
            stage: the stage's name.

        Returns:
            The commit; None if the stage is not complete.
        """
        return self.iteration_state(iteration).stages.get(stage)

    def manifest(self, stage: StageCommit) -> Manifest:
        """Read the manifest that a stage's commit names.

        Args:
            stage: the commit.

        Returns:
            The manifest.
        """
        ref, cache = stage.manifest, self._manifests
        if (manifest := cache.get(ref)) is None:
            manifest = cache[ref] = read_model(self.objects, ref, Manifest)
        return manifest

    def shards_of(self, state: RunState, stage: str) -> list[ShardRef]:
        """List the data files that a stage has committed in an iteration, complete or not.

        Args:
            state: the iteration's state, from `iteration_state`.
            stage: the stage's name.

        Returns:
            References to the files, in the order of the shards.
        """
        committed = state.stages.get(stage)
        if isinstance(committed, StageCommit):
            return list(self.manifest(committed).shards)
        return [shard.data for _, shard in sorted(state.shards.get(stage, {}).items())]

    def manifests(self, iteration: int) -> dict[str, Manifest]:
        """Read the manifests of an iteration's completed stages.

        Args:
            iteration: the iteration's number.

        Returns:
            Manifests by stage, in the order of their commits; skipped stages have none.
        """
        stages = self.iteration_state(iteration).stages
        return {name: self.manifest(stage) for name, stage in stages.items() if isinstance(stage, StageCommit)}

    def columns_of(self, state: RunState, stage: str) -> tuple[str, ...]:
        """Name the columns of a stage in an iteration.

        Args:
            state: the iteration's state, from `iteration_state`.
            stage: the stage's name.

        Returns:
            The columns without `trajectory_id`: for a stage of the schema all that it writes, for any other stage those
            that it has committed.
        """
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
        """Read the rows of a data file.

        Args:
            ref: the file.
            columns: the columns to read, in this order; None for all columns of the file.

        Returns:
            The rows. Columns that are not in the file are null.
        """
        file = pq.ParquetFile(pa.BufferReader(read_verified(self.objects, ref)))
        stored_columns = file.schema_arrow.names
        if columns is None:
            return file.read()
        table = file.read([name for name in columns if name in stored_columns])
        for name in columns:
            if name not in stored_columns:
                table = table.append_column(name, pa.nulls(len(table), TRAJECTORY.type_of(name) or pa.null()))
        return table.select(list(columns))

    # Iterations.

    def iteration_state(self, iteration: int) -> RunState:
        """Find the state of an iteration.

        Args:
            iteration: the iteration's number.

        Returns:
            The run's state for the open iteration; the index for a closed iteration; for a later iteration, a state
            that holds only the iteration's own commits.
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
        """Find how well some weights did in their validation.

        Args:
            versions: numbers of iterations after which to look at the weights.
            metric: the metric to read; None: the mean score of the first data source.

        Returns:
            The score by version, without versions that were not validated, or not by that metric.
        """
        scores = validation_scores({version: self.validation_metrics(version) for version in versions}, metric)
        return {version: value for version, (_, value) in scores.items()}

    def validation_metrics(self, version: int) -> dict[str, float]:
        """Find the metrics of the validation of some weights.

        Args:
            version: the number of iterations after which to look at the weights.

        Returns:
            The values by name. Empty if the weights were not validated.
        """
        state = self.iteration_state(version)
        commit = state.stages.get(VALIDATE)
        metrics = self.manifest(commit).metrics if isinstance(commit, StageCommit) else state.metric_values
        return {name: value for name, value in metrics.items() if name.startswith(VALIDATION)}

    def index_of(self, iteration: int) -> ObjectRef:
        """Find the index of a closed iteration.

        Args:
            iteration: the iteration's number.

        Returns:
            A reference to its index.
        """
        page, place = divmod(iteration, PAGE)
        if page >= len(self.state.pages):
            return self.state.recent[place]
        last = self.state.pages[page]
        return last if place == PAGE - 1 else self.log.load_index(last).recent[place]

    def close(self, metrics: Mapping[str, float], *also: Commit, columns: Iterable[str] = ()) -> None:
        """Close the open iteration and make other commits, in one record.

        Args:
            metrics: the iteration's metrics.
            also: commits for the same record, such as a snapshot.
            columns: columns of the metrics file, null where `metrics` has no value; it also has the other metrics.

        Raises:
            Fenced: a newer driver holds the run.
            Deleted: the run was deleted.
        """
        with self.log.held() as state:  # other threads must not commit ahead while the index is written
            iteration = state.iteration
            assert state.stages or also, (
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
        self.log.write_tail(index)
        with self._lock:
            self._attempts = {key: count for key, count in self._attempts.items() if key[0] > iteration}
        self._manifests = {}

    def sweep(self, stages: Iterable[str]) -> None:
        """Delete the uncommitted files of older terms, in the open iteration and in those generated ahead.

        Args:
            stages: names of the stages to sweep.
        """
        self.objects.delete_leftovers()
        older = {term: opened.ahead for term, opened in self.state.open_terms.items() if term < self.log.term}
        if not older:
            return
        iterations = range(self.state.iteration, self.state.iteration + 1 + max(older.values()))
        places = (*stages, CLOSE, JOURNAL)
        uncommitted = [key for place in places for k in iterations for key in self._uncommitted(k, place)]
        self.objects.delete(key for key in uncommitted if _term_of(key) < self.log.term)

    def _uncommitted(self, iteration: int, stage: str) -> list[str]:
        """Keys of an iteration's stage, of its close, or of its journals, that no record names."""
        if stage == JOURNAL:
            state = self.state if iteration == self.state.iteration else self.state.ahead.get(iteration)
            journals = [] if state is None else state.journals.values()
            parts = {part.key for journal in journals for part in journal.parts}
            keys = self.objects.list(_journal_prefix(iteration))
            return [key for key in keys if key not in parts and not is_call_file(key)]  # which are adopted later
        if stage == CLOSE:
            return self.objects.list(_metrics_prefix(iteration))
        committed = {shard.data.key for shard in self.committed_shards(stage, iteration).values()}
        return [key for key in self.objects.list(f"{_shard_folder(iteration, stage)}/") if key not in committed]

    # Checkpoints.

    def checkpoint_folder(self, role: str, weights: Weights) -> str:
        """Name the folder for this driver's checkpoint of a role.

        Args:
            role: the role.
            weights: the state that the checkpoint holds; only its version enters the name.

        Returns:
            The folder's key, without a slash at its end.
        """
        return f"checkpoints/{role}/{weights.version:06d}.{self._tag(0)}"

    def write_checkpoint_files(self, folder: str, files: Mapping[str, bytes]) -> dict[str, File]:
        """Write files of a role's full state: all of them, or one rank's share.

        Args:
            folder: from `checkpoint_folder`.
            files: contents by name.

        Returns:
            References by name.
        """
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
        """Write the manifest of a checkpoint. The checkpoint exists once a `Snapshot` names the returned reference.

        Args:
            folder: from `checkpoint_folder`.
            checkpoint: the manifest, with references to files that are already written.

        Returns:
            A reference to the manifest.
        """
        return self._write(f"{folder}/manifest.json", checkpoint.model_dump_json().encode())

    def checkpoint(self, ref: ObjectRef) -> Checkpoint:
        """Read the manifest of a checkpoint.

        Args:
            ref: the manifest, as a `Snapshot` names it.

        Returns:
            The manifest.
        """
        return read_model(self.objects, ref, Checkpoint)

    def ranges(self, checkpoint: Checkpoint) -> Callable[[str, int, int], bytes]:
        """Open a checkpoint to read parts of its files, checked against their digests.

        Blocks are read as they are needed; the last few are kept, for reads that follow each other.

        Args:
            checkpoint: the checkpoint's manifest.

        Returns:
            A function that reads a range of a file: its name, the first byte, and the byte after the last one. It
            raises `Corrupt` if the file is missing or damaged.
        """

        @lru_cache(maxsize=KEPT_BLOCKS)
        def block(name: str, number: int) -> bytes:
            file, first = checkpoint.files[name], number * BLOCK
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
        """Read files of a checkpoint, checked against their digests.

        Args:
            checkpoint: the checkpoint's manifest.
            names: the files to read; None for all.

        Returns:
            Contents by name.
        """
        wanted = checkpoint.files if names is None else names
        return {name: read_verified(self.objects, checkpoint.files[name]) for name in wanted}

    def snapshot_at_or_before(self, version: int, role: str) -> int | None:
        """Find the newest snapshot of a role, up to a version.

        Args:
            version: the largest version that counts.
            role: the role that the snapshot must hold.

        Returns:
            The snapshot's version; None if there is none.
        """
        snapshots = self.state.snapshots.items()
        return max((number for number, roles in snapshots if number <= version and role in roles), default=None)

    def forks(self) -> list[Registration]:
        """Read the registrations of this run's forks.

        Returns:
            The registrations, sorted by the names of their files.

        Raises:
            Corrupt: a registration is damaged.
        """
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
        """Commit snapshots, then delete the files of snapshots that the commits expire.

        Args:
            commits: snapshots, expirations and any other commits, in one record; nothing is written if there are none.

        Raises:
            Fenced: a newer driver holds the run.
            Deleted: the run was deleted.
            Corrupt: a fork's registration is damaged, so nobody can say which files it needs; the commits are made.
        """
        expired = [commit.version for commit in commits if isinstance(commit, Expire)]
        doomed = [ref for version in expired for ref in self.state.snapshots[version].values()]
        if commits:
            self.commit(*commits)
        self._delete_checkpoints(doomed)

    def _delete_checkpoints(self, refs: Iterable[ObjectRef]) -> None:
        """Delete the files of expired snapshots, except those of other runs and those that a fork needs.

        Safe against concurrent forks: a fork registers first and reads the log after that. A fork that is not
        registered yet will see that the snapshot is expired.
        """
        doomed = [ref for ref in refs if ref.run is None]
        if not doomed:
            return
        shared = {ref.key for fork in self.forks() for roles in fork.snapshots.values() for ref in roles.values()}
        for ref in doomed:
            if ref.key not in shared:
                with suppress(Corrupt):  # the checkpoint is expired anyway, and `vacuum` deletes its files
                    self.objects.delete([*(file.key for file in self.checkpoint(ref).files.values()), ref.key])

    # Writing immutable objects.

    def write_as(self, term: int) -> None:
        """Use a term in the names of new files; for workers outside the process of the driver that claimed.

        Args:
            term: the driver's term.
        """
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
    """The term in a file's name; the largest integer if it has none."""
    tag = re.search(r"[/.](\d+)-\d+(-part-\d+)?\.parquet$", key)
    return int(tag[1]) if tag is not None else sys.maxsize


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
            rf"metrics/iteration=\d+\.{_TAG}\.parquet",
            rf"index/\d+\.{_TAG}\.json",
            rf"checkpoints/[^/]+/\d+\.{_TAG}/"
            r"(manifest|state|(adapter_)?(config|model|optimizer))[-\w]*\.(safetensors|json|safetensors\.index\.json)",
        )
    )
)


def is_written(key: str) -> bool:
    """Whether a file has a name that this module gives: a data file, a journal, a manifest, metrics, an index, or a
    file of a checkpoint. All other files in a run's folder belong to others, or have a fixed name."""
    return _WRITTEN.fullmatch(key) is not None


def is_call_file(key: str) -> bool:
    """Whether a file has answers that programs of agents got, which no record names before a driver adopts it."""
    return key.startswith("journals/") and "/calls/" in key


def is_served(key: str) -> bool:
    """Whether a file has answers of `ratchet serve`."""
    return key.startswith(SERVED) and key.endswith(".parquet")


def served_digest(key: str) -> str:
    """The sha256 of a file of answers of `ratchet serve`."""
    return key.split(".")[-2]


_numbers = itertools.count()
"""Numbers of the files of answers, which sort in the order in which this process wrote them."""


def _metrics_prefix(iteration: int) -> str:
    return f"metrics/iteration={iteration:06d}."


def _metrics_key(iteration: int, tag: str) -> str:
    return f"{_metrics_prefix(iteration)}{tag}.parquet"


def parquet_bytes(table: pa.Table) -> bytes:
    """Write a table as Parquet with zstd.

    Lists of floats use byte-stream split, without which log-probs do not compress.

    Args:
        table: the rows.

    Returns:
        The bytes of the file.
    """
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
