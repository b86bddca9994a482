"""The records of the commit log, and the run's state that results from them. Pure data, without I/O.

A record is one object of the log and carries commits. Applying all records in order to an empty `RunState` gives the
state of the run; nothing else changes it.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

SCHEMA_VERSION = 1
"""To change the stored form of a model, increase this, and migrate older ones in `infra.store.log.check_version`."""
CANARIES = 3
"""Number of passed checks of the rollout's weights whose differences teach the tolerance of later ones."""
PAGE = 64
"""Number of closed iterations in a page of the history. Finding an iteration's index takes at most two reads."""


class StoredModel(BaseModel):
    """A model that is stored as JSON."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Frozen(StoredModel):
    """A stored model that is immutable."""

    model_config = ConfigDict(frozen=True)


class ObjectRef(Frozen):
    """A reference to an immutable object, with the digest of its bytes."""

    key: str
    sha256: str
    run: str | None = None
    """The run that holds the object: its URL, ``../name`` for a run in the same folder, or null for this run."""


class ShardRef(ObjectRef):
    """A reference to an immutable data file. The record that names it commits it; it needs no manifest.

    Example:
        >>> from ratchet.infra.store.records import ShardRef, sha256_of
        >>> data = b"the bytes of a Parquet file"
        >>> ref = ShardRef(key="trajectories/score/part-00001.parquet", sha256=sha256_of(data), rows=8, bytes=len(data))
        >>> ref.rows, ref.bytes, ref.run
        (8, 27, None)
        >>> ShardRef.model_validate_json(ref.model_dump_json()) == ref
        True
    """

    rows: int
    bytes: int


class Weights(Frozen):
    """The state of a trained role after `version` updates, with a digest of its weights and optimizer."""

    version: int
    digest: str


class Claim(Frozen):
    """A driver's claim of the run, which fences every older term."""

    kind: Literal["claim"] = "claim"
    config: dict[str, Any]
    code: str
    packages: dict[str, str]
    threads: int
    host: str
    ahead: int = 0
    """Number of iterations beyond the open one that the driver may generate."""
    outside: dict[str, str] = {}
    """Digests of the stages' inputs outside the store, by name."""
    versions: dict[str, int] = {}
    """The version of each stage's code."""
    initial: dict[str, Weights]
    """Each role's initial weights, by digest of the model's files."""
    frozen: tuple[str, ...] = ()
    """Roles whose weights no iteration changes; they keep their first version."""


class ShardCommit(Frozen):
    """The commit of one shard of a stage."""

    kind: Literal["shard"] = "shard"
    iteration: int
    stage: str
    shard: int
    term: int
    """Term of the driver that computed the shard; its claim tells what the shard depends on."""
    data: ShardRef
    seconds: float
    outputs: dict[str, JsonValue] = {}
    """Small results in addition to the rows, such as metrics."""


class StageCommit(Frozen):
    """The commit of a complete stage; `manifest` lists its outputs and dependencies."""

    kind: Literal["stage"] = "stage"
    iteration: int
    stage: str
    manifest: ObjectRef
    fingerprint: str
    role: str | None = None
    weights: Weights | None = None
    """Set by an update: the role's new weights."""
    cursor: int | None = None
    """Set by generate: the number of prompts drawn since the run began."""
    controllers: dict[str, float] | None = None
    """Set by advantages: the controllers' coefficients for the next iteration."""


class Journal(Frozen):
    """The trajectories generated so far for a stage's incomplete shards. The stage's next journal or its commit ends
    it."""

    kind: Literal["journal"] = "journal"
    iteration: int
    stage: str
    term: int
    """Term of the driver that generated it, or beside which a rollout worker did."""
    worker: str | None = None
    """The rollout worker that generated it; None: the driver."""
    parts: tuple[ShardRef, ...]
    """One file for each worker that generates."""

    @property
    def place(self) -> str:
        """The key in the state's journals: one for the driver and each rollout worker."""
        return self.stage if self.worker is None else f"{self.stage}/{self.worker}"


