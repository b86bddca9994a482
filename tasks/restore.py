"""Bringing a worker to the weights that a stage asks for: the newest snapshot, then the updates after it again.

Trajectories are the write-ahead log, checkpoints are snapshots. A replayed update reads what the first one read, with
the config that its manifest recorded; nothing is generated or scored again, and no stage is committed again.
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
from tasks.stage import UpdateStage


class ReplayMismatch(Corrupt):
    """A replayed update gave other weights than it gave when it was committed."""


def ensure_weights(driver: Driver, role: str, weights: Weights) -> None:
    """Restore what `role` computes with, unless it is there, where it computes."""
    with driver.restoring:
        if not driver.groups.of(role).call(Worker.has_weights, role, weights):
            restore(driver, role, weights)


def restore(driver: Driver, role: str, weights: Weights) -> None:
    """Load what `role` computes with, where it computes, and replay until it is at `weights`."""
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
    assert at.version == weights.version, f"{role} is at version {at.version}, and {weights.version} was asked for"


def _restore_copy(driver: Driver, group: WorkerGroup, weights: Weights) -> None:
    """Give a rollout that has tensors of its own the actor's weights: from the actor if it is here and has them, from
    a snapshot, or from the actor through the store."""
    if group.call(Worker.copy_to_rollout, weights):
        return
    driver.snapshots.settle(wait=True)
    state, actor = driver.state, driver.groups.of("actor")
    rollout = driver.config.rollout
    if group is actor and rollout.engine == "server" and rollout.mode == "sync":
        # the iteration trains with these, too; and a server is compared with the actor that holds what it holds
        ensure_weights(driver, "actor", weights)
        assert group.call(Worker.copy_to_rollout, weights), "the actor holds them"
    elif weights == state.initial["actor"]:
        group.call(Worker.load, "rollout", weights, None)
    elif (roles := state.snapshots.get(weights.version)) is not None:
        group.call(Worker.load, "rollout", weights, roles["actor"])
    else:
        ensure_weights(driver, "actor", weights)  # only where it is trained can it be replayed
        if not group.call(Worker.copy_to_rollout, weights):
            actor.call(Worker.begin_save, "actor")
            saved = actor.call(Worker.finish_save, "actor")
            assert saved is not None
            group.call(Worker.load, "rollout", weights, saved)


def _replay(driver: Driver, group: WorkerGroup, stage: UpdateStage[C], at: Weights, target: Weights) -> Weights:
    """Apply the update of iteration `at.version` again."""
    role = stage.role
    committed = driver.store.committed_stage(at.version, stage.name)
    if committed is None or isinstance(committed, Skip):  # None: the config of the iteration had no such role
        passed = Weights(version=at.version + 1, digest=at.digest)
        group.call(Worker.mark_as_version, role, passed)
        return passed
    report(ReplayProgress(role=role, done=at.version, total=target.version))
    manifest = driver.store.manifest(committed)
    read = [name.removeprefix("input.") for name in manifest.fingerprint.parts if name.startswith("input.")]
    sources = driver.store.manifests(at.version)
    config = driver.config.as_committed(manifest.config)  # then, not with today's other keys
    call = Call(
        term=driver.term,
        stage=stage.name,
        iteration=at.version,
        config=stage.config.of(config),
        inputs=stage.inputs(stage.inputs_of({name: StageHandle.of(sources[name]) for name in read}), shard=0),
        role=role,
        weights=at,
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
    if driver.term:  # a driver that has not claimed the run only looks
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
    then, now = manifest.fingerprint.parts.get("version"), stage.version
    reason = "with the same engine, processes and threads that is a bug or a changed package"
    if then != now:
        reason = f"an older release committed them, and this one computes {committed.stage} otherwise"
    if policy == "stop" or (policy == "auto" and replayed.device == "cpu"):
        raise ReplayMismatch(
            f"replaying {committed.stage} of iteration {committed.iteration} gave other weights than were committed: "
            f"{reason}; checkpoint.on_replay_mismatch=continue goes on with the replayed weights"
        )
    note(f"replaying {committed.stage} of iteration {committed.iteration} gave other weights; going on")
