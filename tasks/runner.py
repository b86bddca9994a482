"""Runs stages: wait for the inputs, let a worker compute, and commit the result.

A committed stage is never computed again: its Prefect task ends in a state named `Cached`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import TypeVar

from prefect.client.schemas.objects import State
from prefect.states import Completed

from infra.execution.driver import Driver
from infra.execution.executors import StageHandle
from infra.progress import StageProgress, note, report
from infra.store.clock import now
from infra.store.manifest import Manifest
from infra.store.records import Assigned, RunState, ShardCommit, Skip, StageCommit, Weights
from infra.workers.calls import C, Call, Rows, RowsCall, S, UpdateCall
from infra.workers.groups import WorkerGroup
from infra.workers.ray_group import GroupLost
from infra.workers.worker import Worker, WrongPolicyVersion
from rlhf.errors import NotFinite
from tasks.changes import changed, fingerprint_of, weights_for
from tasks.pipeline import stages_of, update_of
from tasks.recording import recorded_task
from tasks.restore import ensure_weights
from tasks.stage import RowsStage, Stage, UpdateStage

R = TypeVar("R")
TRIES = 3
"""Number of attempts to call a worker. Between restoring the weights and the call, another executor may load others."""

Handles = Mapping[str, StageHandle]
"""Handles of stages, by stage name."""


def start(
    driver: Driver,
    stage: Stage,
    iteration: int,
    handles: Handles,
    *,
    after: StageHandle | None = None,
    ahead: bool = False,
) -> StageHandle:
    """Start a stage in the background. It computes as its inputs are committed; `finish` waits for all stages.

    Args:
        driver: Driver of the run.
        stage: A stage of the pipeline.
        iteration: Iteration to compute.
        handles: Handles of the iteration's stages; the stage uses those in its `reads`.
        after: Stage that must end first; used for generations of later iterations.
        ahead: Whether this is a generation of a later iteration.

    Returns:
        The handle through which other stages read this one.
    """
    inputs = stage.inputs_of(handles)

    def job(handle: StageHandle) -> Manifest | None:
        if after is not None:
            after.manifest()
        for name, source in inputs.items():
            if stage.reads_shard_of(name):
                source.shard(0)
            else:
                source.manifest()
        run = partial(_run, driver, stage, iteration, inputs, handle)
        result = _stage_task(stage.name)(driver, iteration, run)
        return result.result() if isinstance(result, State) else result

    return driver.executors.start(driver.groups.executor_of(stage.role), stage.name, job, ahead)


StageTask = Callable[[Driver, int, Callable[[], tuple[Manifest | None, bool]]], Manifest | State[Manifest] | None]


@cache
def _stage_task(name: str) -> StageTask:
    """The Prefect task of a stage; its argument `body` does the work."""

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
    """Run a stage; returns its manifest (None if it was skipped) and whether it was committed before."""
    if isinstance(stage, RowsStage):
        return _run_rows(driver, stage, iteration, inputs, handle)
    return _run_update(driver, stage, iteration, inputs)


def finish(driver: Driver) -> None:
    """Wait for every stage that was started. Raises the first error of any of them."""
    driver.executors.join(meanwhile=driver.tidy)


# Stages that write rows.


def _run_rows(
    driver: Driver, stage: RowsStage[C, S], iteration: int, inputs: Handles, handle: StageHandle
) -> tuple[Manifest, bool]:
    store = driver.store
    total = _shards(driver, stage, inputs)
    committed = store.committed_stage(iteration, stage.name)
    if committed is not None:
        assert isinstance(committed, StageCommit), "rows are not skipped"
        report(StageProgress(iteration=iteration, stage=stage.name, done=total, total=total))
        return store.manifest(committed), True

    attempt, began = store.begin_attempt(iteration, stage.name), now()
    enough = _until(driver, stage, iteration)
    if enough is None:
        handle.expect(total)
    done: list[ShardCommit] = []
    uncommitted: list[ShardCommit] = []
    while len(done) < total:
        report(StageProgress(iteration=iteration, stage=stage.name, done=len(done), total=total))
        handle.check()
        shard, was_committed = _shard(driver, stage, iteration, inputs, len(done), attempt)
        done.append(shard)
        uncommitted = [] if was_committed else [shard]
        if uncommitted and (enough is not None or len(done) < total):
            store.commit(*uncommitted)
            uncommitted = []
        if enough is None and not uncommitted:
            handle.show([shard.data for shard in done])
        if enough is not None and enough(done):
            break

    manifest = Manifest(
        iteration=iteration,
        stage=stage.name,
        term=driver.term,
        attempt=attempt,
        fingerprint=fingerprint_of(driver, stage, iteration, inputs),
        config=stage.config.values(driver.config),
        columns=("trajectory_id", *(column.name for column in stage.writes)),
        shards=tuple(shard.data for shard in done),
        metrics=stage.metrics_of([shard.outputs for shard in done]),
        seconds=sum(shard.seconds for shard in done),
        began=began,
        ended=now(),
    )
    last = stage.summary.model_validate(done[-1].outputs)
    commit = StageCommit(
        iteration=iteration,
        stage=stage.name,
        manifest=store.write_manifest(manifest),
        fingerprint=manifest.fingerprint.digest,
        cursor=last.cursor,
        controllers=last.controllers,
    )
    store.commit(*uncommitted, commit)  # one record, so that the last shard is never committed without its stage
    report(StageProgress(iteration=iteration, stage=stage.name, done=total, total=total, metrics=manifest.metrics))
    return manifest, False


def _shards(driver: Driver, stage: RowsStage[C, S], inputs: Handles) -> int:
    """Number of shards of a stage; the maximum, for a stage with a stop condition."""
    if not stage.sharded:
        return 1
    return stage.count(driver) if stage.count is not None else next(iter(inputs.values())).count()


def _shard(
    driver: Driver, stage: RowsStage[C, S], iteration: int, inputs: Handles, shard: int, attempt: int
) -> tuple[ShardCommit, bool]:
    """A shard, and whether it was committed before. A shard that was not is computed here; the caller commits it."""
    if (committed := driver.store.committed_shards(stage.name, iteration).get(shard)) is not None:
        return committed, True
    driver.stopping.check()
    with driver.rollout.turn if stage.role == "rollout" else nullcontext():
        _assign(driver, stage, iteration, shard)
        rows = _computed(driver, stage, call_of(driver, stage, iteration, inputs, shard=shard, attempt=attempt))
    assert rows.shard is not None, "rank 0 answers"
    commit = ShardCommit(
        iteration=iteration,
        stage=stage.name,
        shard=shard,
        term=driver.term,
        data=rows.shard,
        seconds=rows.seconds,
        outputs=rows.summary.model_dump(mode="json", exclude_defaults=True),
    )
    return commit, False


def _computed(driver: Driver, stage: RowsStage[C, S], call: Call[C]) -> Rows[S]:
    rows_call = RowsCall(call, stage.compute, stage.writes, stage.begin)
    return on_worker(driver, call, lambda group: group.call(Worker.rows, rows_call))


def _assign(driver: Driver, stage: RowsStage[C, S], iteration: int, shard: int) -> None:
    """Commit which weights a shard will be generated with, if they do not follow from its iteration."""
    loaded = driver.rollout.loaded
    state = driver.store.iteration_state(iteration)
    if stage.name == "generate" and loaded is not None and state.assigned.get(shard) != loaded:
        driver.store.commit(Assigned(iteration=iteration, shard=shard, weights=loaded))


def _until(driver: Driver, stage: RowsStage[C, S], iteration: int) -> Callable[[list[ShardCommit]], bool] | None:
    """The stop condition of a stage, as a function of its shards so far; None if the stage has none."""
    until, store = stage.until, driver.store
    if until is None or not until.applies(driver.config):
        return None
    following = [follower for follower in stages_of(driver.config) if follower.name in until.follow]
    attempts = {follower.name: store.begin_attempt(iteration, follower.name) for follower in following}

    def enough(done: list[ShardCommit]) -> bool:
        handles = {stage.name: StageHandle.so_far(stage.name, [shard.data for shard in done])}
        scored: list[ShardCommit] = []
        for follower in following:
            assert isinstance(follower, RowsStage)
            inputs = follower.inputs_of(handles)
            shard, was_committed = _shard(driver, follower, iteration, inputs, len(done) - 1, attempts[follower.name])
            if not was_committed:
                store.commit(shard)
            committed = store.committed_shards(follower.name, iteration)  # a driver that died may have left later ones
            scored = [committed[number] for number in range(len(done))]
            handles[follower.name] = StageHandle.so_far(follower.name, [shard.data for shard in scored])
        return until.enough(driver.config, [shard.outputs for shard in scored])

    return enough


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

    attempt, began = store.begin_attempt(iteration, stage.name), now()
    report(StageProgress(iteration=iteration, stage=stage.name, done=0, total=1))
    driver.stopping.check()
    call = call_of(driver, stage, iteration, inputs, attempt=attempt)
    update_call = UpdateCall(call, stage.compute)
    try:
        updated = on_worker(driver, call, lambda group: group.call(Worker.update, update_call))
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
    """Commit that a role's weights pass through this iteration unchanged.

    Args:
        driver: Driver of the run.
        stage: Update stage of the role.
        iteration: Iteration in which the role does not learn.
        reason: The reason, as stored and shown.
        not_finite: Whether the reason is a loss or gradient that is not finite.
        cursor: Position in the dataset at which the next iteration begins; None: unchanged by this commit.
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
    """With `train.on_nan: skip`, skip the remaining updates of this iteration; otherwise raise the error.

    Args:
        driver: Driver of the run.
        iteration: The open iteration.
        error: The error that made the iteration fail.

    Raises:
        NotFinite: `error`, with `train.on_nan: stop`.
    """
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
    """Do not resume learning halfway through an iteration that an earlier driver gave up.

    Raises:
        NotFinite: with the earlier driver's reason.
    """
    if reason := is_given_up(driver, iteration):
        raise NotFinite(reason)


