"""Deletes files that no commit or fork references: leftovers of failed attempts and dead drivers, expired snapshots,
images that no committed row names.

The log is read from its first record and must be complete, so that no needed file is deleted. Log records and files
that Ratchet did not write are never deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ratchet.infra.execution.claims import refuse_if_driven
from ratchet.infra.execution.neighbours import WORKERS
from ratchet.infra.progress import note
from ratchet.infra.store.chain import AT_ONCE, Broken, Chain, last_slot
from ratchet.infra.store.images import DIGEST, digest_in
from ratchet.infra.store.judge_answers import FOLDER as ANSWERS
from ratchet.infra.store.log import Corrupt, read_verified
from ratchet.infra.store.records import (
    Expire,
    Finalize,
    Journal,
    ObjectRef,
    Published,
    Record,
    Snapshot,
    StageCommit,
    named_here,
)
from ratchet.infra.store.run_store import (
    PROMPTS,
    REPORT,
    SERVED,
    VALIDATE,
    RunStore,
    chosen,
    is_call_file,
    is_written,
    term_of,
)
from ratchet.rlhf.schema import IMAGES, TRAJECTORY

IMAGES_AT_ONCE = 1000
"""Images that are deleted after one look whether the claim holds."""
WITH_IMAGES = (TRAJECTORY[IMAGES].stage, VALIDATE)
"""The stages whose rows name images."""
KEPT = ("run.json", "log/", "forks/", ANSWERS, SERVED, PROMPTS, REPORT)


def vacuum(store: RunStore, take_over: bool = False) -> list[str]:
    """Claims the run, so that no other driver writes meanwhile, and deletes its unreferenced files. Returns their keys.

    Args:
        take_over: proceed, and fence the driver, even if a driver is alive.

    Raises:
        Fenced: a driver is alive.
        Corrupt: the log is incomplete or damaged; nothing was claimed or deleted.
    """
    refuse_if_driven(store, take_over)
    reached = _reached(store)
    claim = store.state.claim
    assert claim is not None, "a run that can be read was claimed"
    store.log.claim(claim)
    # the previous driver may have committed until now
    reached.advance()
    # rollout workers may have joined this claim: what they write has its term, and may be committed any moment
    doomed = [key for key in reached.leftovers() if term_of(key) != store.log.term]
    images = [key for key in doomed if digest_in(key) is not None]
    store.objects.delete(key for key in doomed if digest_in(key) is None)
    for first in range(0, len(images), IMAGES_AT_ONCE):
        # a new driver would trust that an image is there which it finds: it claims first, and loads models before that
        store.log.check_claim()
        store.objects.delete(images[first : first + IMAGES_AT_ONCE])
    store.objects.delete_leftovers()
    return doomed


def unreached(store: RunStore) -> list[str]:
    """Lists the keys that `vacuum` would delete, without claiming the run."""
    return _reached(store).leftovers()


def foreign(store: RunStore) -> list[str]:
    """Lists the files in a run's folder that Ratchet did not write, and so never deletes."""
    return [key for key in _reached(store).others() if not is_written(key)]


