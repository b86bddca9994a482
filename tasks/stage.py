"""What makes a stage durable.

A stage file holds a spec and a function; the decorators `rows` and `update` turn the function into a Prefect task
that reads committed data, computes, and commits. A stage that has committed is never computed again: the task then
ends in a state named `Cached`. What is committed but depends on something else than it would now stops the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed
from prefect.tasks import Task

from infra.driver import Driver
from infra.manifest import Manifest
from infra.objects import StoreUnavailable
from infra.progress import report
from infra.records import Shard, ShardRef, Skip, Stage, Weights
from infra.store import MAX_ATTEMPTS
from infra.workers.worker import Call, Compute, Rows, Stale, Update, Updated
from rlhf.config_view import ConfigView
from tasks.fingerprint import check_shard, committed_manifest, fingerprint_of, weights_of
from tasks.restore import restore
from tasks.spec import SPECS, UPDATES, StageSpec


def can_pass(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Only what may pass is tried again: a store that did not answer. Never a bad config, reward or loss."""
    return isinstance(state.result(raise_on_failure=False), StoreUnavailable)


RETRIES: dict[str, Any] = {"retries": 3, "retry_delay_seconds": [1, 5, 20], "retry_condition_fn": can_pass}
assert RETRIES["retries"] < MAX_ATTEMPTS


class StageTask(Protocol):
    """A stage as flows call it: manifests in, a manifest out; None stands for a stage that the config leaves out."""

    def __call__(self, iteration: int, *inputs: Manifest | None) -> Manifest: ...


Summary = Callable[[list[dict[str, Any]]], dict[str, float]]
"""From the small outputs of every shard to the stage's metrics."""


def single_shard_metrics(outputs: list[dict[str, Any]]) -> dict[str, float]:
    metrics: dict[str, float] = outputs[-1].get("metrics", {})
    return metrics


def rows(
    spec: StageSpec, count: Callable[[Driver], int] | None = None, summary: Summary = single_shard_metrics
) -> Callable[[Compute], StageTask]:
    """A stage that writes rows; each shard is committed as soon as it is written.

    There are as many shards as the first input has; a stage that reads no other stage says how many with `count`.
    """

    def decorate(compute: Compute) -> StageTask:
        def run(iteration: int, inputs: tuple[Manifest, ...]) -> tuple[Manifest, bool]:
            shards = 1 if not spec.sharded else count(Driver.current()) if count else len(inputs[0].shards)
            return _run_rows(spec, compute, shards, summary, iteration, inputs)

        return _as_task(spec, run)

    return decorate


def update(spec: StageSpec) -> Callable[[Update], StageTask]:
    """A stage that moves its role's weights to the next version, and returns metrics."""

    def decorate(compute: Update) -> StageTask:
        assert spec.role is not None and not spec.sharded
        UPDATES[spec.role] = (spec, compute)
        return _as_task(spec, lambda iteration, inputs: _run_update(spec, compute, iteration, inputs))

    return decorate


def skip_update(role: str, iteration: int, reason: str) -> None:
    """Commit that a role's weights pass through this iteration unchanged."""
    driver = Driver.current()
    spec, _ = UPDATES[role]
    if driver.store.committed_stage(iteration, spec.name) is None:
        before = driver.state.weights[role]
        after = Weights(version=before.version + 1, digest=before.digest)
        driver.store.commit(Skip(iteration=iteration, stage=spec.name, role=role, weights=after, reason=reason))
        if driver.group.call("holds", role, before):
            driver.group.call("pass_through", role, after)


def _as_task(spec: StageSpec, run: Callable[[int, tuple[Manifest, ...]], tuple[Manifest, bool]]) -> StageTask:
    SPECS[spec.name] = spec

    @task(
        name=spec.name,
        task_run_name=f"it {{iteration}} · {spec.name}",
        **RETRIES,
        persist_result=False,
        cache_policy=NO_CACHE,
    )
    def stage_task(iteration: int, inputs: tuple[Manifest, ...]) -> Any:
        manifest, committed_before = run(iteration, inputs)
        return Completed(name="Cached", data=manifest, message="committed before") if committed_before else manifest

    def call(iteration: int, *inputs: Manifest | None) -> Manifest:
        result: Any = stage_task(iteration, tuple(manifest for manifest in inputs if manifest is not None))
        return result.result() if isinstance(result, State) else result  # type: ignore[no-any-return]

    return call


