"""Deleting what no record reaches: leavings of failed tries and dead drivers, and snapshots that nobody keeps.

The log is read from its first record and has to be whole, so that nothing is deleted by mistake; log records themselves
never are.
"""

from __future__ import annotations

from infra.execution.claims import refuse_if_driven
from infra.store.chain import Broken, Chain, last_slot
from infra.store.log import Corrupt
from infra.store.records import Expire, ObjectRef, Record, Snapshot, StageCommit, named_here
from infra.store.run_store import REPORT, RunStore

KEPT = ("run.json", "log/", "forks/", REPORT)


def vacuum(store: RunStore, take_over: bool = False) -> list[str]:
    """Claim the run, so that no other driver writes meanwhile, and delete what is not reached; returns the keys. Raises
    `Corrupt`, before anything is claimed or deleted, if the log is not whole."""
    refuse_if_driven(store, take_over)
    reached = Reached(store)
    reached.advance()
    claim = store.state.claim
    assert claim is not None, "a run that can be read was claimed"
    store.log.claim(claim)
    reached.advance()
    doomed = reached.others()
    store.objects.delete(doomed)
    store.objects.delete_leavings()
    return doomed


def unreached(store: RunStore) -> list[str]:
    """Keys in the run's folder that neither a record nor a fork reaches, sorted. Raises `Corrupt` if the log is not
    whole."""
    reached = Reached(store)
    reached.advance()
    return reached.others()


class Reached:
    """Everything that the records of a run name in its folder, and what that names in turn."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.digests: dict[str, str] = {}
        """sha256 by key; but for checkpoints."""
        self.snapshots: dict[int, list[ObjectRef]] = {}
        self._chain = Chain(store)

    def advance(self) -> None:
        """Read the records that are new."""
        there = self.store.objects.list("")
        newest: Record | None = None
        for found in self._chain.read(last_slot(there)):
            if isinstance(found, Broken):
                raise _not_whole(self.store, f"{found.key} {found.what}")
            if unreadable := self.add(found):
                raise _not_whole(self.store, f"{unreadable[0]} cannot be read")
            newest = found
        if newest is not None and not newest.digest:  # of version 2: nothing tells yet whether it was changed
            lost = sorted({ref.key for commit in newest.commits for ref in named_here(commit)} - set(there))
            if lost:
                raise _not_whole(self.store, f"{lost[0]} is gone, which the newest record commits")

    def add(self, record: Record) -> list[str]:
        """Take in what a record names; returns the keys of manifests that are not what they were."""
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
        return unreadable

    def checkpoints(self) -> list[ObjectRef]:
        """The manifests of the snapshots that this run or a fork keeps here."""
        kept = [ref for refs in self.snapshots.values() for ref in refs if ref.run is None]
        forks = [ref for fork in self.store.forks() for roles in fork.snapshots.values() for ref in roles.values()]
        return list(dict.fromkeys([*kept, *(ref.model_copy(update={"run": None}) for ref in forks)]))

    def others(self) -> list[str]:
        """What is in the run's folder besides, sorted."""
        reached = set(self.digests)
        for ref in self.checkpoints():
            reached |= {ref.key, *(file.key for file in self.store.checkpoint(ref).files.values())}
        return [key for key in self.store.objects.list("") if not key.startswith(KEPT) and key not in reached]


def _not_whole(store: RunStore, what: str) -> Corrupt:
    return Corrupt(
        f"{store.url}/{what}: nothing is deleted, because nobody can say what is still needed; restore it from a "
        "backup (`ratchet verify` lists everything that is wrong)"
    )