class Lease(Frozen):
    """Shards that a process is about to generate, beside others that generate the same stage. It ends with the commit
    of the shard or the death of its holder, and only saves work: of two processes that generate a shard, the first one
    to commit it wins."""

    kind: Literal["lease"] = "lease"
    iteration: int
    stage: str
    shards: tuple[int, ...]
    worker: str | None = None
    """The rollout worker; None: the driver."""


class Published(Frozen):
    """The actor's weights in the store, for rollout workers; the next ones replace them."""

    kind: Literal["published"] = "published"
    weights: Weights
    checkpoint: ObjectRef
    """A checkpoint without an optimizer."""


class Assigned(Frozen):
    """The weights that will generate a shard, if they differ from the starting weights of its iteration."""

    kind: Literal["assigned"] = "assigned"
    iteration: int
    shard: int
    weights: Weights


class Skip(Frozen):
    """A skipped update: the role's weights stay unchanged in this iteration."""

    kind: Literal["skip"] = "skip"
    iteration: int
    stage: str
    role: str
    weights: Weights
    reason: str
    not_finite: bool = False
    """True if a value was NaN or infinite (`train.on_nan: skip`)."""
    cursor: int | None = None
    """Set if generate itself was abandoned: a cursor past every prompt that it may have drawn."""


class Snapshot(Frozen):
    """The durable state after `version` iterations; `roles` names each role's checkpoint manifest."""

    kind: Literal["snapshot"] = "snapshot"
    version: int
    roles: dict[str, ObjectRef]


class Diverged(Frozen):
    """A replay of a committed update that gave different weights."""

    kind: Literal["diverged"] = "diverged"
    iteration: int
    stage: str
    role: str
    committed: str
    replayed: str


class CanaryCheck(Frozen):
    """A check that the rollout has the actor's weights, made after a transfer; see `ratchet.rlhf.rollout.canary`."""

    kind: Literal["canary"] = "canary"
    iteration: int
    """The iteration that was open."""
    weights: Weights
    data: ShardRef
    """The texts and their log-probs."""
    engine: str
    """Digest of what the size of differences depends on: the engine's config and the type of the weights."""
    difference: float
    """The largest one of the rollout's engines."""
    cache_difference: float = 0.0
    """The same of what an engine computed with and without its prefix cache."""
    tolerance: float
    problem: str | None = None
    """What is wrong with the rollout's weights, as a sentence; None: nothing."""


class Expire(Frozen):
    """The expiry of a snapshot, whose files may be deleted."""

    kind: Literal["expire"] = "expire"
    version: int


class Finalize(Frozen):
    """The close of an iteration; `index` is the run's state before this record."""

    kind: Literal["close"] = "close"
    iteration: int
    index: ObjectRef
    metrics: ShardRef


class OpenTerm(Frozen):
    """A term that worked on the open iteration."""

    slot: int
    """The slot of the term's claim."""
    ahead: int = 0
    """Number of iterations beyond the open one that its driver may generate."""


class Ahead(StoredModel):
    """The commits of an iteration that is not open yet, all of its stage generate."""

    shards: dict[str, dict[int, ShardCommit]] = {}
    stages: dict[str, StageCommit | Skip] = {}
    assigned: dict[int, Weights] = {}
    journals: dict[str, Journal] = {}


