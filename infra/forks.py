"""Forks: a run that begins where another one stood, and shares everything committed before. Nothing is copied."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from infra.execution.claims import run_json
from infra.store.log import RunLog
from infra.store.manifest import Registration
from infra.store.object_store import ObjectStore
from infra.store.records import Finalize, Fork, RunState, seen_from_fork
from infra.store.run_store import RunStore
from rlhf.errors import RatchetError, UserError


def state_before(store: RunStore, iteration: int, stages: Collection[str]) -> RunState:
    """The state in which an iteration stood when just `stages` of it were committed, and no driver had claimed it.

    Of the snapshots, the newest that is there and not newer than the iteration is kept: what follows is replayed.
    """
    now = store.state
    if iteration == 0:
        first = {role: weights for role, weights in now.initial.items() if weights.version == 0}
        state = RunState(initial=dict(first), weights=dict(first), starting=dict(first))
    else:
        index = store.index_of(iteration - 1)
        state = store.log.load_index(index)
        assert state.metrics is not None, "an index holds the metrics of the iteration that it closes"
        state.ahead = {}
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
    """Create `child` where `parent` stood. The parent may be driven meanwhile; it is not claimed.

    Raises `UserError` if the child exists already: if its log has a record. A fork that was killed before leaves none.
    """
    if RunLog(child).read().slot >= 0:
        raise UserError(f"there is a run at {child.url} already: choose another name (--run)")
    parent.log.check_end()
    state = state_before(parent, iteration, stages)
    if state.snapshots:  # first registered, then seen to be there: a driver that retires it looks the other way round
        _register(parent, child, at, state)
        if not parent.log.read().snapshots.keys() >= state.snapshots.keys():
            _unregister(parent, child, state)
            raise RatchetError("the snapshot to begin with was retired at this very moment: fork again")
    claim = parent.state.claim
    assert claim is not None, "a run that can be read was claimed"
    name, store = name_of(parent.objects.url, child.url), RunStore(child)
    store.log.append(
        Fork(parent=name, at=at, claim=claim.model_copy(update={"config": config}), state=seen_from_fork(name, state))
    )
    child.put("run.json", run_json(store))


def _register(parent: RunStore, child: ObjectStore, at: str, state: RunState) -> None:
    """With the run that holds the snapshot: the parent, or where the parent has it from."""
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
    """A run's URL, or ``../name`` if it lies beside the other: then both can be moved together."""
    (folder, _, leaf), (other, _, _) = run.rpartition("/"), seen_from.rpartition("/")
    return f"../{leaf}" if folder == other else run
