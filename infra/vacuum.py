"""Deleting what no record reaches: leavings of failed tries and dead drivers, and snapshots that nobody keeps.

The log is read from its first record, so that nothing is deleted by mistake; log records themselves never are.
"""

from __future__ import annotations

from collections.abc import Iterator

from infra.claims import refuse_if_driven
from infra.log import slot_key
from infra.records import Close, ObjectRef, Record, Retire, Shard, Snapshot, Stage
from infra.store import REPORT, RunStore

KEPT = ("run.json", "log/", "forks/", REPORT)


def vacuum(store: RunStore, take_over: bool = False) -> list[str]:
    """Claim the run, so that no other driver writes meanwhile, and delete what is not reached; returns the keys."""
    refuse_if_driven(store, take_over)
    claim = store.state.claim
    assert claim is not None, "a run that can be read was claimed"
    store.log.claim(claim)
    doomed = unreached(store)
    store.objects.delete(doomed)
    return doomed


def unreached(store: RunStore) -> list[str]:
    """Keys in the run's folder that neither a record nor a fork reaches, sorted."""
    reached = set(reachable(store))
    return [key for key in store.objects.list("") if not key.startswith(KEPT) and key not in reached]


def reachable(store: RunStore) -> Iterator[str]:
    """Keys of everything that the records name, and what that names in turn."""
    snapshots: dict[int, list[ObjectRef]] = {}
    for record in records(store):
        for commit in record.commits:
            if isinstance(commit, Shard):
                yield from _own(commit.data)
            elif isinstance(commit, Stage):
                yield from _own(commit.manifest)
                if commit.manifest.run is None:
                    for shard in store.manifest(commit).shards:
                        yield from _own(shard)
            elif isinstance(commit, Close):
                yield from _own(commit.index)
                yield from _own(commit.metrics)
            elif isinstance(commit, Snapshot):
                snapshots[commit.version] = list(commit.roles.values())
            elif isinstance(commit, Retire):
                snapshots.pop(commit.version, None)
    kept = [ref for refs in snapshots.values() for ref in refs]
    kept += [ref.model_copy(update={"run": None}) for ref in _kept_by_forks(store)]
    for ref in kept:
        if ref.run is None:
            yield ref.key
            yield from (file.key for file in store.checkpoint(ref).files.values())


def records(store: RunStore) -> Iterator[Record]:
    """Every record of the log, in order."""
    for slot in range(store.state.slot + 1):
        yield Record.model_validate_json(store.objects.get(slot_key(slot)))


def _kept_by_forks(store: RunStore) -> Iterator[ObjectRef]:
    for fork in store.forks():
        for roles in fork.snapshots.values():
            yield from roles.values()


def _own(ref: ObjectRef) -> Iterator[str]:
    if ref.run is None:
        yield ref.key
