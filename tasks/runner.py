"""Runs stages: waits for the inputs, lets a worker compute, and commits the result.

A committed stage is never computed again: its Prefect task ends in a state named `Cached`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import TypeVar

from prefect.client.schemas.objects import State
from prefect.states import Completed

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.progress import StageProgress, note, report
from ratchet.infra.store.clock import now
from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.records import Skip, StageCommit, Weights
from ratchet.infra.workers.calls import C, UpdateCall
from ratchet.infra.workers.ray_group import GroupLost
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.errors import NotFinite
from ratchet.tasks.fingerprints import changed, fingerprint_of
from ratchet.tasks.pipeline import update_of
from ratchet.tasks.recording import recorded_task
from ratchet.tasks.shard_runner import run_rows
from ratchet.tasks.stage import RowsStage, Stage, UpdateStage
from ratchet.tasks.worker_calls import Handles, call_of, on_worker

R = TypeVar("R")


def start(
    driver: Driver,
    stage: Stage,
    iteration: int,
    handles: Handles,
    *,
    after: Callable[[], object] | None = None,
    ahead: bool = False,
    lane: str = "",
) -> StageHandle:
    """Starts a stage in the background. It computes as its inputs are committed; `finish` waits for all stages.

    Args:
        handles: Handles of the iteration's stages; the stage uses those in its `reads`.
        after: Returns once the stage may start; used for generations of later iterations.
        ahead: True for a generation of a later iteration.
        lane: Stages in different lanes of the same executor run at the same time.
    """
    inputs = stage.inputs_of(handles)

    def job(handle: StageHandle) -> Manifest | None:
        if after is not None:
            after()
        for name, source in inputs.items():
            # both calls wait: for the first shard, or for the whole stage
            if stage.reads_shard_of(name):
                source.shards()
            else:
                source.is_skipped()
        run = partial(_run, driver, stage, iteration, inputs, handle)
        result = _stage_task(stage.name)(driver, iteration, run)
        return result.result() if isinstance(result, State) else result

    return driver.executors.start(driver.groups.executor_of(stage.role) + lane, stage.name, job, ahead)


StageTask = Callable[[Driver, int, Callable[[], tuple[Manifest | None, bool]]], Manifest | State[Manifest] | None]


@cache
def _stage_task(name: str) -> StageTask:
    """Returns the Prefect task of a stage; its argument `body` does the work."""

    @recorded_task(name)
    def stage_task(
        driver: Driver, iteration: int, body: Callable[[], tuple[Manifest | None, bool]]
    ) -> Manifest | State[Manifest] | None:
        manifest, committed_before = body()
        return Completed(name="Cached", data=manifest, message="committed before") if committed_before else manifest

    return stage_task


def _run(
    driver: Driver, stage: Stage, iteration: int, inputs: Handles, handle: StageHandle
) -> tuple[Manifest | None, bool]:
    """Runs a stage; returns its manifest (None if it was skipped) and whether it was committed before."""
    if isinstance(stage, RowsStage):
        return run_rows(driver, stage, iteration, inputs, handle)
    return _run_update(driver, stage, iteration, inputs)


def finish(driver: Driver) -> None:
    """Waits for every stage that was started; raises the first error of any of them."""
    driver.executors.join(meanwhile=driver.tidy)


# Updates.


def _run_update(driver: Driver, stage: UpdateStage[C], iteration: int, inputs: Handles) -> tuple[Manifest | None, bool]:
    store = driver.store
    committed = store.committed_stage(iteration, stage.name)
    if isinstance(committed, Skip):
        if committed.not_finite:
            return None, True
        raise changed(driver, stage.name, iteration, [f"it was skipped: {committed.reason}"])
    if committed is not None:
        report(StageProgress(iteration=iteration, stage=stage.name, done=1, total=1))
        return store.manifest(committed), True

    if skipped := [name for name, source in inputs.items() if source.is_skipped()]:
        skip_update(driver, stage, iteration, f"{skipped[0]} was skipped", not_finite=True)
        return None, False
    attempt, began = store.begin_attempt(iteration, stage.name), now()
    report(StageProgress(iteration=iteration, stage=stage.name, done=0, total=1))
    driver.stopping.check()
    call = call_of(driver, stage, iteration, inputs, attempt=attempt)
    update_call = UpdateCall(call, stage.compute)
    try:
        group = driver.groups.of(stage.role)
        updated = on_worker(driver, call.needs, lambda: group.call(Worker.update, update_call))
    except NotFinite as error:
        if driver.config.train.on_nan == "stop":
            raise
        note(f"{stage.name} of iteration {iteration} is skipped: {error}")
        skip_update(driver, stage, iteration, str(error), not_finite=True)
        return None, False
    manifest = Manifest(
        iteration=iteration,
        stage=stage.name,
        term=driver.term,
        attempt=attempt,
        fingerprint=fingerprint_of(driver, stage, iteration, inputs),
        config=stage.config.values(driver.config),
        role=stage.role,
        weights=updated.weights,
        metrics=updated.metrics,
        seconds=updated.seconds,
        began=began,
        ended=now(),
    )
    commit = StageCommit(
        iteration=iteration,
        stage=stage.name,
        manifest=store.write_manifest(manifest),
        fingerprint=manifest.fingerprint.digest,
        role=stage.role,
        weights=updated.weights,
    )
    store.commit(commit)
    report(StageProgress(iteration=iteration, stage=stage.name, done=1, total=1, metrics=updated.metrics))
    return manifest, False


def skip_update(
    driver: Driver,
    stage: UpdateStage[C],
    iteration: int,
    reason: str,
    *,
    not_finite: bool = False,
    cursor: int | None = None,
) -> None:
    """Commits that a role's weights pass through this iteration unchanged.

    Args:
        reason: The reason, as stored and shown.
        not_finite: True if the reason is a loss or gradient that is not finite.
        cursor: Position in the dataset at which the next iteration starts; None: unchanged by this commit.
    """
    if driver.store.committed_stage(iteration, stage.name) is not None:
        return
    before = driver.state.weights[stage.role]
    after = Weights(version=before.version + 1, digest=before.digest)
    driver.store.commit(
        Skip(
            iteration=iteration,
            stage=stage.name,
            role=stage.role,
            weights=after,
            reason=reason,
            not_finite=not_finite,
            cursor=cursor,
        )
    )
    group = driver.groups.of(stage.role)
    with suppress(GroupLost):  # new workers load the weights when they need them
        if group.call(Worker.has_weights, stage.role, before):  # false after a part of the steps: loaded again later
            group.call(Worker.mark_as_version, stage.role, after)


def skip_what_is_left(driver: Driver, iteration: int, error: NotFinite) -> None:
    """Skips the remaining updates of this iteration with `train.on_nan: skip`; raises `error` with `stop`."""
    if driver.config.train.on_nan == "stop":
        raise error
    note(f"iteration {iteration} skips its remaining updates: {error}")
    drawn = driver.store.committed_stage(iteration, "generate")
    # past all prompts of the iteration, so that they are not drawn again
    beyond = driver.state.cursor + driver.config.max_prompts if drawn is None else None
    for role in driver.config.trained:
        if (stage := update_of(role)) is not None:
            skip_update(driver, stage, iteration, str(error), not_finite=True, cursor=beyond)
            beyond = None  # only the first Skip carries the cursor


def check_not_given_up(driver: Driver, iteration: int) -> None:
    """Raises `NotFinite`, with the earlier driver's reason, if a driver gave the iteration up: learning does not resume
    halfway."""
    if reason := is_given_up(driver, iteration):
        raise NotFinite(reason)


def is_given_up(driver: Driver, iteration: int) -> str | None:
    """Returns the reason why a driver gave the iteration up; None if none did."""
    stages = driver.store.iteration_state(iteration).stages.values()
    return next((commit.reason for commit in stages if isinstance(commit, Skip) and commit.not_finite), None)
