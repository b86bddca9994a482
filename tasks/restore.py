"""Restores the weights that a stage needs: load the newest snapshot, then replay the updates after it.

Trajectories are the write-ahead log, checkpoints are the snapshots. A replayed update reads the same inputs as the
first time, with the config from its manifest. Nothing is generated, scored or committed again.
"""

from __future__ import annotations

from infra.execution.driver import Driver
from infra.execution.executors import StageHandle
from infra.progress import ReplayProgress, note, report
from infra.store.log import Corrupt
from infra.store.manifest import Manifest
from infra.store.records import Diverged, Skip, StageCommit, Weights
from infra.workers.calls import C, Call, UpdateCall, Updated
from infra.workers.groups import WorkerGroup
from infra.workers.worker import WEIGHTS_OF, Worker
from rlhf.errors import NotFinite
from tasks.pipeline import update_of
from tasks.stage import ROUNDING, UpdateStage


class ReplayMismatch(Corrupt):
    """A replayed update produced different weights from the committed ones."""


def ensure_weights(driver: Driver, role: str, weights: Weights) -> None:
    """Restore the weights of a role on its workers, unless they hold them already.

    Args:
        driver: Driver of the run.
        role: `actor`, `critic`, `reference` or `rollout`.
        weights: The weights to restore.

    Raises:
        ReplayMismatch: see `restore`.
    """
    with driver.restoring:
        if not driver.groups.of(role).call(Worker.has_weights, role, weights):
            restore(driver, role, weights)


def restore(driver: Driver, role: str, weights: Weights) -> None:
    """Load a snapshot on the workers of a role, and replay the updates after it.

    Args:
        driver: Driver of the run.
        role: `actor`, `critic`, `reference` or `rollout`.
        weights: The weights to restore.

    Raises:
        ReplayMismatch: if a replayed update fails, or produces different weights and
            `checkpoint.on_replay_mismatch` does not allow that.
    """
    store, group = driver.store, driver.groups.of(role)
    if role == "rollout" and not group.call(Worker.rollout_is_actor):
        return _restore_copy(driver, group, weights)
    role = WEIGHTS_OF.get(role, role)
    update = update_of(role)
    snapshot = None if update is None else store.snapshot_at_or_before(weights.version, role)
    if snapshot is None:
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
    """Give the actor's weights to a rollout that has its own tensors."""
    with driver.weight_sync.measured() as transfers:
        moved = group.call(Worker.copy_to_rollout, weights)
        transfers.nbytes += _from_elsewhere(driver, group, weights) if moved is None else moved


def _from_elsewhere(driver: Driver, group: WorkerGroup, weights: Weights) -> int:
    """Give weights to a rollout whose own process has no actor that holds them; returns the bytes that were sent.

    They come from the workers that train the actor, or from a snapshot if these workers have moved on.
    """
    state, actor = driver.state, driver.groups.of("actor")
    rollout = driver.config.rollout
    if group is actor and rollout.engine == "server" and rollout.mode == "sync":
        # the iteration trains from the same weights, and a server is compared with an actor that holds its weights
        ensure_weights(driver, "actor", weights)
    elif weights == state.initial["actor"]:
        group.call(Worker.load, "rollout", weights, None)
        return 0
    elif not actor.call(Worker.has_weights, "actor", weights):
        driver.snapshots.settle(wait=True)
        if (roles := driver.state.snapshots.get(weights.version)) is not None:
            group.call(Worker.load, "rollout", weights, roles["actor"])
            return 0
        ensure_weights(driver, "actor", weights)  # only the workers that train the actor can replay it
    if group is actor:
        moved = group.call(Worker.copy_to_rollout, weights)
        assert moved is not None, "the actor holds them"
        return moved
    if (moved := driver.weight_sync.between(actor, group, weights)) is not None:
        return moved
    actor.call(Worker.begin_save, "actor")
    saved = actor.call(Worker.finish_save, "actor")
    assert saved is not None
    group.call(Worker.load, "rollout", weights, saved)
    return 0


def _replay(driver: Driver, group: WorkerGroup, stage: UpdateStage[C], current: Weights, target: Weights) -> Weights:
    """Apply the update of iteration `current.version` again; returns the committed weights after it."""
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
    )
    try:
        replayed = group.call(Worker.update, UpdateCall(call, stage.compute))
    except NotFinite as error:
        raise ReplayMismatch(f"replaying {committed.stage} of iteration {committed.iteration}: {error}") from error
    assert manifest.weights is not None
    if replayed.weights != manifest.weights:
        _report_mismatch(driver, stage, committed, manifest, replayed)
        group.call(Worker.mark_as_version, role, manifest.weights)
    return manifest.weights


def _report_mismatch(
    driver: Driver, stage: UpdateStage[C], committed: StageCommit, manifest: Manifest, replayed: Updated
) -> None:
    assert manifest.weights is not None
    is_comparable = replayed.weights.is_comparable(manifest.weights)
    if driver.term and is_comparable:  # term 0: the driver has not claimed the run and must not write
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
    then = manifest.fingerprint.parts
    happened, expected = "gave different weights", replayed.device != "cpu"
    if not is_comparable:
        happened, expected = "may have given different weights", True
        reason = "an older release computed digests in another way"
    elif then.get("version") != stage.version:
        reason = "an older release computed it differently"
    elif then.get("rounding") != ROUNDING:
        expected, reason = True, "an older release rounded differently"
    elif expected:
        reason = f"updates on {replayed.device} need not give the same bits twice"
    else:
        reason = "with the same engine, processes and threads, the cause is a bug or a changed package"
    message = f"replaying {committed.stage} of iteration {committed.iteration} {happened}: {reason}"
    if policy == "stop" or (policy == "auto" and not expected):
        raise ReplayMismatch(f"{message}; checkpoint.on_replay_mismatch=continue accepts the replayed weights")
    note(f"{message}; continuing")
