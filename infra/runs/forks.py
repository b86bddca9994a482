"""Forks: runs that start from another run's state and share everything committed before it. Nothing is copied."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ratchet.infra.execution.claims import run_json
from ratchet.infra.store.log import RunLog
from ratchet.infra.store.manifest import Registration
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Finalize, Fork, RunState, seen_from_fork
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.errors import RatchetError, UserError


def state_before(store: RunStore, iteration: int, stages: Collection[str]) -> RunState:
    """Returns the parent's state as if only `stages` of an iteration were committed, without the claims of its drivers.

    It keeps only the newest snapshot up to `iteration`; the fork replays the updates after it.
    """
    now = store.state
    if iteration == 0:
        # without roles that were added later
        first = {role: weights for role, weights in now.initial.items() if weights.version == 0}
        state = RunState(initial=dict(first), weights=dict(first), starting=dict(first))
    else:
        index = store.index_of(iteration - 1)
        state = store.log.load_index(index)
        assert state.metrics is not None, "an index holds the metrics of the iteration that it closes"
        state.ahead, state.journals, state.leases, state.published = {}, {}, {}, None
        state.apply_commit(Finalize(iteration=iteration - 1, index=index, metrics=state.metrics), state.term)
    committed = store.iteration_state(iteration)
    for name, stage in committed.stages.items():
        if name in stages:
            state.shards[name] = committed.shards.get(name, {})
            state.apply_commit(stage, state.term)
    state.assigned = committed.assigned if "generate" in stages else {}
    newest = max((version for version in now.snapshots if version <= iteration), default=None)
    state.snapshots = {} if newest is None else {newest: now.snapshots[newest]}
    state.open_terms, state.term, state.index = {}, 0, None
    return state


def fork(
    parent: RunStore, child: ObjectStore, config: dict[str, Any], iteration: int, stages: Collection[str], at: str
) -> None:
    """Creates `child` from a state of `parent`, which is not claimed and may be driven meanwhile.

    Args:
        child: the new run's folder. It may hold files of a fork that was killed, but no log record.
        stages: the stages of `iteration` that the fork shares.
        at: `iteration` and the first stage that is not shared, such as ``7`` or ``7:score``; stored for users.

    Raises:
        UserError: the child exists already.
        RatchetError: a driver deleted the snapshot meanwhile; fork again.
        Corrupt: the parent's log is damaged.
    """
    if RunLog(child).read().slot >= 0:
        raise UserError(f"a run exists at {child.url} already: choose another name (--run)")
    parent.log.check_end()
    state = state_before(parent, iteration, stages)
    if state.snapshots:  # register, then check the log: a driver that expires it commits, then reads registrations
        _register(parent, child, at, state)
        if not parent.log.read().snapshots.keys() >= state.snapshots.keys():
            _unregister(parent, child, state)
            raise RatchetError("the run's driver has just deleted the snapshot that the fork needs: repeat the command")
    claim = parent.state.claim
    assert claim is not None, "a run that can be read was claimed"
    name, store = name_of(parent.objects.url, child.url), RunStore(child)
    store.log.append(
        Fork(parent=name, at=at, claim=claim.model_copy(update={"config": config}), state=seen_from_fork(name, state))
    )
    child.put("run.json", run_json(store))


def _register(parent: RunStore, child: ObjectStore, at: str, state: RunState) -> None:
    """Registers with the runs that hold the snapshot's files: the parent, or an ancestor of it."""
    registration = Registration(child=child.url, at=at, snapshots=state.snapshots)
    for holder in _holders(parent, state):
        holder.put(_registration_key(child), registration.model_dump_json().encode())


def _unregister(parent: RunStore, child: ObjectStore, state: RunState) -> None:
    for holder in _holders(parent, state):
        holder.delete([_registration_key(child)])


def _holders(parent: RunStore, state: RunState) -> list[ObjectStore]:
    runs = {ref.run for roles in state.snapshots.values() for ref in roles.values()}
    return [parent.objects.of_run(run) for run in runs]


def _registration_key(child: ObjectStore) -> str:
    return f"forks/{child.url.rpartition('/')[2]}.json"


def name_of(run: str, seen_from: str) -> str:
    """Returns ``../name`` if both runs are in the same folder, so that they can be moved together; otherwise the run's
    URL."""
    (folder, _, leaf), (own_folder, _, _) = run.rpartition("/"), seen_from.rpartition("/")
    return f"../{leaf}" if folder == own_folder else run