class RunState(StoredModel):
    """The state of a run at one slot of its log. Its size is bounded, however long the run.

    Example:
        >>> from ratchet.infra.store.records import Claim, RunState, Weights
        >>> first = {"actor": Weights(version=0, digest="sum:0f")}
        >>> state, claim = RunState(), Claim(config={}, code="", packages={}, threads=1, host="here", initial=first)
        >>> state.apply_commit(claim, term=1)
        >>> state.iteration, state.term, state.weights["actor"].version
        (0, 1, 0)
    """

    schema_version: int = SCHEMA_VERSION
    slot: int = -1
    sha256: str = ""
    term: int = 0
    claim: Claim | None = None
    iteration: int = 0
    """The open iteration; all earlier iterations are closed."""
    cursor: int = 0
    initial: dict[str, Weights] = {}
    weights: dict[str, Weights] = {}
    """Each role's current weights."""
    starting: dict[str, Weights] = {}
    """Each role's weights when the open iteration began: its stages use them, and its updates start from them."""
    controllers: dict[str, float] = {}
    snapshots: dict[int, dict[str, ObjectRef]] = {}
    shards: dict[str, dict[int, ShardCommit]] = {}
    """Committed shards of the open iteration, by stage."""
    stages: dict[str, StageCommit | Skip] = {}
    """Committed stages of the open iteration."""
    assigned: dict[int, Weights] = {}
    """Weights that generate shards of the open iteration, by shard, if they differ from the starting weights."""
    journals: dict[str, Journal] = {}
    """Newest journals of the open iteration; see `Journal.place`."""
    leases: dict[str, dict[int, str | None]] = {}
    """The holders of uncommitted shards of the open iteration by stage: rollout workers, or the driver (None)."""
    published: Published | None = None
    """The newest weights in the store for rollout workers."""
    ahead: dict[int, Ahead] = {}
    """Later iterations that have commits."""
    canary: CanaryCheck | None = None
    """The newest check of the rollout's weights."""
    canary_differences: list[float] = []
    """Differences of the first checks that passed with the present engine."""
    metrics: ShardRef | None = None
    """In an index: the metrics file of the iteration that it closes."""
    metric_values: dict[str, float] = {}
    """In an index: the values in that file, so that readers need no other object."""
    open_terms: dict[int, OpenTerm] = {}
    """Terms that worked on the open iteration."""
    index: ObjectRef | None = None
    """The newest index."""
    recent: list[ObjectRef] = []
    """Indexes of the closed iterations in the last, incomplete page."""
    pages: list[ObjectRef] = []
    """The last index of every full page of closed iterations; its `recent` lists the other indexes of its page."""

    def apply(self, record: Record, sha256: str) -> None:
        """Applies the next record, whose bytes have the digest `sha256`. Raises `ValueError` if it does not follow the
        last one."""
        if record.slot != self.slot + 1 or record.previous != self.sha256:
            raise ValueError(f"log record {record.slot} does not follow record {self.slot}: the log was tampered with")
        self.slot, self.sha256 = record.slot, sha256
        for commit in record.commits:
            self.apply_commit(commit, record.term)

    def apply_commit(self, commit: Commit, term: int) -> None:
        """Applies one commit of a record of `term`."""
        match commit:
            case Fork():
                # the place in the log stays that of the fork's own log
                parent_state = commit.state.model_copy(deep=True, update={"slot": self.slot, "sha256": self.sha256})
                # in place, because the log and its readers hold this object
                for name in RunState.model_fields:
                    setattr(self, name, getattr(parent_state, name))
                self.claim = commit.claim
            case Claim():
                self.term, self.claim = term, commit
                self.open_terms[term] = OpenTerm(slot=self.slot, ahead=commit.ahead)
                for holders in self.leases.values():  # those of the last driver end with it
                    for shard in [shard for shard, worker in holders.items() if worker is None]:
                        del holders[shard]
                for role, first in commit.initial.items():
                    weights = Weights(version=self.iteration, digest=first.digest)  # a fork may add a role late
                    self.initial.setdefault(role, weights)
                    self.weights.setdefault(role, weights)
                    self.starting.setdefault(role, weights)
            case ShardCommit():
                self._of(commit.iteration).shards.setdefault(commit.stage, {})[commit.shard] = commit
                if commit.iteration == self.iteration:
                    self.leases.get(commit.stage, {}).pop(commit.shard, None)
            case Lease():
                self.leases.setdefault(commit.stage, {}).update(dict.fromkeys(commit.shards, commit.worker))
            case Published():
                self.published = commit
            case Assigned():
                self._of(commit.iteration).assigned[commit.shard] = commit.weights
            case Journal():
                self._of(commit.iteration).journals[commit.place] = commit
            case StageCommit() if commit.iteration > self.iteration:
                ahead = self._of(commit.iteration)
                ahead.stages[commit.stage] = commit
                _end_journals(ahead.journals, commit.stage)
            case StageCommit():
                self.stages[commit.stage] = commit
                _end_journals(self.journals, commit.stage)
                self.leases.pop(commit.stage, None)
                if commit.weights is not None and commit.role is not None:
                    self.weights[commit.role] = commit.weights
                if commit.cursor is not None:
                    self.cursor = commit.cursor
                if commit.controllers is not None:
                    self.controllers.update(commit.controllers)
            case Skip():
                self.stages[commit.stage] = commit
                self.weights[commit.role] = commit.weights
                if commit.cursor is not None:
                    self.cursor = commit.cursor
            case Snapshot():
                self.snapshots[commit.version] = dict(commit.roles)
            case Diverged():
                pass
            case CanaryCheck():
                if self.canary is not None and self.canary.engine != commit.engine:
                    self.canary_differences = []
                if commit.problem is None and len(self.canary_differences) < CANARIES:
                    larger = max(commit.difference, commit.cache_difference)
                    self.canary_differences = [*self.canary_differences, larger]
                self.canary = commit
            case Expire():
                self.snapshots.pop(commit.version, None)
            case Finalize():
                self.index = commit.index
                self.recent.append(commit.index)
                if len(self.recent) == PAGE:
                    self.pages.append(commit.index)
                    self.recent = []
                frozen = () if self.claim is None else self.claim.frozen
                for role, weights in self.weights.items():  # each iteration makes a version, even without an update
                    if weights.version == commit.iteration and role not in frozen:
                        self.weights[role] = Weights(version=commit.iteration + 1, digest=weights.digest)
                self.iteration = commit.iteration + 1
                self.shards, self.stages, self.assigned, self.journals, self.leases = {}, {}, {}, {}, {}
                self.metrics, self.metric_values = None, {}
                self.starting = dict(self.weights)
                begun = list(self.ahead.values())
                by_stage = [shards for ahead in begun for shards in ahead.shards.values()]
                # a shard's term leads to the claim that tells what the shard depends on, so keep the terms of commits
                # made ahead
                needed = {term, *(shard.term for shards in by_stage for shard in shards.values())}
                needed |= {journal.term for ahead in begun for journal in ahead.journals.values()}
                self.open_terms = {number: opened for number, opened in self.open_terms.items() if number in needed}
                if (opening := self.ahead.pop(self.iteration, None)) is not None:
                    self.shards, self.assigned, self.journals = opening.shards, opening.assigned, opening.journals
                    # only now do the stages committed ahead move the cursor
                    for stage in opening.stages.values():
                        self.apply_commit(stage, term)

    def is_late(self, commit: Commit) -> bool:
        """True if a process that decided on a commit before it read the log's last record has to decide again."""
        match commit:
            case Lease():
                return True
            case Journal() if commit.worker is not None:
                return commit.iteration < self.iteration or commit.stage in self._of(commit.iteration).stages
            case ShardCommit():
                if commit.iteration < self.iteration:
                    return True
                place = self._of(commit.iteration)
                return commit.stage in place.stages or commit.shard in place.shards.get(commit.stage, {})
            case _:
                return False

    def _of(self, iteration: int) -> RunState | Ahead:
        return self if iteration == self.iteration else self.ahead.setdefault(iteration, Ahead())

    def cursor_before(self, iteration: int, per_iteration: int) -> int:
        """Returns the number of prompts drawn before an iteration that has not generated yet.

        Args:
            iteration: the open iteration or a later one; the result is meaningless if it has generated.
            per_iteration: number of prompts drawn by each earlier iteration that has not generated yet.
        """
        has_drawn = any(stage.cursor is not None for stage in list(self.stages.values()))
        # the cursor after each iteration that has generated
        cursors = {self.iteration if has_drawn else self.iteration - 1: self.cursor}
        for k, commits in list(self.ahead.items()):  # copies, because another executor may add to them
            for stage in list(commits.stages.values()):
                if stage.cursor is not None:
                    cursors[k] = stage.cursor
        newest = max((k for k in cursors if k < iteration), default=iteration - 1)
        return cursors.get(newest, self.cursor) + (iteration - 1 - newest) * per_iteration


