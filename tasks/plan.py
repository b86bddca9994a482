"""What a changed config would run again, and where a fork has to begin so that the rest is shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infra.execution.claims import check_store, run_url
from infra.execution.driver import Driver, check_inputs
from infra.forks import fork
from infra.runs import Run
from infra.store.object_store import ObjectStore
from infra.store.records import Skip, StageCommit
from rlhf.config import RunConfig
from rlhf.errors import UserError
from tasks.changes import changes_since, check_unchanged, input_changes
from tasks.pipeline import STAGES, names_of, stages_of
from tasks.stage import UpdateStage
from tasks.validate import VALIDATE


@dataclass(frozen=True)
class Planned:
    """A stage of an iteration, under another config."""

    stage: str
    keeps: bool
    why: tuple[str, ...]
    """What has changed, or which stage that it reads runs again."""


def plan(run: Run, config: RunConfig, iteration: int) -> list[Planned]:
    """For each stage that an iteration has committed, or would have, whether it stays what it is."""
    driver = Driver(config, run.store)
    committed, needed = run.store.iteration_state(iteration).stages, names_of(config)
    planned: dict[str, Planned] = {}
    for stage in STAGES:
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
    """Where a fork has to begin: the first stage that does not stay, though it is committed."""
    return next((one.stage for one in planned if not one.keeps and one.why != ("not committed",)), None)


def fork_run(run: Run, config: RunConfig, iteration: int, stage: str | None) -> None:
    """Make the run that `config` names a fork of `run`, which shares what is committed before the point.

    Of the iteration itself it shares the stages that depend neither on `stage` nor on what depends on it; none, if
    `stage` is None. Raises `UserError` for a point that the run has not reached, and for a config under which a
    shared stage would not be what it is.
    """
    state = run.state
    if not 0 <= iteration <= state.iteration:
        raise UserError(f"--at {iteration}: the run has iterations 0 to {state.iteration} (the open one)")
    shared: list[str] = []
    if stage is not None:
        names = [each.name for each in STAGES]
        if stage not in names:
            raise UserError(f"--at {iteration}:{stage}: stages are {', '.join(names)}")
        committed = run.store.iteration_state(iteration).stages
        left = dependents(stage, config) | _misfits(run, config, iteration)
        shared = [name for name in names if name in committed and name not in left]
        if stage not in ("validate", "generate") and "generate" not in committed:
            raise UserError(f"--at {iteration}:{stage}: iteration {iteration} has not committed generate yet")
        driver = Driver(config, run.store)
        for each in STAGES:
            if each.name in shared and isinstance(commit := committed[each.name], StageCommit):
                check_unchanged(driver, each, run.store.manifest(commit))
    child = ObjectStore(run_url(config.run.store, config.run.name))
    check_inputs(config)
    check_store(child, config)
    at = str(iteration) if stage is None else f"{iteration}:{stage}"
    fork(run.store, child, config.model_dump(mode="json"), iteration, shared, at)


def _misfits(run: Run, config: RunConfig, iteration: int) -> set[str]:
    """Committed stages that the config does not have, or lets read other stages than they did; and what reads them."""
    found: set[str] = set()
    for name, stage in run.store.iteration_state(iteration).stages.items():
        if name == "validate" or not isinstance(stage, StageCommit):
            continue
        if name not in names_of(config) or input_changes(run.store.manifest(stage), config):
            found |= dependents(name, config)
    return found


def dependents(stage: str, config: RunConfig) -> set[str]:
    """A stage, and every stage of the config that reads it, or one that does."""
    found = {stage}
    for reader in stages_of(config):
        if found & set(reader.reads):
            found.add(reader.name)
    return found
