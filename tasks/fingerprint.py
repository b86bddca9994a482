"""What a stage depends on, and what happens when a committed one depends on something else than it would now."""

from __future__ import annotations

from typing import Any

from infra.driver import Driver
from infra.lanes import Output
from infra.manifest import Fingerprint, Manifest
from infra.records import Shard, Skip, Stage, Weights
from infra.workers.worker import WEIGHTS_OF
from rlhf.config import parse_config
from rlhf.config_view import ConfigView
from rlhf.errors import UserError
from tasks.spec import SPECS, StageSpec


def weights_of(driver: Driver, spec: StageSpec, iteration: int) -> Weights | None:
    """The weights that a stage of this iteration works with; for an update, those before it."""
    if spec.role is None:
        return None
    return driver.store.iteration_state(iteration).starting[WEIGHTS_OF.get(spec.role, spec.role)]


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
    if (found := weights_of(driver, spec, iteration)) is not None:
        assert spec.role is not None
        parts[f"weights.{WEIGHTS_OF.get(spec.role, spec.role)}"] = found.digest
    for what in spec.digests:
        parts[what] = driver.digest(what)
    return Fingerprint(parts=parts)


def check_open_iteration(driver: Driver) -> None:
    """Before a claim: refuse a config under which what the open iteration has committed would not be what it is."""
    state = driver.state
    for name, stage in state.stages.items():
        if isinstance(stage, Stage):
            check_config(driver, SPECS[name], driver.store.manifest(stage))
    for name in state.shards.keys() - state.stages.keys():
        for shard in state.shards[name].values():
            if differences := _config_differences(driver, SPECS[name], shard):
                raise _changed(driver, SPECS[name], state.iteration, differences)


def check_config(driver: Driver, spec: StageSpec, manifest: Manifest) -> None:
    """Refuse a config, data or code with which a committed stage would not be what it is."""
    if differences := outside_differences(driver, spec, manifest):
        raise _changed(driver, spec, manifest.iteration, differences)


def outside_differences(driver: Driver, spec: StageSpec, manifest: Manifest) -> list[str]:
    """What has changed, outside the store, since a stage was committed."""
    before = _outside(spec, manifest.fingerprint.parts)
    now = _config_parts(spec, spec.view(driver.config)) | {what: driver.digest(what) for what in spec.digests}
    return Fingerprint(parts=before).differences(Fingerprint(parts=now))


def _outside(spec: StageSpec, parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a fingerprint that come from outside the store: config, and digests of data and code."""
    return {name: value for name, value in parts.items() if name.startswith("config.") or name in spec.digests}


def _config_differences(driver: Driver, spec: StageSpec, shard: Shard) -> list[str]:
    """What in the stage's config has changed since the driver that committed a shard."""
    then = parse_config(driver.store.log.claim_of(shard.epoch).config, "the claim")
    before, after = (Fingerprint(parts=_config_parts(spec, spec.view(config))) for config in (then, driver.config))
    return before.differences(after)


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
    return UserError(
        f"{spec.name} of iteration {iteration} is committed, but what it depends on has changed ("
        f"{'; '.join(differences)}): undo the change to go on, or start from here with "
        f"`ratchet fork {driver.config.run.name} --at {iteration}:{spec.name} --run NEW`"
    )
