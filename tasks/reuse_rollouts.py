"""reuse_rollouts: uses the generations of another run, and what its teacher said of them, without copying more than
images."""

from __future__ import annotations

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.progress import StageProgress, report
from ratchet.infra.runs.forks import name_of
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.images import Images
from ratchet.infra.store.records import StageCommit, seen_from_fork
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.image_processor import sees_images
from ratchet.rlhf.schema import IMAGES
from ratchet.tasks.fingerprints import fingerprint_of
from ratchet.tasks.recording import recorded_task
from ratchet.tasks.stages.teacher_log_probs import TEACHER_LOG_PROBS


@recorded_task("reuse_rollouts")
def reuse_rollouts(driver: Driver, iteration: int) -> StageHandle:
    """Commits the generations of the run at `data.generations` as this run's own."""
    store, source = driver.store, driver.config.data.generations
    assert source is not None
    committed = store.committed_stage(iteration, "generate")
    if committed is None:
        source_store = open_run(source).store
        source_commit = source_store.committed_stage(iteration, "generate")
        if not isinstance(source_commit, StageCommit):
            raise UserError(
                f"data.generations: {source} has not generated iteration {iteration}; lower train.iterations"
            )
        committed = seen_from_fork(name_of(source_store.url, store.url), source_commit)
        _keep_images(driver, source_store, source_commit)
        store.commit(committed)
    assert isinstance(committed, StageCommit)
    manifest = store.manifest(committed)
    _reuse_teacher(driver, iteration, StageHandle.of(manifest))
    shards = len(manifest.shards)
    report(StageProgress(iteration=iteration, stage="generate", done=shards, total=shards))
    return StageHandle.of(manifest)


def _keep_images(driver: Driver, source: RunStore, committed: StageCommit) -> None:
    """Copies the images that the trajectories name: the other run may delete its own."""
    if not sees_images(driver.config.model):
        return
    own, theirs = Images(driver.store.objects), Images(source.objects)
    columns = [source.read_shard(shard, [IMAGES])[IMAGES] for shard in source.manifest(committed).shards]
    for digest in {digest for column in columns for row in column.to_pylist() for digest in row or ()}:
        own.put(theirs.get(digest))


def _reuse_teacher(driver: Driver, iteration: int, generated: StageHandle) -> None:
    """Commits what the other run's teacher said as this run's own, if it is the same teacher, asked in the same way."""
    store, stage, source = driver.store, TEACHER_LOG_PROBS, driver.config.data.generations
    # a selection of trajectories is not known yet
    if not stage.exists(driver.config) or driver.config.selects or store.committed_stage(iteration, stage.name):
        return
    assert source is not None
    source_store = open_run(source).store
    committed = source_store.committed_stage(iteration, stage.name)
    if not isinstance(committed, StageCommit):
        return
    theirs = source_store.manifest(committed)
    ours = fingerprint_of(driver, stage, iteration, {generated.stage: generated})
    if theirs.fingerprint == ours and not stage.config.differences(theirs.config, driver.config):
        store.commit(seen_from_fork(name_of(source_store.url, store.url), committed))
