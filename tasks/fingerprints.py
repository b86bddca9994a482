"""Fingerprints stages, and checks that committed stages are valid under the current config, data and code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.execution.outside import Outside
from ratchet.infra.store.manifest import Fingerprint, Manifest
from ratchet.infra.store.records import Ahead, RunState, Skip, Weights
from ratchet.rlhf.config import RunConfig, stored_config
from ratchet.rlhf.errors import UserError, counted, reached
from ratchet.tasks.experience_replay import check_experience
from ratchet.tasks.pipeline import STAGES, all_stages, names_of, stage_named
from ratchet.tasks.stage import Stage, UpdateStage
from ratchet.tasks.stages.generate import GenerateSummary


def weights_for(driver: Driver, stage: Stage, iteration: int, shard: int = 0) -> Weights | None:
    """Returns the weights that a shard is computed with, for an update those before it; None without a versioned
    model.
    """
    if stage.weights_role is None:
        return None
    state = driver.store.iteration_state(iteration)
    if stage.name == "generate" and shard in state.assigned:
        return state.assigned[shard]
    return state.starting[stage.weights_role]


def fingerprint_of(driver: Driver, stage: Stage, iteration: int, inputs: Mapping[str, StageHandle]) -> Fingerprint:
    """Returns everything that a stage depends on except its config. Its inputs must be committed."""
    parts: dict[str, Any] = {"stage": stage.name, "version": stage.version, "iteration": iteration}
    if isinstance(stage, UpdateStage) and driver.config.run.deterministic:
        # read by `restore.explained`: only then must a replay on a GPU give the same bits
        parts["deterministic"] = True
    parts |= {f"input.{name}": handle.manifest().digest for name, handle in inputs.items()}
    if stage.weights_role is not None:
        parts[f"weights.{stage.weights_role}"] = _digests_of_weights(driver, stage, iteration)
    parts |= {source: digest for source in stage.outside if (digest := driver.outside.digest(source)) is not None}
    return Fingerprint(parts=parts)


def _digests_of_weights(driver: Driver, stage: Stage, iteration: int) -> str | list[str] | None:
    """Returns the digest of the weights of a stage; a list if its shards have different ones."""
    assigned = driver.store.iteration_state(iteration).assigned if stage.name == "generate" else {}
    if not assigned:
        weights = weights_for(driver, stage, iteration)
        return None if weights is None else weights.digest
    digests = list(dict.fromkeys(assigned[number].digest for number in sorted(assigned)))
    return digests[0] if len(digests) == 1 else digests


def changes_since(driver: Driver, stage: Stage, manifest: Manifest) -> list[str]:
    """Describes the changes of code, data and config since a stage was committed."""
    if stage.name == "generate" and driver.config.only_scores:  # another run's, whatever this config says
        return []
    then = manifest.fingerprint.parts
    changes: list[str] = stage.config.differences(manifest.config, driver.config)
    return changes + _outside_changes(driver, stage, then, changes) + _of_version(then["version"], stage)


def input_changes(manifest: Manifest, config: RunConfig) -> list[str]:
    """Describes the differences between the inputs of a committed stage and its inputs under `config`."""
    then = {name.removeprefix("input.") for name in manifest.fingerprint.parts if name.startswith("input.")}
    return _of_inputs(then, set(stage_named(manifest.stage, config).input_names(names_of(config))))


NAMED_BY: Mapping[Outside, str] = {
    "reward": "reward.function",
    "environment": "rollout.environment.name",
    "loss": "algorithm.loss",
    "advantage": "algorithm.advantage",
}
"""Keys that name an input's code: another name implies other code, so the change of code is not reported too."""


def _outside_changes(driver: Driver, stage: Stage, then: Mapping[str, Any], of_config: Sequence[str]) -> list[str]:
    renamed = {source for source, key in NAMED_BY.items() if any(change.startswith(key) for change in of_config)}
    changed = (source for source in stage.outside if then.get(source) != driver.outside.digest(source))
    return [f"{_in_words(source, driver.config)} changed" for source in changed if source not in renamed]


def _in_words(source: Outside, config: RunConfig) -> str:
    """Names an outside input of stages to the user, by the key and the files that it comes from."""
    reward, environment = config.reward, config.rollout.environment
    match source:
        case "dataset":
            return f"the prompts in data.train ({', '.join(config.data.train)})"
        case "experts":
            replay = config.data.replay
            named = "null" if replay is None or replay.files is None else ", ".join(replay.files)
            return f"the answers in data.replay.files ({named})"
        case "validation":
            return f"the prompts in validation.data ({config.validation.data or 'null'})"
        case "reward":
            names = [*reward.functions, *([reward.model.path] if reward.model is not None else [])]
            return f"the code or model of the reward ({', '.join(names)})"
        case "reward_model":
            return f"the files of reward.model ({'null' if reward.model is None else reward.model.path})"
        case "environment":
            return f"the code of rollout.environment ({'null' if environment is None else environment.name})"
        case "loss":
            return f"the code of algorithm.loss ({config.algorithm.loss.type})"
        case "advantage":
            return f"the code of algorithm.advantage ({config.algorithm.advantage.type})"
        case "tokenizer":
            return f"the tokenizer or chat template of model.path ({config.model.path})"


