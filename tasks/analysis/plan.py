"""Predicts which stages would run again under a changed config, and where a fork must start to share the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ratchet.infra.execution.claims import check_store, run_url
from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.epochs import with_iterations
from ratchet.infra.execution.preflight.inputs import check_inputs
from ratchet.infra.execution.preflight.run import other_averages
from ratchet.infra.runs.forks import fork
from ratchet.infra.runs.run import Run
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Skip, StageCommit
from ratchet.rlhf import consent
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.tasks.fingerprints import changes_since, check_unchanged, input_changes
from ratchet.tasks.pipeline import all_stages, names_of, stage_called, stages_of
from ratchet.tasks.stage import UpdateStage
from ratchet.tasks.stages.validate import VALIDATE


@dataclass(frozen=True)
class Planned:
    """The validity of a stage under another config."""

    stage: str
    keeps: bool
    why: tuple[str, ...]
    """The changes, and the inputs that run again."""


def plan(run: Run, config: RunConfig, iteration: int) -> list[Planned]:
    """Compares the stages of an iteration, those committed and those that the config has, with a changed config.

    Raises `UserError` if there is no consent to the run's code.
    """
    run.config.require_own("cannot say what would run again")
    consent.require(run.config, config)
    driver = Driver(config, run.store)
    committed, needed = run.store.iteration_state(iteration).stages, names_of(config)
    planned: dict[str, Planned] = {}
    for stage in all_stages(config):
        commit = committed.get(stage.name)
        if commit is None and (stage.name not in needed or stage is VALIDATE):
            continue
        if commit is None:
            why = ["not committed"]
        elif stage.name not in needed and stage is not VALIDATE:
            why = ["the config has no such stage"]
        elif isinstance(commit, Skip):
            is_still_skipped = isinstance(stage, UpdateStage) and stage.skipped(config, iteration) is not None
            stays = is_still_skipped or (commit.not_finite and config.train.on_nan == "skip")
            why = [] if stays else [f"it was skipped: {commit.reason}"]
        else:
            manifest = run.store.manifest(commit)
            why = changes_since(driver, stage, manifest) + input_changes(manifest, config)
            why += [f"reads {name}" for name in stage.reads if name in planned and not planned[name].keeps]
        planned[stage.name] = Planned(stage.name, not why, tuple(why))
    return list(planned.values())


def first_changed(planned: Iterable[Planned]) -> str | None:
    """Returns the first committed stage that does not stay valid; None if all do.

    A validation only counts if nothing else changes: no stage reads it, and a fork leaves an invalid one out.
    """
    changed = [entry.stage for entry in planned if not entry.keeps and entry.why != ("not committed",)]
    return next((stage for stage in changed if stage != VALIDATE.name), changed[0] if changed else None)


def latest_point(run: Run, config: RunConfig, iteration: int) -> tuple[int, str | None]:
    """Returns the latest point in an iteration at which a fork may start: the first stage that depends on a difference.

    With None as the stage, the fork shares no stage of the iteration.
    """
    committed = run.store.iteration_state(iteration).stages
    if "generate" not in committed:
        return iteration, None
    first = first_changed(plan(run, config, iteration))
    if first is None:  # nothing that the iteration computed depends on the settings
        first = next(reversed([name for name in committed if isinstance(committed[name], StageCommit)]))
    return iteration, first


def fork_run(run: Run, config: RunConfig, iteration: int, stage: str | None) -> None:
    """Makes the run that `config` names a fork of `run` that shares everything committed before a point.

    Args:
        iteration: The iteration in which the fork starts; it shares all earlier ones.
        stage: The first stage of that iteration that the fork computes itself, by any of its names, together with its
            dependents; the other stages are shared. None: the fork shares no stage of that iteration.

    Raises:
        UserError: The run has not reached the point, a shared stage is not valid under the config, or there is no
            consent to the run's code.
    """
    if config.data.generations is None or not config.only_scores:
        run.config.require_own("cannot fork it")
    consent.require(run.config, config)
    state, config = run.state, with_iterations(config)
    if not 0 <= iteration <= state.iteration:
        raise UserError(f"--at {iteration}: the run has iterations 0 to {state.iteration} (the open one)")
    if mistakes := other_averages(run.config, config, iteration):
        raise UserError("\n".join(mistakes))
    shared: list[str] = []
    if stage is not None:
        names = [candidate.name for candidate in all_stages(config)]
        if (called := stage_called(stage, config)) is None:
            raise UserError(f"--at {iteration}:{stage}: stages are {', '.join(names)}")
        stage = called.name
        committed = run.store.iteration_state(iteration).stages
        recomputed = dependents(stage, config) | _misfits(run, config, iteration)
        shared = [name for name in names if name in committed and name not in recomputed]
        if stage not in ("validate", "generate") and "generate" not in committed:
            raise UserError(f"--at {iteration}:{stage}: iteration {iteration} has not committed generate yet")
        driver = Driver(config, run.store)
        for candidate in all_stages(config):
            if candidate.name in shared and isinstance(commit := committed[candidate.name], StageCommit):
                manifest = run.store.manifest(commit)
                if candidate is VALIDATE and changes_since(driver, candidate, manifest):
                    shared.remove(candidate.name)  # no stage reads it: the fork validates again
                else:
                    check_unchanged(driver, candidate, manifest)
    child = ObjectStore(run_url(config.run.store, config.run.name))
    check_inputs(config)
    check_store(child, config)
    at = str(iteration) if stage is None else f"{iteration}:{stage}"
    fork(run.store, child, config.model_dump(mode="json"), iteration, shared, at)


def _misfits(run: Run, config: RunConfig, iteration: int) -> set[str]:
    """Returns the committed stages that the config lacks or gives different inputs, with their dependents."""
    misfits: set[str] = set()
    for name, stage in run.store.iteration_state(iteration).stages.items():
        if name == "validate" or not isinstance(stage, StageCommit):
            continue
        if name not in names_of(config) or input_changes(run.store.manifest(stage), config):
            misfits |= dependents(name, config)
    return misfits


def dependents(stage: str, config: RunConfig) -> set[str]:
    """Returns a stage and all stages that depend on it, directly or not."""
    names = {stage}
    # one pass is enough: a stage follows its inputs in the pipeline
    for reader in stages_of(config):
        if names & set(reader.reads):
            names.add(reader.name)
    return names