def is_given_up(driver: Driver, iteration: int) -> str | None:
    """The reason why a driver gave the iteration up; None if none did."""
    stages = driver.store.iteration_state(iteration).stages.values()
    return next((commit.reason for commit in stages if isinstance(commit, Skip) and commit.not_finite), None)


# Calls to workers.


def on_worker(driver: Driver, call: Call[C], ask: Callable[[WorkerGroup], R]) -> R:
    """Call the workers of a role, after restoring the weights of the call if they do not hold them.

    Args:
        driver: Driver of the run.
        call: The call, which names the role and its weights.
        ask: Sends the call to a group of workers.

    Returns:
        The result of `ask`.

    Raises:
        GroupLost: if the workers died, or did not keep the weights in `TRIES` attempts.
    """
    group = driver.groups.of(call.role)
    for _ in range(TRIES):
        try:
            return ask(group)
        except GroupLost:
            driver.store.log.check_claim()  # the driver that took the run over may have ended the workers
            raise
        except WrongPolicyVersion:
            assert call.role is not None and call.weights is not None
            ensure_weights(driver, call.role, call.weights)
    raise GroupLost(f"the workers of the {call.role} do not keep the weights that {call.stage} needs")


def call_of(
    driver: Driver,
    stage: RowsStage[C, S] | UpdateStage[C],
    iteration: int,
    inputs: Handles,
    *,
    shard: int = 0,
    attempt: int = 0,
    config: C | None = None,
    began: RunState | None = None,
) -> Call[C]:
    """Build the call that a worker receives.

    Args:
        driver: Driver of the run.
        stage: Stage to compute.
        iteration: Iteration of the stage.
        inputs: Handles of the stage's inputs, by name.
        shard: Index of the shard; 0 for an update.
        attempt: Number that distinguishes the files of this attempt.
        config: Config of the stage; None: from the run's config.
        began: State in which the iteration began; None: the driver's state.

    Returns:
        The call.
    """
    state = driver.state if began is None else began
    return Call(
        term=driver.term,
        stage=stage.name,
        iteration=iteration,
        shard=shard,
        attempt=attempt,
        config=stage.config.of(driver.config) if config is None else config,
        inputs=stage.inputs(inputs, shard),
        role=stage.role,
        weights=weights_for(driver, stage, iteration, shard),
        cursor=state.cursor_before(iteration),
        controllers=dict(state.controllers),
    )
