"""What an iteration is: its stages, in order. Everything that asks which stages there are asks here: the flow, plan,
fork, replay, explain, status, the checks of a resume, and the docs."""

from __future__ import annotations

from infra.execution.driver import Dependencies
from rlhf.config import RunConfig
from tasks.advantages import ADVANTAGES
from tasks.filter_groups import FILTER_GROUPS
from tasks.generate import GENERATE
from tasks.greedy_baseline import GREEDY_BASELINE
from tasks.old_log_probs import OLD_LOG_PROBS
from tasks.ref_log_probs import REF_LOG_PROBS
from tasks.reward_model import REWARD_MODEL
from tasks.score import SCORE
from tasks.stage import AnyUpdateStage, Stage, UpdateStage
from tasks.update_actor import UPDATE_ACTOR
from tasks.update_critic import UPDATE_CRITIC
from tasks.validate import VALIDATE
from tasks.values import VALUES

STAGES: tuple[Stage, ...] = (
    VALIDATE,
    GENERATE,
    REWARD_MODEL,
    SCORE,
    FILTER_GROUPS,
    GREEDY_BASELINE,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    VALUES,
    ADVANTAGES,
    UPDATE_CRITIC,
    UPDATE_ACTOR,
)


def stage_named(name: str) -> Stage:
    return next(stage for stage in STAGES if stage.name == name)


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    """The stages that iterations under this config have, in order. A validation is not made in all of them."""
    return tuple(stage for stage in STAGES if stage.exists(config))


def names_of(config: RunConfig) -> tuple[str, ...]:
    return tuple(stage.name for stage in stages_of(config))


def update_of(role: str) -> AnyUpdateStage | None:
    """The stage that moves a role's weights, if there is one."""
    return next((stage for stage in STAGES if isinstance(stage, UpdateStage) and stage.role == role), None)


def dependencies(config: RunConfig) -> Dependencies:
    """What the stages of a config depend on, besides config and inputs."""
    return Dependencies(
        stages=tuple(stage.name for stage in STAGES),
        outside=frozenset(what for stage in stages_of(config) for what in stage.outside),
        versions={stage.name: stage.version for stage in STAGES},
    )