class Reached:
    """The files in a run's folder that its records reference, directly or through manifests.

    Methods raise `Corrupt` if the log is incomplete, or if a record or a manifest is missing or damaged.
    """

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.digests: dict[str, str] = {}
        """sha256 by key, without checkpoints."""
        self.snapshots: dict[int, list[ObjectRef]] = {}
        """Checkpoint manifests of the snapshots that are not expired, by version."""
        self.journals: dict[tuple[int, str], Journal] = {}
        """The newest journals, by iteration and `Journal.place`."""
        self.published: ObjectRef | None = None
        """The checkpoint manifest of the newest weights for rollout workers."""
        self.closed = 0
        """Number of closed iterations."""
        self._chain = Chain(store)

    def advance(self) -> None:
        """Reads the log's new records."""
        for record in self._chain.read(last_slot(self.store.objects.list(""))):
            if isinstance(record, Broken):
                raise _not_whole(self.store, f"{record.key} {record.what}")
            if unreadable := self.add(record):
                raise _not_whole(self.store, f"{unreadable[0]} cannot be read")

    def add(self, record: Record) -> list[str]:
        """Adds the files that the log's next record references. Returns the keys of its missing or damaged
        manifests."""
        unreadable = []
        for commit in record.commits:
            refs = named_here(commit)
            if isinstance(commit, StageCommit) and refs:
                try:
                    refs += [shard for shard in self.store.manifest(commit).shards if shard.run is None]
                except Corrupt:
                    unreadable.append(commit.manifest.key)
            self.digests |= {ref.key: ref.sha256 for ref in refs}
            if isinstance(commit, Snapshot):
                self.snapshots[commit.version] = list(commit.roles.values())
            elif isinstance(commit, Expire):
                self.snapshots.pop(commit.version, None)
            elif isinstance(commit, Journal):
                self.journals[commit.iteration, commit.place] = commit
            elif isinstance(commit, Published):
                self.published = commit.checkpoint
            elif isinstance(commit, StageCommit):
                ended = commit.iteration, commit.stage
                self.journals = {
                    place: journal
                    for place, journal in self.journals.items()
                    if (journal.iteration, journal.stage) != ended
                }
            elif isinstance(commit, Finalize):
                self.closed = commit.iteration + 1
                self.journals = {
                    place: journal for place, journal in self.journals.items() if place[0] > commit.iteration
                }
        return unreadable

    def checkpoints(self) -> list[ObjectRef]:
        """Lists the checkpoint manifests in this folder that the run or a fork needs."""
        published = [] if self.published is None else [[self.published]]
        kept = [ref for refs in [*self.snapshots.values(), *published] for ref in refs if ref.run is None]
        forks = [ref for fork in self.store.forks() for roles in fork.snapshots.values() for ref in roles.values()]
        return list(dict.fromkeys([*kept, *(ref.model_copy(update={"run": None}) for ref in forks)]))

    def others(self) -> list[str]:
        """Lists the unreferenced keys in the run's folder, sorted."""
        reached = set(self.digests) | {part.key for journal in self.journals.values() for part in journal.parts}
        for ref in self.checkpoints():
            reached |= {ref.key, *(file.key for file in self.store.checkpoint(ref).files.values())}
        keys = self.store.objects.list("")
        unreached = [
            key for key in keys if not key.startswith(KEPT) and key not in reached and not self._will_be_adopted(key)
        ]
        if all(digest_in(key) is None for key in unreached):
            return unreached
        needed = None if self.is_at_work(keys) else self._possible_images()

        def may_go(key: str) -> bool:
            digest = digest_in(key)
            return digest is None or (needed is not None and digest not in needed)

        return [key for key in unreached if may_go(key)]

    def rows_with_images(self, columns: Sequence[str]) -> Iterator[pa.Table | Corrupt]:
        """Reads columns of the committed rows in this folder that may name images, or says what is damaged."""
        files = [
            ObjectRef(key=key, sha256=sha256)
            for key, sha256 in self.digests.items()
            if key.startswith(tuple(f"trajectories/{stage}/" for stage in WITH_IMAGES))
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for first in range(0, len(files), AT_ONCE):  # not all files at once in memory
                yield from pool.map(lambda ref: self._read(ref, columns), files[first : first + AT_ONCE])

    def _read(self, ref: ObjectRef, columns: Sequence[str]) -> pa.Table | Corrupt:
        try:
            data = read_verified(self.store.objects, ref)
        except Corrupt as damage:
            return damage
        file = pq.ParquetFile(pa.BufferReader(data))
        return chosen(file.read([name for name in columns if name in file.schema_arrow.names]), columns)

    def _possible_images(self) -> set[str] | None:
        """Returns the digests that may be of images of committed rows; None if rows cannot be read."""
        digests: set[str] = set()
        for rows in self.rows_with_images([IMAGES, "messages"]):
            if isinstance(rows, Corrupt):
                note(f"no image is deleted, because it is unknown which ones are needed: {rows}")
                return None
            digests |= images_of(rows)
            digests.update(*(DIGEST.findall(text) for text in rows["messages"].unique().drop_null().to_pylist()))
        return digests

    def is_at_work(self, keys: Sequence[str]) -> bool:
        """True if trajectories that are not committed yet may name images: those of a shard that is not complete, or
        of a rollout worker."""
        return bool(self.journals) or any(self._will_be_adopted(key) or key.startswith(WORKERS) for key in keys)

    def leftovers(self) -> list[str]:
        """Lists the unreferenced keys of files that Ratchet wrote."""
        return [key for key in self.others() if is_written(key)]

    def _will_be_adopted(self, key: str) -> bool:
        """True if a file holds answers to agents' programs, in an iteration that is not closed."""
        return is_call_file(key) and key >= f"journals/iteration={self.closed:06d}/"


def images_of(rows: pa.Table) -> set[str]:
    """Returns the digests in the column `images` of some rows."""
    return set(pc.list_flatten(rows[IMAGES]).unique().drop_null().to_pylist())


def _reached(store: RunStore) -> Reached:
    reached = Reached(store)
    reached.advance()
    return reached


def _not_whole(store: RunStore, damage: str) -> Corrupt:
    return Corrupt(
        f"{store.url}/{damage}: nothing is deleted, because it is unknown which files are still needed; restore it "
        "from a backup (`ratchet verify` lists all damage)"
    )
