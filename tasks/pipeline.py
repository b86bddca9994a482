"""The stages of an iteration, in order.

The flow, plan, fork, reproduce, explain, status, the checks of a resume, and the docs take the stages from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeVar

from ratchet.infra.execution.driver import Dependencies
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.metrics import timer
from ratchet.tasks.stage import AnyUpdateStage, Stage, UpdateStage
from ratchet.tasks.stages.advantages import ADVANTAGES
from ratchet.tasks.stages.generate import GENERATE
from ratchet.tasks.stages.greedy_baseline import GREEDY_BASELINE
from ratchet.tasks.stages.moving_weights import UPDATE_EMA, UPDATE_REFERENCE
from ratchet.tasks.stages.old_log_probs import OLD_LOG_PROBS
from ratchet.tasks.stages.ref_log_probs import REF_LOG_PROBS
from ratchet.tasks.stages.reward_model import REWARD_MODEL
from ratchet.tasks.stages.score import SCORE
from ratchet.tasks.stages.select import FILTER_GROUPS
from ratchet.tasks.stages.teacher_log_probs import TEACHER_LOG_PROBS
from ratchet.tasks.stages.turn_values import TURN_VALUES
from ratchet.tasks.stages.update_actor import UPDATE_ACTOR
from ratchet.tasks.stages.update_critic import UPDATE_CRITIC
from ratchet.tasks.stages.validate import VALIDATE
from ratchet.tasks.stages.values import VALUES
from ratchet.tasks.user_stages import load_stage

T = TypeVar("T")

STAGES: tuple[Stage, ...] = (
    VALIDATE,
    GENERATE,
    REWARD_MODEL,
    SCORE,
    FILTER_GROUPS,
    GREEDY_BASELINE,
    TURN_VALUES,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    TEACHER_LOG_PROBS,
    VALUES,
    ADVANTAGES,
    UPDATE_CRITIC,
    UPDATE_ACTOR,
    UPDATE_REFERENCE,
    UPDATE_EMA,
)


@cache
def _with_stages(names: tuple[str, ...]) -> tuple[Stage, ...]:
    """Returns `STAGES` with stages of the user's code, each after those that it reads."""
    stages = list(STAGES)
    for name in names:
        stage = load_stage(name, stages)
        last = max(index for index, known in enumerate(stages) if known.name in stage.reads)
        stages.insert(last + 1, stage)
    return tuple(stages)


def all_stages(config: RunConfig) -> tuple[Stage, ...]:
    """Returns the built-in stages and those of `run.stages`, in order, whether or not iterations have them. Raises
    UserError if the user's code does not define such a stage."""
    return _with_stages(config.run.stages)


def stage_named(name: str, config: RunConfig) -> Stage:
    """Returns the stage with this name. Raises `UserError` if there is none: the run was computed with another
    installation, or with another `run.stages`.
    """
    for stage in all_stages(config):
        if stage.name == name:
            return stage
    raise UserError(
        f"the open iteration has a committed stage {name}, which neither run.stages nor this release has: name it in "
        "run.stages again, or continue with the installation that computed it"
    )


def stage_called(name: str, config: RunConfig) -> Stage | None:
    """Returns the stage with one of the three names that users meet: in the store, in `ratchet status`, or in
    `timing_s/`."""
    stages = all_stages(config)
    names = ((stage, (stage.name, stage.label, timer(stage.name).removeprefix("timing_s/"))) for stage in stages)
    return next((stage for stage, known in names if name in known), None)


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    """Returns the stages of an iteration under this config, in order. `validate` runs only in some iterations."""
    return tuple(stage for stage in all_stages(config) if stage.exists(config))


def names_of(config: RunConfig) -> tuple[str, ...]:
    return tuple(stage.name for stage in stages_of(config))


def shown_stages(config: RunConfig, recorded: Iterable[str], committed: Iterable[str]) -> dict[str, str]:
    """Returns the short names of a stored run's stages, by name, in order. Imports no code of the user's.

    Args:
        recorded: the names of all stages in the run's newest claim; empty: there are none of the user's.
        committed: the names of the stages that are committed: all that is known of another trainer's run.
    """
    built_in = {stage.name: stage for stage in STAGES}
    if config.observed is not None:
        return in_order({name: built_in[name].label if name in built_in else name for name in committed})
    return {
        name: built_in[name].label if name in built_in else name
        for name in (tuple(recorded) or built_in)
        if name not in built_in or built_in[name].exists(config)
    }


def in_order(by_stage: Mapping[str, T]) -> dict[str, T]:
    """Sorts values by stage name into the order of the pipeline; stages are committed in any order."""
    names = [stage.name for stage in STAGES if stage.name in by_stage]
    return {name: by_stage[name] for name in dict.fromkeys((*names, *by_stage))}


def update_of(role: str) -> AnyUpdateStage | None:
    """Returns the stage that updates a role's weights; None for a role that is not trained."""
    return next((stage for stage in STAGES if isinstance(stage, UpdateStage) and stage.role == role), None)


def dependencies(config: RunConfig) -> Dependencies:
    """Returns the versions of all stages, and the outside inputs of the stages that the config has."""
    stages = all_stages(config)
    return Dependencies(
        stages=tuple(stage.name for stage in stages),
        outside=frozenset(source for stage in stages_of(config) for source in stage.outside),
        versions={stage.name: stage.version for stage in stages},
    )