class Fork(Frozen):
    """The first record of a run that starts from another run's state and shares the history before it."""

    kind: Literal["fork"] = "fork"
    parent: str
    at: str
    """The iteration, and the first stage that is not shared if there is one, such as ``7`` or ``7:score``."""
    claim: Claim
    """The parent's newest claim, with the fork's config."""
    state: RunState
    """The parent's state; every reference in it names the run that holds the object."""


Commit = Annotated[
    Fork
    | Claim
    | ShardCommit
    | StageCommit
    | Journal
    | Lease
    | Published
    | Assigned
    | Skip
    | Snapshot
    | Diverged
    | CanaryCheck
    | Expire
    | Finalize,
    Field(discriminator="kind"),
]


def named_here(commit: Commit) -> list[ObjectRef]:
    """Lists the objects that a commit names in its own run's folder, except snapshots, which may expire."""
    refs: list[ObjectRef] = []
    if isinstance(commit, ShardCommit | CanaryCheck):
        refs = [commit.data]
    elif isinstance(commit, StageCommit):
        refs = [commit.manifest]
    elif isinstance(commit, Finalize):
        refs = [commit.index, commit.metrics]
    return [ref for ref in refs if ref.run is None]


class Record(Frozen):
    """One slot of the log."""

    schema_version: int = SCHEMA_VERSION
    uuid: str
    slot: int
    term: int
    worker: str | None = None
    """The rollout worker that wrote it beside the driver of the term; None: the driver."""
    previous: str
    """The sha256 of the previous record's bytes; empty for the first record."""
    at: datetime
    commits: tuple[Commit, ...]
    index: ObjectRef | None
    """The newest index before this record, so that any record leads to an index."""
    digest: str = ""
    """The sha256 of the record without this field: no later record vouches for the newest one, which must verify
    alone."""

    def to_bytes(self) -> bytes:
        """Encodes the record as JSON, with the digest at its end."""
        body = self.model_dump_json(exclude={"digest"}).encode()
        return body[:-1] + _seal(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Parses a stored record. Raises `ValueError` if the bytes are not a record, or were changed."""
        record = cls.model_validate_json(data)
        size = len(_seal(b""))
        if data[-size:] != _seal(data[:-size] + b"}"):
            raise ValueError(f"record {record.slot} was changed after it was written")
        return record


def _seal(body: bytes) -> bytes:
    """Returns the end of a record: its digest and closing brace, which replace the closing brace of `body`."""
    return f',"digest":"{sha256_of(body)}"}}'.encode()


def _end_journals(journals: dict[str, Journal], stage: str) -> None:
    for place in [place for place, journal in journals.items() if journal.stage == stage]:
        del journals[place]


M = TypeVar("M", bound=BaseModel)


def seen_from_fork(run: str, document: M) -> M:
    """Copies another run's document, so that every reference in it names the run that holds its object.

    Args:
        run: how this run refers to the other run, as in `ObjectRef.run`.
    """

    def visit(value: Any) -> Any:
        if isinstance(value, ObjectRef):
            holder = run if value.run is None else value.run
            if holder.startswith("../") and not run.startswith("../"):  # a sibling of a run in another folder
                holder = f"{run.rpartition('/')[0]}/{holder.removeprefix('../')}"
            return value.model_copy(update={"run": holder})
        if isinstance(value, BaseModel):
            fields = {name: visit(getattr(value, name)) for name in type(value).model_fields}
            return value.model_copy(update=fields)
        if isinstance(value, dict):
            return {key: visit(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(visit(inner) for inner in value)
        return value

    return visit(document)  # type: ignore[no-any-return]


def sha256_of(data: bytes | memoryview) -> str:
    """Returns the sha256 of some bytes in hex."""
    return hashlib.sha256(data).hexdigest()
