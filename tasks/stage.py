"""What makes a stage durable.

A stage file holds a spec and a function; the decorators `rows` and `update` turn the function into a Prefect task
that reads committed data, computes, and commits. A stage that has committed is never computed again: the task then
ends in a state named `Cached`. What is committed but depends on something else than it would now stops the run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from prefect.client.schemas.objects import State
from prefect.states import Completed

from infra.clock import now
from infra.driver import Driver
from infra.lanes import Output
from infra.manifest import Manifest
from infra.progress import report
from infra.records import Assigned, RunState, Shard, ShardRef, Skip, Stage, Weights
from infra.workers.ray_group import GroupLost
from infra.workers.worker import Call, Compute, Context, Rows, Stale, Update, Updated
from rlhf.config_view import ConfigView
from rlhf.errors import NotFinite
from tasks.fingerprint import check_shard, committed_manifest, fingerprint_of, weights_of
from tasks.recording import recorded_task
from tasks.restore import bring
from tasks.spec import UPDATES, StageSpec

TRIES = 3
"""Workers are brought to what a call needs; another lane may bring them to something else before it comes."""

COMPUTES: dict[str, Callable[[Context], Any]] = {}


@dataclass(frozen=True)
class ByName:
    """What a stage computes, in a form that can be sent to another process."""

    module: str
    stage: str

    @classmethod
    def of(cls, spec: StageSpec, function: Callable[[Context], Any]) -> ByName:
        COMPUTES[spec.name] = function
        return cls(function.__module__, spec.name)

    def __call__(self, context: Context) -> Any:
        importlib.import_module(self.module)
        return COMPUTES[self.stage](context)


class StageTask(Protocol):
    """A stage as flows call it: it is started, and goes on as what it reads is committed; `finish` waits for all.
    None stands for a stage that the config leaves out; `after` and `ahead` are for generations ahead of their turn."""

    def __call__(
        self, iteration: int, *inputs: Output | None, after: Output | None = None, ahead: bool = False
    ) -> Output: ...


Summary = Callable[[list[dict[str, Any]]], dict[str, float]]
"""From the small outputs of every shard to the stage's metrics."""

Until = Callable[[int], Callable[[Manifest], bool] | None]
"""For an iteration: nothing, or a function that is given what is committed after each shard, and says whether that is
enough."""


def single_shard_metrics(outputs: list[dict[str, Any]]) -> dict[str, float]:
    metrics: dict[str, float] = outputs[-1].get("metrics", {})
    return metrics


def rows(
    spec: StageSpec,
    count: Callable[[Driver], int] | None = None,
    summary: Summary = single_shard_metrics,
    until: Until = lambda iteration: None,
) -> Callable[[Compute], RowsStage]:
    """A stage that writes rows; each shard is committed as soon as it is written.

    There are as many shards as the first input has; a stage that reads no other stage says how many with `count`, and
    may end before with `until`.
    """

    def decorate(compute: Compute) -> RowsStage:
        ROWS[spec.name] = RowsStage(spec, ByName.of(spec, compute), count, summary, until)
        return ROWS[spec.name]

    return decorate


def finish() -> None:
    """Wait for every stage that was started; raises the first error."""
    driver = Driver.current()
    driver.lanes.join(meanwhile=driver.tidy)


def update(spec: StageSpec) -> Callable[[Update], StageTask]:
    """A stage that moves its role's weights to the next version, and returns metrics."""

    def decorate(function: Update) -> StageTask:
        assert spec.role is not None and not spec.sharded
        compute = ByName.of(spec, function)
        UPDATES[spec.role] = (spec, compute)
        return _as_task(spec, lambda iteration, inputs, output: _run_update(spec, compute, iteration, inputs))

    return decorate


def skip_update(role: str, iteration: int, reason: str, *, not_finite: bool = False, cursor: int | None = None) -> None:
    """Commit that a role's weights pass through this iteration unchanged."""
    driver = Driver.current()
    spec, _ = UPDATES[role]
    if driver.store.committed_stage(iteration, spec.name) is None:
        before = driver.state.weights[role]
        after = Weights(version=before.version + 1, digest=before.digest)
        driver.store.commit(
            Skip(
                iteration=iteration,
                stage=spec.name,
                role=role,
                weights=after,
                reason=reason,
                not_finite=not_finite,
                cursor=cursor,
            )
        )
        group = driver.groups.of(role)
        with suppress(GroupLost):  # then its weights are loaded when they are needed
            if group.call("holds", role, before):  # else, in the middle of its steps: it is loaded anew
                group.call("pass_through", role, after)


def skip_what_is_left(iteration: int, error: NotFinite) -> None:
    """With `train.on_nan: skip`, no role learns from here on in this iteration; else raises the error."""
    driver = Driver.current()
    if driver.config.train.on_nan == "stop":
        raise error
    report("note", text=f"iteration {iteration} goes on without what depends on it: {error}")
    drawn = driver.store.committed_stage(iteration, "generate")
    beyond = driver.state.cursor + driver.config.most_prompts if drawn is None else None  # or the same come again
    for role in driver.config.trained:
        skip_update(role, iteration, str(error), not_finite=True, cursor=beyond)
        beyond = None  # once, whichever driver comes to the next role


