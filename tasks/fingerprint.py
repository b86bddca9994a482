"""What a stage depends on, and what happens when a committed one depends on something else than it would now."""

from __future__ import annotations

from typing import Any

from infra.driver import Driver
from infra.lanes import Output
from infra.manifest import Fingerprint, Manifest
from infra.records import Ahead, RunState, Shard, Skip, Stage, Weights
from infra.workers.worker import WEIGHTS_OF
from rlhf.config import RunConfig, stored_config
from rlhf.config_view import ConfigView
from rlhf.errors import UserError
from tasks.spec import SPECS, StageSpec

UNVERSIONED = {"reward"}
"""Roles whose model belongs to no run: a digest tells it, as it tells a reward's code, and a fork may have another."""


def weights_of(driver: Driver, spec: StageSpec, iteration: int, shard: int = 0) -> Weights | None:
    """The weights that a shard of this iteration works with; for an update, those before it."""
    if spec.role is None or spec.role in UNVERSIONED:
        return None
    state = driver.store.iteration_state(iteration)
    if spec.name == "generate" and shard in state.assigned:
        return state.assigned[shard]
    return state.starting[WEIGHTS_OF.get(spec.role, spec.role)]


def _digests_of_weights(driver: Driver, spec: StageSpec, iteration: int, shard: int | None) -> str | list[str] | None:
    """Of what a shard works with, or all shards of a stage."""
    assigned = driver.store.iteration_state(iteration).assigned if spec.name == "generate" else {}
    if shard is not None or not assigned:
        found = weights_of(driver, spec, iteration, shard or 0)
        return None if found is None else found.digest
    digests = list(dict.fromkeys(assigned[number].digest for number in sorted(assigned)))
    return digests[0] if len(digests) == 1 else digests


def fingerprint_of(
    driver: Driver,
    spec: StageSpec,
    view: ConfigView,
    iteration: int,
    inputs: tuple[Output, ...],
    shard: int | None = None,
) -> Fingerprint:
    """Of a stage, or of one of its shards, which depends on the same shard of each input."""
    parts: dict[str, Any] = {"stage": spec.name, "version": spec.version, "iteration": iteration}
    parts |= _config_parts(spec, view)
    for output in inputs:
        assert output.stage in spec.reads, f"{spec.name} does not read {output.stage}"
        if shard is not None and spec.reads_shard_of(output):
            parts[f"input.{output.stage}"] = output.shard(shard).sha256
        else:
            parts[f"input.{output.stage}"] = output.manifest().digest
    if spec.role is not None and spec.role not in UNVERSIONED:
        name = f"weights.{WEIGHTS_OF.get(spec.role, spec.role)}"
        parts[name] = _digests_of_weights(driver, spec, iteration, shard)
    parts |= _digests(driver, spec)
    return Fingerprint(parts=parts)


def check_open_iteration(driver: Driver) -> None:
    """Before a claim: refuse a config under which what is committed of the open iteration, or ahead of it, would not be
    what it is."""
    places: dict[int, RunState | Ahead] = {driver.state.iteration: driver.state, **driver.state.ahead}
    for iteration, begun in places.items():
        _check_staleness(driver, iteration, begun)
        for name, stage in begun.stages.items():
            if isinstance(stage, Stage):
                manifest = driver.store.manifest(stage)
                check_config(driver, SPECS[name], manifest)
                if differences := input_differences(manifest, driver.config):
                    raise _changed(driver, SPECS[name], iteration, differences)
        for name in begun.shards.keys() - begun.stages.keys():
            for shard in begun.shards[name].values():
                if differences := _config_differences(driver, SPECS[name], shard):
                    raise _changed(driver, SPECS[name], iteration, differences)


def input_differences(manifest: Manifest, config: RunConfig) -> list[str]:
    """Between the stages that a committed one has read, and those that it would read now."""
    then = {name.removeprefix("input.") for name in manifest.fingerprint.parts if name.startswith("input.")}
    return _of_inputs(then, _inputs(SPECS[manifest.stage], config))


def _inputs(spec: StageSpec, config: RunConfig) -> set[str]:
    return {name for name in spec.reads if name in config.stages}


def _of_inputs(then: set[str], now: set[str]) -> list[str]:
    new, gone = sorted(now - then), sorted(then - now)
    return [f"it would read {name}" for name in new] + [f"it would not read {name}" for name in gone]


