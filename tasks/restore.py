"""Restores the weights that a stage needs: loads the newest snapshot, then replays the updates after it.

Trajectories are the write-ahead log, checkpoints are the snapshots. A replayed update reads its committed inputs, with
the config from its manifest. Nothing is generated, scored or committed again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.progress import ReplayProgress, note, report
from ratchet.infra.store.log import Corrupt, Late
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.records import Diverged, Published, Skip, StageCommit, Weights
from ratchet.infra.workers.calls import C, Call, UpdateCall, Updated
from ratchet.infra.workers.worker import Worker
from ratchet.infra.workers.worker_groups import WorkerGroup
from ratchet.rlhf.config.roles import weights_of
from ratchet.rlhf.errors import NotFinite
from ratchet.tasks import canary
from ratchet.tasks.pipeline import update_of
from ratchet.tasks.stage import UpdateStage


class ReplayMismatch(Corrupt):
    """A replayed update produced different weights from the committed ones."""


def ensure_weights(driver: Driver, role: str, weights: Weights) -> None:
    """Restores the weights of a role on its workers, unless they hold them already. Raises like `restore`."""
    with driver.restoring:
        if not driver.groups.of(role).call(Worker.has_weights, role, weights):
            restore(driver, role, weights)


def restore(driver: Driver, role: str, weights: Weights) -> None:
    """Loads a snapshot on the workers of a role, and replays the updates after it.

    Raises `ReplayMismatch` if a replayed update fails, or produces different weights and
    `checkpoint.on_replay_mismatch` does not allow that.
    """
    store, group = driver.store, driver.groups.of(role)
    # a rollout that shares the actor's tensors is restored as the actor
    if role == "rollout" and not group.call(Worker.rollout_is_actor):
        return _restore_copy(driver, group, weights)
    role = weights_of(role)
    update = update_of(role)
    snapshot = None if update is None else store.snapshot_at_or_before(weights.version, role)
    before = (
        None if update is None or not weights.version else store.iteration_state(weights.version - 1).starting.get(role)
    )
    if snapshot != weights.version and before is not None and group.call(Worker.has_weights, role, before):
        at = before  # as when the updates of a role that follows this one are replayed one by one
    elif snapshot is None:
        at = driver.state.initial[role]
        group.call(Worker.load, role, at, None)
    else:
        ref = driver.state.snapshots[snapshot][role]
        at = store.checkpoint(ref).weights
        group.call(Worker.load, role, at, ref)
    while update is not None and at.version < weights.version:
        at = _replay(driver, group, update, at, weights)
    assert at.version == weights.version, f"{role} is at version {at.version}, not {weights.version}"


def _restore_copy(driver: Driver, group: WorkerGroup, weights: Weights) -> None:
    """Copies the actor's weights to a rollout that has its own tensors."""
    # first: with `offload_when_idle` the actor would take the devices from a rollout that has just got its weights
    if canary.needs_actor(driver, weights):
        ensure_weights(driver, "actor", weights)
    expected = canary.expected(driver, weights)
    started = time.perf_counter()
    moved = group.call(Worker.copy_to_rollout, weights)
    nbytes = _from_elsewhere(driver, group, weights) if moved is None else moved
    driver.weight_sync.count(time.perf_counter() - started, nbytes)
    if expected is not None:
        canary.check(driver, group, weights, expected)
    group.call(Worker.mark_as_version, "rollout", weights)  # only now does it generate


def _from_elsewhere(driver: Driver, group: WorkerGroup, weights: Weights) -> int:
    """Sends weights to a rollout whose process has no actor that holds them; returns the number of bytes sent.

    They come from the workers that train the actor, or from a snapshot if these workers have moved on.
    """
    # again if the actor was updated meanwhile
    while (moved := _sent_or_loaded(driver, group, weights)) is None:
        pass
    return moved


def _sent_or_loaded(driver: Driver, group: WorkerGroup, weights: Weights) -> int | None:
    """Sends or loads the weights like `_from_elsewhere`; returns None if the actor was updated meanwhile."""
    state, actor = driver.state, driver.groups.of("actor")
    rollout = driver.config.rollout
    if group is actor and rollout.engine.outlives_runs and rollout.mode == "sync":
        # the iteration trains from the same weights, and a server is compared with an actor that holds its weights
        ensure_weights(driver, "actor", weights)
    elif weights == state.initial["actor"]:
        group.call(Worker.load, "rollout", weights, None)
        return 0
    elif not actor.call(Worker.has_weights, "actor", weights):
        if _load_snapshot(driver, group, weights):
            return 0
        ensure_weights(driver, "actor", weights)  # only the workers that train the actor can replay it
    if group is actor:
        return group.call(Worker.copy_to_rollout, weights)
    if (moved := driver.weight_sync.between(actor, group, weights)) is not None:
        return moved
    if not actor.call(Worker.has_weights, "actor", weights):
        return None
    # no direct transfer: send the weights through the store
    if _load_snapshot(driver, group, weights):
        return 0
    actor.call(Worker.begin_save, "actor")
    saved = actor.call(Worker.finish_save, "actor")
    if saved is None or driver.store.checkpoint(saved).weights != weights:
        return None
    group.call(Worker.load, "rollout", weights, saved)
    return 0


def _load_snapshot(driver: Driver, group: WorkerGroup, weights: Weights) -> bool:
    """Loads the snapshot of these weights on a rollout; False if there is none."""
    driver.snapshots.settle(wait=True)  # it may be this one, and workers write one at a time
    stored = driver.store.actor_weights(weights)
    if stored is not None:
        group.call(Worker.load, "rollout", weights, stored)
    elif driver.store.log.worker is not None:  # only the driver could replay the updates
        raise Late(f"the run has moved on from the actor's weights of version {weights.version}")
    return stored is not None


