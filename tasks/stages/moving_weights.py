"""update_reference and update_ema: move a role's weights toward the actor's."""

from __future__ import annotations

from ratchet.infra.workers.calls import Context
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.stage_config import StageConfig, key
from ratchet.tasks.stage import UpdateStage
from ratchet.tasks.stages.update_actor import UPDATE_ACTOR


class UpdateReferenceConfig(StageConfig):
    sync_every: int = key("reference.sync_every")
    mix: float = key("reference.mix")


class UpdateEMAConfig(StageConfig):
    decay: float = key("actor.ema_decay")


def update_reference(context: Context[UpdateReferenceConfig]) -> dict[str, float]:
    """reference <- mix * actor + (1 - mix) * reference (TR-DPO, arXiv 2404.09656); returns no metrics."""
    context.follow_actor(context.config.mix)
    return {}


def update_ema(context: Context[UpdateEMAConfig]) -> dict[str, float]:
    """ema <- decay * ema + (1 - decay) * actor; returns no metrics."""
    context.follow_actor(1 - context.config.decay)
    return {}


def reference_exists(config: RunConfig) -> bool:
    return "reference" in config.averages


def ema_exists(config: RunConfig) -> bool:
    return "ema" in config.averages


def reference_skipped(config: RunConfig, iteration: int) -> str | None:
    if config.syncs_reference(iteration):
        return UPDATE_ACTOR.skipped(config, iteration)
    return f"the reference follows every {config.reference.sync_every} iterations"


UPDATE_REFERENCE = UpdateStage(
    name="update_reference",
    label="sync",
    config=UpdateReferenceConfig,
    exists=reference_exists,
    reads={"update_actor": ()},
    compute=update_reference,
    skipped=reference_skipped,
    role="reference",
    follows="actor",
)

UPDATE_EMA = UpdateStage(
    name="update_ema",
    label="ema",
    config=UpdateEMAConfig,
    exists=ema_exists,
    reads={"update_actor": ()},
    compute=update_ema,
    skipped=UPDATE_ACTOR.skipped,
    role="ema",
    follows="actor",
)