def _run_rows(
    spec: StageSpec,
    compute: Compute,
    shards: int,
    summary: Summary,
    iteration: int,
    inputs: tuple[Manifest, ...],
) -> tuple[Manifest, bool]:
    driver = Driver.current()
    store, view = driver.store, spec.view(driver.config)
    fingerprint = fingerprint_of(driver, spec, view, iteration, inputs)
    if (before := committed_manifest(driver, spec, iteration, fingerprint)) is not None:
        report("stage", iteration=iteration, stage=spec.name, done=shards, total=shards, metrics=None)
        return before, True

    attempt = store.begin_attempt(iteration, spec.name)
    kept = dict(store.committed_shards(spec.name))
    latest: list[Shard] = []
    for shard in range(shards):
        report("stage", iteration=iteration, stage=spec.name, done=shard, total=shards, metrics=None)
        parts = fingerprint_of(driver, spec, view, iteration, inputs, shard) if spec.sharded else fingerprint
        if shard in kept:
            check_shard(driver, spec, kept[shard], parts)
            continue
        driver.check_stop()
        call = _call(driver, spec, view, iteration, inputs, attempt, shard)
        result: Rows = _on_worker(driver, "rows", call, compute)
        kept[shard] = Shard(
            iteration=iteration,
            stage=spec.name,
            shard=shard,
            epoch=driver.epoch,
            data=result.shard,
            fingerprint=parts.digest,
            seconds=result.seconds,
            outputs=result.outputs,
        )
        latest = [kept[shard]]
        if shard < shards - 1:
            store.commit(*latest)
            latest = []

    everything = [kept[shard] for shard in range(shards)]
    outputs = everything[-1].outputs
    manifest = Manifest(
        iteration=iteration,
        stage=spec.name,
        epoch=driver.epoch,
        attempt=attempt,
        fingerprint=fingerprint,
        config=view.values(),
        columns=("trajectory_id", *spec.writes),
        shards=tuple(shard.data for shard in everything),
        metrics=summary([shard.outputs for shard in everything]),
        seconds=sum(shard.seconds for shard in everything),
    )
    stage = Stage(
        iteration=iteration,
        stage=spec.name,
        manifest=store.write_manifest(manifest),
        fingerprint=fingerprint.digest,
        cursor=outputs.get("cursor"),
        controllers=outputs.get("controllers"),
    )
    store.commit(*latest, stage)  # the last shard and its stage: one record
    report("stage", iteration=iteration, stage=spec.name, done=shards, total=shards, metrics=manifest.metrics)
    return manifest, False


def _run_update(
    spec: StageSpec, compute: Update, iteration: int, inputs: tuple[Manifest, ...]
) -> tuple[Manifest, bool]:
    driver = Driver.current()
    store, view = driver.store, spec.view(driver.config)
    assert spec.role is not None
    fingerprint = fingerprint_of(driver, spec, view, iteration, inputs)
    if (before := committed_manifest(driver, spec, iteration, fingerprint)) is not None:
        report("stage", iteration=iteration, stage=spec.name, done=1, total=1, metrics=None)
        return before, True

    attempt = store.begin_attempt(iteration, spec.name)
    report("stage", iteration=iteration, stage=spec.name, done=0, total=1, metrics=None)
    driver.check_stop()
    call = _call(driver, spec, view, iteration, inputs, attempt, 0)
    updated: Updated = _on_worker(driver, "update", call, compute)
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


def _on_worker(driver: Driver, method: str, call: Call, function: Compute | Update) -> Any:
    """Call the worker; one that does not hold the weights is first brought to them."""
    try:
        return driver.group.call(method, call, function)
    except Stale as stale:
        assert call.weights is not None
        restore(driver, str(stale), call.weights)
        return driver.group.call(method, call, function)


def _call(
    driver: Driver,
    spec: StageSpec,
    view: ConfigView,
    iteration: int,
    inputs: tuple[Manifest, ...],
    attempt: int,
    shard: int,
) -> Call:
    def shards_of(manifest: Manifest) -> tuple[ShardRef, ...]:
        return (manifest.shards[shard],) if spec.sharded else manifest.shards

    return Call(
        epoch=driver.epoch,
        stage=spec.name,
        iteration=iteration,
        shard=shard,
        attempt=attempt,
        config=view,
        inputs=tuple((shards_of(manifest), spec.reads[manifest.stage]) for manifest in inputs),
        writes=spec.writes,
        role=spec.role,
        weights=weights_of(driver, spec, iteration),
        cursor=driver.state.cursor,
        controllers=dict(driver.state.controllers),
    )