def publish(driver: Driver, weights: Weights) -> None:
    """Writes the actor's weights to the store for rollout workers, unless they can load them already."""
    store = driver.store
    if driver.snapshots.being_written == weights.version:
        driver.snapshots.settle(wait=True)
    if weights == driver.state.initial["actor"] or store.actor_weights(weights) is not None:
        return
    ensure_weights(driver, "actor", weights)
    actor = driver.groups.of("actor")
    with driver.restoring:
        actor.call(Worker.begin_publish)
        written = actor.call(Worker.finish_save, "rollout")
    if written is not None:  # else a worker of the pool died: the iteration generates without help
        store.publish(Published(weights=weights, checkpoint=written))


def _replay(driver: Driver, group: WorkerGroup, stage: UpdateStage[C], current: Weights, target: Weights) -> Weights:
    """Applies the update of iteration `current.version` again; returns the committed weights after it."""
    role = stage.role
    committed = driver.store.committed_stage(current.version, stage.name)
    if committed is None or isinstance(committed, Skip):  # None: the config of that iteration did not have the role
        passed = Weights(version=current.version + 1, digest=current.digest)
        group.call(Worker.mark_as_version, role, passed)
        return passed
    report(ReplayProgress(role=role, done=current.version, total=target.version))
    manifest = driver.store.manifest(committed)
    input_names = [name.removeprefix("input.") for name in manifest.fingerprint.parts if name.startswith("input.")]
    sources = driver.store.manifests(current.version)
    config = driver.config.as_committed(manifest.config)  # the values of that time, not today's
    call = Call(
        term=driver.term,
        stage=stage.name,
        iteration=current.version,
        config=stage.config.of(config),
        inputs=stage.inputs(stage.inputs_of({name: StageHandle.of(sources[name]) for name in input_names}), shard=0),
        role=role,
        weights=current,
        follows=followed(driver, stage, current.version),
    )
    for source, weights in call.follows.items():
        ensure_weights(driver, source, weights)
    try:
        replayed = group.call(Worker.update, UpdateCall(call, stage.compute))
    except NotFinite as error:
        raise ReplayMismatch(f"replaying {committed.stage} of iteration {committed.iteration}: {error}") from error
    assert manifest.weights is not None
    if replayed.weights != manifest.weights:
        _report_mismatch(driver, stage, committed, manifest, replayed)
        # later updates name the committed digest, which the workers must answer to
        group.call(Worker.mark_as_version, role, manifest.weights)
    return manifest.weights


def followed(driver: Driver, stage: UpdateStage[C], iteration: int) -> dict[str, Weights]:
    """Returns the weights, by role, that an update reads in addition to its own.

    They are those after `iteration`, in which the role that the update follows has already been updated or skipped.
    """
    if stage.follows is None:
        return {}
    source = update_of(stage.follows)
    assert source is not None, "it follows a role that is trained"
    committed = driver.store.committed_stage(iteration, source.name)
    assert committed is not None and committed.weights is not None, f"{stage.name} reads {source.name}"
    return {stage.follows: committed.weights}


def _report_mismatch(
    driver: Driver, stage: UpdateStage[C], committed: StageCommit, manifest: Manifest, replayed: Updated
) -> None:
    assert manifest.weights is not None
    if driver.term:  # term 0: the driver has not claimed the run and must not write
        driver.store.commit(
            Diverged(
                iteration=committed.iteration,
                stage=committed.stage,
                role=stage.role,
                committed=manifest.weights.digest,
                replayed=replayed.weights.digest,
            )
        )
    policy = driver.config.checkpoint.on_replay_mismatch
    mismatch = explained(
        stage.version,
        manifest.fingerprint.parts,
        device=replayed.device,
        deterministic=driver.config.run.deterministic,
    )
    update = f"{committed.stage} of iteration {committed.iteration}"
    message = f"replaying {update} gave different weights: {mismatch.reason}"
    if policy == "stop" or (policy == "auto" and not mismatch.is_expected):
        raise ReplayMismatch(f"{message}; checkpoint.on_replay_mismatch=continue accepts the replayed weights")
    if not mismatch.is_usual:
        note(f"{message}; continuing")
    elif not driver.has_said_that_replays_differ:
        driver.has_said_that_replays_differ = True
        note(f"{message}; continuing (later differences are not reported)")


@dataclass(frozen=True)
class Mismatch:
    """The reason why a replayed update produced other weights."""

    reason: str
    is_expected: bool
    """True if nothing is wrong, so that the run may continue."""
    is_usual: bool = False
    """True if every replay on this device may differ, so that one note is enough."""


def explained(version: int, then: Mapping[str, object], *, device: str, deterministic: bool) -> Mismatch:
    """Explains why a replayed update produced other weights.

    Args:
        version: Version of the stage's code.
        then: Parts of the fingerprint of the committed update.
        device: Type of the device that replayed it.
        deterministic: True if it was replayed with `run.deterministic`.
    """
    was_held = device == "cpu" or (deterministic and "deterministic" in then)
    if then["version"] != version:
        return Mismatch("an older release computed it differently", is_expected=not was_held)
    if was_held:
        same = "engine, processes and threads" if device == "cpu" else "engine, processes and GPUs"
        return Mismatch(f"with the same {same}, the cause is a bug or a changed package", is_expected=False)
    if deterministic:
        return Mismatch(f"it was computed on {device} without run.deterministic", is_expected=True, is_usual=True)
    reason = f"updates on {device} need not give the same bits twice, except with run.deterministic"
    return Mismatch(reason, is_expected=True, is_usual=True)
