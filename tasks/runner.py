"""Runs stages: what is read is awaited, a worker computes, and what it gives is committed.

A stage that has committed is never computed again: its Prefect task then ends in a state named `Cached`.
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
"""Workers are brought to what a call needs; another executor may bring them to something else before it comes."""

Handles = Mapping[str, StageHandle]
"""Of the stages that a stage reads, by name."""


def start(
    driver: Driver,
    stage: Stage,
    iteration: int,
    handles: Handles,
    *,
    after: StageHandle | None = None,
    ahead: bool = False,
) -> StageHandle:
    """Start a stage, which goes on as what it reads is committed; `finish` waits for all.

    Args:
        driver: of the run.
        stage: one of the pipeline's.
        iteration: of which it is.
        handles: of the stages that the iteration has; it reads those that it names.
        after: a stage that has to end first, for generations ahead of their turn.
        ahead: whether it is such a generation.
    """
    inputs = stage.inputs_of(handles)

    def job(handle: StageHandle) -> Manifest | None:
        if after is not None:
            after.manifest()
        for name, read in inputs.items():
            if stage.reads_shard_of(name):
                read.shard(0)
            else:
                read.manifest()
        run = partial(_run, driver, stage, iteration, inputs, handle)
        result = _stage_task(stage.name)(driver, iteration, run)
        return result.result() if isinstance(result, State) else result

    return driver.executors.start(driver.groups.executor_of(stage.role), stage.name, job, ahead)


StageTask = Callable[[Driver, int, Callable[[], tuple[Manifest | None, bool]]], Manifest | State[Manifest] | None]


@cache
def _stage_task(name: str) -> StageTask:
    """The Prefect task of a stage; it is given what to do."""

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
    """The stage's manifest, None if it was skipped; and whether it was committed before."""
    if isinstance(stage, RowsStage):
        return _run_rows(driver, stage, iteration, inputs, handle)
    return _run_update(driver, stage, iteration, inputs)


def finish(driver: Driver) -> None:
    """Wait for every stage that was started; raises the first error."""
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
    store.commit(*uncommitted, commit)  # the last shard and its stage: one record
    report(StageProgress(iteration=iteration, stage=stage.name, done=total, total=total, metrics=manifest.metrics))
    return manifest, False


def _shards(driver: Driver, stage: RowsStage[C, S], inputs: Handles) -> int:
    """How many a stage has; the most, for one that goes on until there are enough."""
    if not stage.sharded:
        return 1
    return stage.count(driver) if stage.count is not None else next(iter(inputs.values())).count()


def _shard(
    driver: Driver, stage: RowsStage[C, S], iteration: int, inputs: Handles, shard: int, attempt: int
) -> tuple[ShardCommit, bool]:
    """One shard, and whether it was committed before; if not, it is computed now, and the caller commits it."""
    if (before := driver.store.committed_shards(stage.name, iteration).get(shard)) is not None:
        return before, True
    rows: Rows[S] | None = None
    while rows is None:
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


def _computed(driver: Driver, stage: RowsStage[C, S], call: Call[C]) -> Rows[S] | None:
    asked = RowsCall(call, stage.compute, stage.writes)
    return on_worker(driver, call, lambda group: group.call(Worker.rows, asked))


def _assign(driver: Driver, stage: RowsStage[C, S], iteration: int, shard: int) -> None:
    """Commit what weights a shard is generated with, before it is, where that does not follow from its iteration."""
    holds = driver.rollout.holds
    state = driver.store.iteration_state(iteration)
    if stage.name == "generate" and holds is not None and state.assigned.get(shard) != holds:
        driver.store.commit(Assigned(iteration=iteration, shard=shard, weights=holds))


def _until(driver: Driver, stage: RowsStage[C, S], iteration: int) -> Callable[[list[ShardCommit]], bool] | None:
    """For a stage that goes on until there is enough: whether its shards so far are."""
    until, store = stage.until, driver.store
    if until is None or not until.applies(driver.config):
        return None
    following = [other for other in stages_of(driver.config) if other.name in until.follow]
    attempts = {other.name: store.begin_attempt(iteration, other.name) for other in following}

    def enough(done: list[ShardCommit]) -> bool:
        handles = {stage.name: StageHandle.so_far(stage.name, [shard.data for shard in done])}
        scored: list[ShardCommit] = []
        for other in following:
            assert isinstance(other, RowsStage)
            inputs = other.inputs_of(handles)
            shard, was_committed = _shard(driver, other, iteration, inputs, len(done) - 1, attempts[other.name])
            if not was_committed:
                store.commit(shard)
            committed = store.committed_shards(other.name, iteration)  # a driver that died may have left later ones
            scored = [committed[number] for number in range(len(done))]
            handles[other.name] = StageHandle.so_far(other.name, [shard.data for shard in scored])
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
    asked = UpdateCall(call, stage.compute)
    try:
        updated = on_worker(driver, call, lambda group: group.call(Worker.update, asked))
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
    """Commit that a role's weights pass through this iteration unchanged."""
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
    with suppress(GroupLost):  # then its weights are loaded when they are needed
        if group.call(Worker.has_weights, stage.role, before):  # else, in the middle of its steps: it is loaded anew
            group.call(Worker.mark_as_version, stage.role, after)


def skip_what_is_left(driver: Driver, iteration: int, error: NotFinite) -> None:
    """With `train.on_nan: skip`, no role learns from here on in this iteration; else raises the error."""
    if driver.config.train.on_nan == "stop":
        raise error
    note(f"iteration {iteration} goes on without what depends on it: {error}")
    drawn = driver.store.committed_stage(iteration, "generate")
    beyond = driver.state.cursor + driver.config.max_prompts if drawn is None else None  # or the same come again
    for role in driver.config.trained:
        if (stage := update_of(role)) is not None:
            skip_update(driver, stage, iteration, str(error), not_finite=True, cursor=beyond)
            beyond = None  # once, whichever driver comes to the next role


def check_not_given_up(driver: Driver, iteration: int) -> None:
    """Raise what a driver before this one gave up the iteration for: it does not begin to learn again half-way."""
    if reason := is_given_up(driver, iteration):
        raise NotFinite(reason)


def is_given_up(driver: Driver, iteration: int) -> str | None:
    """Why, if it is."""
    stages = driver.store.iteration_state(iteration).stages.values()
    return next((commit.reason for commit in stages if isinstance(commit, Skip) and commit.not_finite), None)


# Asking workers.


def on_worker(driver: Driver, call: Call[C], ask: Callable[[WorkerGroup], R]) -> R:
    """Ask the workers of a call's role; if they do not hold its weights, they are first brought to them."""
    group = driver.groups.of(call.role)
    for _ in range(TRIES):
        try:
            return ask(group)
        except GroupLost:
            driver.store.log.check_claim()  # whoever takes the run over may end its workers, too
            raise
        except WrongPolicyVersion:
            assert call.role is not None and call.weights is not None
            ensure_weights(driver, call.role, call.weights)
    raise GroupLost(f"the workers of the {call.role} do not keep the weights that {call.stage} asks for")


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
    """What a worker is asked.

    Args:
        driver: of the run.
        stage: that is computed,
        iteration: of which it is,
        inputs: what it reads,
        shard: and which shard of it; 0 for an update.
        attempt: names what is written.
        config: None: what the run's config says.
        began: the state in which the iteration began, where it is not the open one.
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