def check_not_given_up(iteration: int) -> None:
    """Raise what a driver before this one gave up the iteration for: it does not begin to learn again half-way."""
    if reason := is_given_up(iteration):
        raise NotFinite(reason)


def is_given_up(iteration: int) -> str | None:
    """Why, if it is."""
    stages = Driver.current().store.iteration_state(iteration).stages.values()
    return next((each.reason for each in stages if isinstance(each, Skip) and each.not_finite), None)


ROWS: dict[str, RowsStage] = {}
"""Every stage that writes rows, by name."""


def _as_task(
    spec: StageSpec, run: Callable[[int, tuple[Output, ...], Output], tuple[Manifest | None, bool]]
) -> StageTask:
    @recorded_task(spec.name)
    def stage_task(iteration: int, inputs: tuple[Output, ...], output: Output) -> Any:
        manifest, committed_before = run(iteration, inputs, output)
        return Completed(name="Cached", data=manifest, message="committed before") if committed_before else manifest

    def start(iteration: int, *inputs: Output | None, after: Output | None = None, ahead: bool = False) -> Output:
        driver = Driver.current()
        reads = tuple(each for each in inputs if each is not None)

        def job(output: Output) -> Any:
            if after is not None:
                after.manifest()
            for each in reads:
                if spec.reads_shard_of(each):
                    each.shard(0)
                else:
                    each.manifest()
            result: Any = stage_task(iteration, reads, output)
            return result.result() if isinstance(result, State) else result

        return driver.lanes.start(driver.groups.lane_of(spec.role), spec.name, job, ahead)

    return start


@dataclass(frozen=True)
class RowsStage:
    spec: StageSpec
    compute: Compute
    count: Callable[[Driver], int] | None
    summary: Summary
    until: Until

    def __call__(
        self, iteration: int, *inputs: Output | None, after: Output | None = None, ahead: bool = False
    ) -> Output:
        return self._task(iteration, *inputs, after=after, ahead=ahead)

    @cached_property
    def _task(self) -> StageTask:
        return _as_task(self.spec, self._run)

    def shard(self, iteration: int, inputs: tuple[Output, ...], shard: int, attempt: int) -> tuple[Shard, bool]:
        """One shard, and whether it was committed before; if not, it is computed now, and the caller commits it."""
        driver, spec = Driver.current(), self.spec
        view = spec.view(driver.config)
        if (before := driver.store.committed_shards(spec.name, iteration).get(shard)) is not None:
            check_shard(driver, spec, before, fingerprint_of(driver, spec, view, iteration, inputs, shard))
            return before, True
        result: Rows | None = None
        while result is None:
            driver.stopping.check()
            with driver.rollout.turn if spec.role == "rollout" else nullcontext():
                assign(driver, spec, iteration, shard)
                call = call_of(driver, spec, view, iteration, inputs, attempt, shard)
                result = on_worker(driver, "rows", call, self.compute)
        found = Shard(
            iteration=iteration,
            stage=spec.name,
            shard=shard,
            epoch=driver.epoch,
            data=_written(result),
            fingerprint=fingerprint_of(driver, spec, view, iteration, inputs, shard).digest,
            seconds=result.seconds,
            outputs=result.outputs,
        )
        return found, False

    def _run(self, iteration: int, inputs: tuple[Output, ...], output: Output) -> tuple[Manifest, bool]:
        driver, spec = Driver.current(), self.spec
        store = driver.store
        most = 1 if not spec.sharded else self.count(driver) if self.count else inputs[0].count()
        if store.committed_stage(iteration, spec.name) is not None:
            fingerprint = fingerprint_of(driver, spec, spec.view(driver.config), iteration, inputs)
            before = committed_manifest(driver, spec, iteration, fingerprint)
            assert before is not None
            report("stage", iteration=iteration, stage=spec.name, done=most, total=most, metrics=None)
            return before, True

        attempt, began = store.begin_attempt(iteration, spec.name), now()
        enough = self.until(iteration)
        if enough is None:
            output.expect(most)
        done: list[Shard] = []
        uncommitted: list[Shard] = []
        while len(done) < most:
            report("stage", iteration=iteration, stage=spec.name, done=len(done), total=most, metrics=None)
            output.check()
            found, was_committed = self.shard(iteration, inputs, len(done), attempt)
            done.append(found)
            uncommitted = [] if was_committed else [found]
            if uncommitted and (enough is not None or len(done) < most):
                store.commit(*uncommitted)
                uncommitted = []
            if enough is None and not uncommitted:
                output.show([shard.data for shard in done])
            if enough is not None and enough(self._manifest(driver, iteration, inputs, attempt, began, done)):
                break

        manifest = self._manifest(driver, iteration, inputs, attempt, began, done)
        outputs = done[-1].outputs
        stage = Stage(
            iteration=iteration,
            stage=spec.name,
            manifest=store.write_manifest(manifest),
            fingerprint=manifest.fingerprint.digest,
            cursor=outputs.get("cursor"),
            controllers=outputs.get("controllers"),
        )
        store.commit(*uncommitted, stage)  # the last shard and its stage: one record
        report("stage", iteration=iteration, stage=spec.name, done=most, total=most, metrics=manifest.metrics)
        return manifest, False

    def _manifest(
        self,
        driver: Driver,
        iteration: int,
        inputs: tuple[Output, ...],
        attempt: int,
        began: float,
        shards: list[Shard],
    ) -> Manifest:
        view = self.spec.view(driver.config)
        return Manifest(
            iteration=iteration,
            stage=self.spec.name,
            epoch=driver.epoch,
            attempt=attempt,
            fingerprint=fingerprint_of(driver, self.spec, view, iteration, inputs),
            config=view.values(),
            columns=("trajectory_id", *self.spec.writes),
            shards=tuple(shard.data for shard in shards),
            metrics=self.summary([shard.outputs for shard in shards]),
            seconds=sum(shard.seconds for shard in shards),
            began=began,
            ended=now(),
        )