def _check_staleness(driver: Driver, iteration: int, begun: RunState | Ahead) -> None:
    """Refuse to train on what is older than the config says."""
    if "update_actor" in begun.stages:
        return
    most = driver.config.rollout.ahead
    for number, shard in begun.shards.get("generate", {}).items():
        lacks = iteration - shard.outputs.get("oldest_version", iteration) if number in begun.assigned else 0
        if lacks > most:
            raise UserError(
                f"generate of iteration {iteration} is committed with weights that will lack {lacks} updates, and "
                f"rollout.mode {driver.config.rollout.mode} allows {most}: raise rollout.max_staleness again, or leave "
                f"it behind with `ratchet fork {driver.config.run.name} --at {driver.state.iteration} --run NEW`"
            )


def check_config(driver: Driver, spec: StageSpec, manifest: Manifest) -> None:
    """Refuse a config, data or code with which a committed stage would not be what it is."""
    if differences := outside_differences(driver, spec, manifest):
        raise _changed(driver, spec, manifest.iteration, differences)


def outside_differences(driver: Driver, spec: StageSpec, manifest: Manifest) -> list[str]:
    """What has changed, outside the store, since a stage was committed."""
    before = _outside(spec, manifest.fingerprint.parts)
    now = {"version": spec.version} | _config_parts(spec, spec.view(driver.config)) | _digests(driver, spec)
    return Fingerprint(parts=before).differences(Fingerprint(parts=now))


def _outside(spec: StageSpec, parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a fingerprint that come from outside the store: the stage's own version, config, and digests of data
    and code."""
    outside = ("version", *spec.digests)
    return {name: value for name, value in parts.items() if name.startswith("config.") or name in outside}


def _digests(driver: Driver, spec: StageSpec) -> dict[str, str]:
    """Of what a stage reads outside the store, if the config has it."""
    digests = {what: driver.digest(what) for what in spec.digests}
    return {what: digest for what, digest in digests.items() if digest is not None}


def _config_differences(driver: Driver, spec: StageSpec, shard: Shard) -> list[str]:
    """What in the stage's config has changed since the driver that committed a shard."""
    then = stored_config(driver.store.log.claim_of(shard.epoch).config, "the claim")
    before, after = (Fingerprint(parts=_config_parts(spec, spec.view(config))) for config in (then, driver.config))
    return before.differences(after) + _of_inputs(_inputs(spec, then), _inputs(spec, driver.config))


def _config_parts(spec: StageSpec, view: ConfigView) -> dict[str, Any]:
    return {f"config.{key}": value for key, value in view.chosen(spec.config_keys).items()}


def committed_manifest(driver: Driver, spec: StageSpec, iteration: int, now: Fingerprint) -> Manifest | None:
    """The stage's manifest if it is committed; refuses to go on if it depended on something else."""
    committed = driver.store.committed_stage(iteration, spec.name)
    if committed is None:
        return None
    if isinstance(committed, Skip):
        raise _changed(driver, spec, iteration, [f"it was skipped: {committed.reason}"])
    manifest = driver.store.manifest(committed)
    if committed.fingerprint != now.digest:
        raise _changed(driver, spec, iteration, manifest.fingerprint.differences(now))
    return manifest


def check_shard(driver: Driver, spec: StageSpec, committed: Shard, now: Fingerprint) -> None:
    if committed.fingerprint == now.digest:
        return
    differences = _config_differences(driver, spec, committed)
    raise _changed(
        driver, spec, committed.iteration, differences or [f"one of {', '.join(spec.digests) or 'its inputs'}"]
    )


def _changed(driver: Driver, spec: StageSpec, iteration: int, differences: list[str]) -> UserError:
    opened = driver.state.iteration  # a fork leaves behind what is ahead of it
    at = f"{iteration}:{spec.name}" if iteration <= opened else f"{opened}:update_actor"
    run = driver.store.url.rpartition("/")[2]  # of a fork, the run that it would come from
    what, why = "what it depends on has changed", "undo the change to go on, or start"
    if any(difference.startswith("version: ") for difference in differences):
        what, why = "an older release computed it otherwise than this one does", "start"
    return UserError(
        f"{spec.name} of iteration {iteration} is committed, but {what} ({'; '.join(differences)}): {why} from here "
        f"with `ratchet fork {run} --at {at} --run NEW`"
    )
