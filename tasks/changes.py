"""What a committed stage depended on, and what of it has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.execution.driver import Driver
from infra.execution.executors import StageHandle
from infra.store.manifest import Fingerprint, Manifest
from infra.store.records import Ahead, RunState, ShardCommit, Skip, Weights
from infra.workers.worker import WEIGHTS_OF
from rlhf.config import RunConfig, stored_config
from rlhf.errors import UserError
from tasks.pipeline import names_of, stage_named
from tasks.stage import Stage

UNVERSIONED = {"reward"}
"""Roles whose model belongs to no run: a digest tells it, as it tells a reward's code, and a fork may have another."""


def weights_for(driver: Driver, stage: Stage, iteration: int, shard: int = 0) -> Weights | None:
    """The weights that a shard of this iteration works with; for an update, those before it."""
    if stage.role is None or stage.role in UNVERSIONED:
        return None
    state = driver.store.iteration_state(iteration)
    if stage.name == "generate" and shard in state.assigned:
        return state.assigned[shard]
    return state.starting[WEIGHTS_OF.get(stage.role, stage.role)]


def fingerprint_of(driver: Driver, stage: Stage, iteration: int, inputs: Mapping[str, StageHandle]) -> Fingerprint:
    """What a stage depends on besides its config, once all of its inputs are committed."""
    parts: dict[str, Any] = {"stage": stage.name, "version": stage.version, "iteration": iteration}
    parts |= {f"input.{name}": handle.manifest().digest for name, handle in inputs.items()}
    if stage.role is not None and stage.role not in UNVERSIONED:
        parts[f"weights.{WEIGHTS_OF.get(stage.role, stage.role)}"] = _digests_of_weights(driver, stage, iteration)
    parts |= {what: digest for what in stage.outside if (digest := driver.digest(what)) is not None}
    return Fingerprint(parts=parts)


def _digests_of_weights(driver: Driver, stage: Stage, iteration: int) -> str | list[str] | None:
    """Of what the shards of a stage work with."""
    assigned = driver.store.iteration_state(iteration).assigned if stage.name == "generate" else {}
    if not assigned:
        weights = weights_for(driver, stage, iteration)
        return None if weights is None else weights.digest
    digests = list(dict.fromkeys(assigned[number].digest for number in sorted(assigned)))
    return digests[0] if len(digests) == 1 else digests


def changes_since(driver: Driver, stage: Stage, manifest: Manifest) -> list[str]:
    """What has changed, outside the store, since a stage was committed: code, data, config."""
    then = manifest.fingerprint.parts
    before = then.get("version", 1)
    changes = [] if before == stage.version else [f"version: {before} -> {stage.version}"]
    changes += _outside_changes(driver, stage, then)
    changes += stage.config.differences(manifest.config, driver.config)
    return changes


def input_changes(manifest: Manifest, config: RunConfig) -> list[str]:
    """Between the stages that a committed one has read, and those that it would read now."""
    then = {name.removeprefix("input.") for name in manifest.fingerprint.parts if name.startswith("input.")}
    return _of_inputs(then, set(stage_named(manifest.stage).input_names(names_of(config))))


def _outside_changes(driver: Driver, stage: Stage, then: Mapping[str, Any]) -> list[str]:
    before_and_after = ((what, then.get(what), driver.digest(what)) for what in stage.outside)
    return [
        f"{what}: {before or 'none'} -> {after or 'none'}"
        for what, before, after in before_and_after
        if before != after
    ]


def _of_inputs(then: set[str], now: set[str]) -> list[str]:
    new, gone = sorted(now - then), sorted(then - now)
    return [f"it would read {name}" for name in new] + [f"it would not read {name}" for name in gone]


def check_open_iteration(driver: Driver) -> None:
    """Before a claim: refuse a config, data or code under which what is committed of the open iteration, or ahead of
    it, would not be what it is."""
    places: dict[int, RunState | Ahead] = {driver.state.iteration: driver.state, **driver.state.ahead}
    for iteration, begun in places.items():
        _check_staleness(driver, iteration, begun)
        for name, committed in begun.stages.items():
            if not isinstance(committed, Skip):
                manifest = driver.store.manifest(committed)
                check_unchanged(driver, stage_named(name), manifest)
                if changes := input_changes(manifest, driver.config):
                    raise changed(driver, name, iteration, changes)
        for name in begun.shards.keys() - begun.stages.keys():
            for shard in begun.shards[name].values():
                if changes := _shard_changes(driver, stage_named(name), shard):
                    raise changed(driver, name, iteration, changes)


def _shard_changes(driver: Driver, stage: Stage, shard: ShardCommit) -> list[str]:
    """What has changed since the driver that committed a shard claimed the run; its inputs and weights cannot."""
    claim = driver.store.log.claim_of(shard.term)
    config = stored_config(claim.config, "the claim")
    changes: list[str] = stage.config.differences(stage.config.values(config), driver.config)
    changes += _of_inputs(set(stage.input_names(names_of(config))), set(stage.input_names(names_of(driver.config))))
    if claim.versions:  # else an older release claimed, and did not say
        before = claim.versions.get(stage.name, stage.version)
        changes += [] if before == stage.version else [f"version: {before} -> {stage.version}"]
        changes += _outside_changes(driver, stage, claim.outside)
    return changes


def _check_staleness(driver: Driver, iteration: int, begun: RunState | Ahead) -> None:
    """Refuse to train on what is older than the config says."""
    if "update_actor" in begun.stages:
        return
    allowed = driver.config.rollout.ahead
    for number, shard in begun.shards.get("generate", {}).items():
        oldest = shard.outputs.get("oldest_version", iteration)
        lacks = iteration - oldest if number in begun.assigned and isinstance(oldest, int) else 0
        if lacks > allowed:
            raise UserError(
                f"generate of iteration {iteration} is committed with weights that will lack {lacks} updates, and "
                f"rollout.mode {driver.config.rollout.mode} allows {allowed}: raise rollout.max_staleness again, or "
                f"leave it behind with `ratchet fork {driver.config.run.name} --at {driver.state.iteration} --run NEW`"
            )


def check_unchanged(driver: Driver, stage: Stage, manifest: Manifest) -> None:
    """Refuse a config, data or code with which a committed stage would not be what it is."""
    if changes := changes_since(driver, stage, manifest):
        raise changed(driver, stage.name, manifest.iteration, changes)


def changed(driver: Driver, stage: str, iteration: int, changes: list[str]) -> UserError:
    """A stage is committed, and is not what it would be now."""
    opened = driver.state.iteration  # a fork leaves behind what is ahead of it
    at = f"{iteration}:{stage}" if iteration <= opened else f"{opened}:update_actor"
    run = driver.store.url.rpartition("/")[2]  # of a fork, the run that it would come from
    what, why = "what it depends on has changed", "undo the change to go on, or start"
    if any(change.startswith("version: ") for change in changes):
        what, why = "an older release computed it otherwise than this one does", "start"
    return UserError(
        f"{stage} of iteration {iteration} is committed, but {what} ({'; '.join(changes)}): {why} from here "
        f"with `ratchet fork {run} --at {at} --run NEW`"
    )
