"""What the commit log says, and the state of a run that follows from it.

A record is one object of the log. It carries commits; applying records in order to an empty `RunState` gives the
state of the run, and nothing else does. `apply` is pure bookkeeping: no input or output here.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

SCHEMA_VERSION = 4
READABLE = (2, 3, 4)
"""Schema versions that this release reads; records have digests of their own from version 3 on."""
TRAINED = {"actor", "critic"}
"""Roles whose weights move from version to version; the reference stays what it was."""
PAGE = 64
"""Closed iterations a page of the history holds: finding one takes at most two reads."""


class Stored(BaseModel):
    """What lies in the store as JSON. A driver's term is called ``epoch`` there, as it was in the first releases."""

    model_config = ConfigDict(
        extra="forbid", ser_json_inf_nan="constants", populate_by_name=True, serialize_by_alias=True
    )


class Frozen(Stored):
    model_config = ConfigDict(frozen=True)


class ObjectRef(Frozen):
    """An immutable object, and the digest of its bytes."""

    key: str
    sha256: str
    run: str | None = None
    """The folder of the run that holds it, as a URL or, beside this run's folder, as ``../name``; null: this run's."""


class ShardRef(ObjectRef):
    """An immutable committed data file. It is its own manifest: the record that names it commits it."""

    rows: int
    bytes: int


class Weights(Frozen):
    """The state of a trainable role after `version` updates: a digest over weights and optimizer."""

    version: int
    digest: str


class Claim(Frozen):
    """A driver takes the run: every older term is fenced from here on."""

    model_config = ConfigDict(extra="ignore")  # older releases wrote `shards`

    kind: Literal["claim"] = "claim"
    config: dict[str, Any]
    code: str
    packages: dict[str, str]
    threads: int
    host: str
    ahead: int = 0
    """How many iterations beyond the open one it may generate."""
    outside: dict[str, str] = {}
    """Digests of what its stages read outside the store, by name. Claims of older releases have none."""
    versions: dict[str, int] = {}
    """The version of each stage's code. Claims of older releases have none."""
    initial: dict[str, Weights]
    """Weights that roles start from, by digest of the model's files."""


class ShardCommit(Frozen):
    kind: Literal["shard"] = "shard"
    iteration: int
    stage: str
    shard: int
    term: int = Field(alias="epoch")
    data: ShardRef
    fingerprint: str = ""
    """Of releases before schema version 4; what a shard depends on follows from its term's claim."""
    seconds: float
    outputs: dict[str, JsonValue] = {}
    """Small results besides the rows, such as metrics."""


class StageCommit(Frozen):
    """A stage is complete; `manifest` says what it read, wrote and depended on."""

    kind: Literal["stage"] = "stage"
    iteration: int
    stage: str
    manifest: ObjectRef
    fingerprint: str
    role: str | None = None
    weights: Weights | None = None
    """Set by an update: what the role's weights are from here on."""
    cursor: int | None = None
    """Set by generate: prompts drawn since the run began."""
    controllers: dict[str, float] | None = None
    """Set by advantages: the coefficients of the next iteration."""


class Assigned(Frozen):
    """Before a shard is generated with other weights than those with which its iteration will begin: with which."""

    kind: Literal["assigned"] = "assigned"
    iteration: int
    shard: int
    weights: Weights


class Skip(Frozen):
    """An update that does not happen in this iteration: the role's weights pass through unchanged."""

    kind: Literal["skip"] = "skip"
    iteration: int
    stage: str
    role: str
    weights: Weights
    reason: str
    not_finite: bool = False
    """Whether it was to happen, and something came out as NaN or infinite (`train.on_nan: skip`)."""
    cursor: int | None = None
    """Set if generate itself was given up: past every prompt that it may have drawn."""


class Snapshot(Frozen):
    """The full state after `version` iterations is durable; a checkpoint manifest for each role."""

    kind: Literal["snapshot"] = "snapshot"
    version: int
    roles: dict[str, ObjectRef]


class Diverged(Frozen):
    """Replaying a committed update gave other weights."""

    kind: Literal["diverged"] = "diverged"
    iteration: int
    stage: str
    role: str
    committed: str
    replayed: str


