"""reuse_rollouts: uses the generations of another run, without generating or copying anything."""

from __future__ import annotations

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.progress import StageProgress, report
from ratchet.infra.runs.forks import name_of
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.records import StageCommit, seen_from_fork
from ratchet.rlhf.errors import UserError
from ratchet.tasks.recording import recorded_task


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
        store.commit(committed)
    assert isinstance(committed, StageCommit)
    manifest = store.manifest(committed)
    shards = len(manifest.shards)
    report(StageProgress(iteration=iteration, stage="generate", done=shards, total=shards))
    return StageHandle.of(manifest)