OTHER_CODE = "Ratchet's code for this stage"


def _of_version(before: int, stage: Stage) -> list[str]:
    if before == stage.version:
        return []
    if stage not in STAGES:
        return [f"the code of the stage {stage.name} in run.stages changed"]
    return [f"{OTHER_CODE} changed (version {before} -> {stage.version})"]


def _of_inputs(then: set[str], now: set[str]) -> list[str]:
    new, gone = sorted(now - then), sorted(then - now)
    return [f"it would read {name}" for name in new] + [f"it would not read {name}" for name in gone]


def check_open_iteration(driver: Driver) -> None:
    """Checks, before a claim, that the open iteration and those ahead of it are valid under the driver's config.

    Raises `UserError` if a change of config, data or code invalidates a committed stage or shard, if the runs of
    `data.replay` do not fit, or if the run has more iterations than the config asks for.
    """
    done, config = driver.state.iteration, driver.config
    # the claim would record this config for a run that it trained nothing of
    if done > config.iterations:
        has = reached(done, config.iterations)
        raise UserError(f"run {config.run.name} has {has}: set train.iterations={done + 1} or more to continue it")
    check_experience(driver)
    places: dict[int, RunState | Ahead] = {driver.state.iteration: driver.state, **driver.state.ahead}
    for iteration, place in places.items():
        _check_staleness(driver, iteration, place)
        by_stage: dict[str, list[str]] = {}
        for name, committed in place.stages.items():
            if not isinstance(committed, Skip):
                manifest = driver.store.manifest(committed)
                by_stage[name] = changes_since(driver, stage_named(name, driver.config), manifest)
                by_stage[name] += input_changes(manifest, driver.config)
        for name in place.shards.keys() - place.stages.keys():
            terms = {shard.term for shard in place.shards[name].values()}
            stage = stage_named(name, driver.config)
            by_stage[name] = [change for term in sorted(terms) for change in changes_since_term(driver, stage, term)]
        invalid = [stage.name for stage in all_stages(driver.config) if by_stage.get(stage.name)]
        if invalid:
            changes = dict.fromkeys(change for name in invalid for change in by_stage[name])
            raise changed(driver, invalid[0], iteration, list(changes))


def changes_since_term(driver: Driver, stage: Stage, term: int) -> list[str]:
    """Describes the changes since the claim of a driver that worked on a stage, whose inputs and weights are fixed."""
    claim = driver.store.log.claim_of(term)
    config = stored_config(claim.config, "the claim")
    changes: list[str] = stage.config.differences(stage.config.values(config), driver.config)
    changes += _of_inputs(set(stage.input_names(names_of(config))), set(stage.input_names(names_of(driver.config))))
    changes += _outside_changes(driver, stage, claim.outside, changes)
    return changes + _of_version(claim.versions.get(stage.name, stage.version), stage)


def _check_staleness(driver: Driver, iteration: int, place: RunState | Ahead) -> None:
    """Refuses to train on generations that are more updates behind than the config allows."""
    if "update_actor" in place.stages:
        return
    allowed = driver.config.rollout.ahead
    for number, shard in place.shards.get("generate", {}).items():
        oldest = GenerateSummary.model_validate(shard.outputs).oldest_version
        lacks = iteration - oldest if number in place.assigned and oldest is not None else 0
        if lacks > allowed:
            raise UserError(
                f"iteration {iteration} was generated with weights that will lag by {counted(lacks, 'update')}, but "
                f"rollout.mode {driver.config.rollout.mode} allows {allowed}: raise rollout.max_staleness again, or "
                "discard the generations with "
                f"`ratchet fork {driver.config.run.name} --at {driver.state.iteration} --run NEW`"
            )


def check_unchanged(driver: Driver, stage: Stage, manifest: Manifest) -> None:
    """Raises `UserError` if config, data or code have changed since a stage was committed."""
    if changes := changes_since(driver, stage, manifest):
        raise changed(driver, stage.name, manifest.iteration, changes)


def changed(driver: Driver, stage: str, iteration: int, changes: list[str]) -> UserError:
    """Returns the error for a committed stage that is not valid any more."""
    opened = driver.state.iteration  # a fork drops the iterations ahead of the open one
    at = f"{iteration}:{stage}" if iteration <= opened else f"{opened}:update_actor"
    run = driver.store.url.rpartition("/")[2]  # for a fork, the name of its parent
    reason, remedy = "what it depends on has changed", "undo the change to continue, or start"
    if any(change.startswith(OTHER_CODE) for change in changes):
        reason, remedy = "an older release computed it differently", "start"
    return UserError(
        f"{stage} of iteration {iteration} is committed, but {reason} ({'; '.join(changes)}): {remedy} from here "
        f"with `ratchet fork {run} --at {at} --run NEW`"
    )