class Expire(Frozen):
    """A snapshot is no longer needed; its files may be deleted."""

    kind: Literal["retire"] = "retire"
    version: int


class Finalize(Frozen):
    """An iteration is complete; `index` sums up everything before this record."""

    kind: Literal["close"] = "close"
    iteration: int
    index: ObjectRef
    metrics: ShardRef


class OpenTerm(Frozen):
    model_config = ConfigDict(extra="ignore")  # older releases wrote `shards`

    slot: int
    """Of the claim."""
    ahead: int = 0
    """How many iterations beyond the open one its driver may generate."""


class Ahead(Stored):
    """What is committed of an iteration that is not open yet: its generations."""

    shards: dict[str, dict[int, ShardCommit]] = {}
    stages: dict[str, StageCommit | Skip] = {}
    assigned: dict[int, Weights] = {}


class RunState(Stored):
    """What a run is at one slot of its log: bounded in size, however long the run."""

    schema_version: int = SCHEMA_VERSION
    slot: int = -1
    sha256: str = ""
    term: int = Field(0, alias="epoch")
    claim: Claim | None = None
    iteration: int = 0
    """The open iteration; all before it are closed."""
    cursor: int = 0
    initial: dict[str, Weights] = {}
    """Where each role started."""
    weights: dict[str, Weights] = {}
    """Where each role stands."""
    starting: dict[str, Weights] = {}
    """Where each role stood when the open iteration began: what its stages work with, and its updates start from."""
    controllers: dict[str, float] = {}
    snapshots: dict[int, dict[str, ObjectRef]] = {}
    shards: dict[str, dict[int, ShardCommit]] = {}
    """Committed shards of the open iteration, by stage."""
    stages: dict[str, StageCommit | Skip] = {}
    """Committed stages of the open iteration."""
    assigned: dict[int, Weights] = {}
    """By shard of the open iteration, what generates it, where that is not what the iteration began with."""
    ahead: dict[int, Ahead] = {}
    """Later iterations of which something is committed."""
    metrics: ShardRef | None = None
    """In an index: the metrics file of the iteration it closes."""
    metric_values: dict[str, float] = {}
    """In an index: what that file holds, so that looking at an iteration needs no other object. Indexes of older
    releases have none."""
    open_terms: dict[int, OpenTerm] = Field({}, alias="open_epochs")
    """Epochs that worked on the open iteration."""
    index: ObjectRef | None = None
    recent: list[ObjectRef] = []
    """Indexes of the closed iterations of the last, unfinished page."""
    pages: list[ObjectRef] = []
    """The last index of every full page of closed iterations; each holds the others of its page in `recent`."""

    def apply(self, record: Record, sha256: str) -> None:
        """Move to the record's slot. `sha256` is that of the record's bytes."""
        if record.slot != self.slot + 1 or record.previous != self.sha256:
            raise ValueError(f"log record {record.slot} does not follow record {self.slot}: the log was tampered with")
        self.slot, self.sha256 = record.slot, sha256
        for commit in record.commits:
            self.apply_commit(commit, record.term)

    def apply_commit(self, commit: Commit, term: int) -> None:
        match commit:
            case Fork():
                began = commit.state.model_copy(deep=True, update={"slot": self.slot, "sha256": self.sha256})
                for name in RunState.model_fields:
                    setattr(self, name, getattr(began, name))
                self.claim = commit.claim
            case Claim():
                self.term, self.claim = term, commit
                self.open_terms[term] = OpenTerm(slot=self.slot, ahead=commit.ahead)
                for role, first in commit.initial.items():
                    weights = Weights(version=self.iteration, digest=first.digest)  # a fork may begin a role late
                    self.initial.setdefault(role, weights)
                    self.weights.setdefault(role, weights)
                    self.starting.setdefault(role, weights)
            case ShardCommit():
                self._of(commit.iteration).shards.setdefault(commit.stage, {})[commit.shard] = commit
            case Assigned():
                self._of(commit.iteration).assigned[commit.shard] = commit.weights
            case StageCommit() if commit.iteration > self.iteration:
                self._of(commit.iteration).stages[commit.stage] = commit
            case StageCommit():
                self.stages[commit.stage] = commit
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
            case Expire():
                self.snapshots.pop(commit.version, None)
            case Finalize():
                self.index = commit.index
                self.recent.append(commit.index)
                if len(self.recent) == PAGE:
                    self.pages.append(commit.index)
                    self.recent = []
                for role in TRAINED & self.weights.keys():  # one that the iteration did not update passes through
                    if self.weights[role].version == commit.iteration:
                        digest = self.weights[role].digest
                        self.weights[role] = Weights(version=commit.iteration + 1, digest=digest)
                self.iteration = commit.iteration + 1
                self.shards, self.stages, self.assigned = {}, {}, {}
                self.metrics, self.metric_values = None, {}
                self.starting = dict(self.weights)
                committed = [shard for k in self.ahead.values() for one in k.shards.values() for shard in one.values()]
                still = {term, *(shard.term for shard in committed)}
                self.open_terms = {number: found for number, found in self.open_terms.items() if number in still}
                if (begun := self.ahead.pop(self.iteration, None)) is not None:
                    self.shards, self.assigned = begun.shards, begun.assigned
                    for stage in begun.stages.values():
                        self.apply_commit(stage, term)

    def _of(self, iteration: int) -> RunState | Ahead:
        return self if iteration == self.iteration else self.ahead.setdefault(iteration, Ahead())

    def cursor_before(self, iteration: int) -> int:
        """Where the prompts begin of an iteration that has not generated yet, and all before it have."""
        ahead = list(self.ahead.items())  # another executor may add to it
        earlier = [stage for k, begun in ahead if k < iteration for stage in list(begun.stages.values())]
        return max([self.cursor, *(stage.cursor for stage in earlier if stage.cursor is not None)])