def _run_update(
    spec: StageSpec, compute: Update, iteration: int, inputs: tuple[Output, ...]
) -> tuple[Manifest | None, bool]:
    driver = Driver.current()
    store, view = driver.store, spec.view(driver.config)
    assert spec.role is not None
    if isinstance(skipped := store.committed_stage(iteration, spec.name), Skip) and skipped.not_finite:
        return None, True
    fingerprint = fingerprint_of(driver, spec, view, iteration, inputs)
    if (before := committed_manifest(driver, spec, iteration, fingerprint)) is not None:
        report("stage", iteration=iteration, stage=spec.name, done=1, total=1, metrics=None)
        return before, True

    attempt, began = store.begin_attempt(iteration, spec.name), now()
    report("stage", iteration=iteration, stage=spec.name, done=0, total=1, metrics=None)
    driver.stopping.check()
    call = call_of(driver, spec, view, iteration, inputs, attempt, 0)
    try:
        updated: Updated = on_worker(driver, "update", call, compute)
    except NotFinite as error:
        if driver.config.train.on_nan == "stop":
            raise
        report("note", text=f"{spec.name} of iteration {iteration} is skipped: {error}")
        skip_update(spec.role, iteration, str(error), not_finite=True)
        return None, False
    manifest = Manifest(
        iteration=iteration,
        stage=spec.name,
        epoch=driver.epoch,
        attempt=attempt,
        fingerprint=fingerprint,
        config=view.values(),
        role=spec.role,
        weights=updated.weights,
        metrics=updated.metrics,
        seconds=updated.seconds,
        began=began,
        ended=now(),
    )
    store.commit(
        Stage(
            iteration=iteration,
            stage=spec.name,
            manifest=store.write_manifest(manifest),
            fingerprint=fingerprint.digest,
            role=spec.role,
            weights=updated.weights,
        )
    )
    report("stage", iteration=iteration, stage=spec.name, done=1, total=1, metrics=updated.metrics)
    return manifest, False


def assign(driver: Driver, spec: StageSpec, iteration: int, shard: int) -> None:
    """Commit what weights a shard is generated with, before it is, where that does not follow from its iteration."""
    holds = driver.rollout.holds
    state = driver.store.iteration_state(iteration)
    if spec.name == "generate" and holds is not None and state.assigned.get(shard) != holds:
        driver.store.commit(Assigned(iteration=iteration, shard=shard, weights=holds))


def _written(result: Rows) -> ShardRef:
    assert result.shard is not None, "rank 0 answers"
    return result.shard


def on_worker(driver: Driver, method: str, call: Call, function: Compute | Update) -> Any:
    """Call the worker; one that does not hold the weights is first brought to them."""
    group = driver.groups.of(call.role)
    for _ in range(TRIES):
        try:
            return group.call(method, call, function)
        except GroupLost:
            driver.store.log.check_claim()  # whoever takes the run over may end its workers, too
            raise
        except Stale:
            assert call.role is not None and call.weights is not None
            bring(driver, call.role, call.weights)
    raise GroupLost(f"the workers of the {call.role} do not keep the weights that {call.stage} asks for")


def call_of(
    driver: Driver,
    spec: StageSpec,
    view: ConfigView,
    iteration: int,
    inputs: tuple[Output, ...],
    attempt: int,
    shard: int,
    began: RunState | None = None,
) -> Call:
    """What a worker is asked; `began` is the state in which the iteration began, where it is not the open one."""
    state = driver.state if began is None else began
    return Call(
        epoch=driver.epoch,
        stage=spec.name,
        iteration=iteration,
        shard=shard,
        attempt=attempt,
        config=view,
        inputs=spec.inputs(inputs, shard),
        writes=spec.writes,
        role=spec.role,
        weights=weights_of(driver, spec, iteration, shard),
        cursor=state.cursor_before(iteration),
        controllers=dict(state.controllers),
    )