class Fork(Frozen):
    """The first record of a run that begins where another one stood: its history up to there is the other run's."""

    kind: Literal["fork"] = "fork"
    parent: str
    at: str
    """Iteration, and the first stage that is not shared, if any, such as ``7`` or ``7:score``."""
    claim: Claim
    """The parent's newest, with the config that the fork begins with."""
    state: RunState
    """Where the parent stood; every reference in it names the run that holds the object."""


Commit = Annotated[
    Fork | Claim | ShardCommit | StageCommit | Assigned | Skip | Snapshot | Diverged | Expire | Finalize,
    Field(discriminator="kind"),
]


def named_here(commit: Commit) -> list[ObjectRef]:
    """What a commit names in its own run's folder, but for the snapshots, which may be retired."""
    refs: list[ObjectRef] = []
    if isinstance(commit, ShardCommit):
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
    term: int = Field(alias="epoch")
    previous: str
    """sha256 of the record before this one; empty for the first."""
    at: datetime
    commits: tuple[Commit, ...]
    index: ObjectRef | None
    """The newest index before this record, so that any record leads to a summary."""
    digest: str = ""
    """sha256 of the record without it, so that each record verifies alone: the newest one has none after it that
    names its sha256. Empty in version 2."""

    def to_bytes(self) -> bytes:
        body = self.model_dump_json(exclude={"digest"}).encode()
        return body[:-1] + _seal(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Raises `ValueError` for what is not a record, or was changed since it was written."""
        record = cls.model_validate_json(data)
        sealed = record.digest or record.schema_version > 2
        size = len(_seal(b""))
        if sealed and data[-size:] != _seal(data[:-size] + b"}"):
            raise ValueError(f"record {record.slot} is not what was written")
        return record


def _seal(body: bytes) -> bytes:
    """The end of a record with this body, which takes the place of its last brace."""
    return f',"digest":"{sha256_of(body)}"}}'.encode()


M = TypeVar("M", bound=BaseModel)


def seen_from_fork(run: str, what: M) -> M:
    """A copy, for a run that calls another one `run`, of what that one says: references name the run that they mean."""

    def visit(value: Any) -> Any:
        if isinstance(value, ObjectRef):
            holder = run if value.run is None else value.run
            if holder.startswith("../") and not run.startswith("../"):  # a sibling of a run that is elsewhere
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

    return visit(what)  # type: ignore[no-any-return]


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
