"""update_critic: runs PPO epochs of the value loss over shuffled mini-batches of the iteration's trajectories."""

from __future__ import annotations

from pydantic import JsonValue

from ratchet.infra.workers.calls import Context
from ratchet.rlhf.algorithms.objectives import CriticObjective
from ratchet.rlhf.config import ModelConfig, RunConfig
from ratchet.rlhf.config.sections import UpdateConfig
from ratchet.rlhf.schema import READ
from ratchet.rlhf.stage_config import StageConfig, key, section
from ratchet.tasks.optimizer_steps import optimizer_steps, updated
from ratchet.tasks.stage import UpdateStage


class UpdateCriticConfig(StageConfig):
    seed: int = key("run.seed")
    dtype: str = key("model.dtype")
    critic_model: ModelConfig | None = key("critic.model")
    cliprange_value: float | None = key("critic.cliprange_value")
    trainer: UpdateConfig = section("critic")
    # the loaded engine has them
    engine_args: dict[str, JsonValue] | None = key("critic.engine.args")


def update_critic(context: Context[UpdateCriticConfig]) -> dict[str, float]:
    config = context.config
    objective = CriticObjective(cliprange_value=config.cliprange_value)
    plan = optimizer_steps(context, config.trainer, config.seed, temperature=1.0)
    return updated(context, context.batch, objective, plan)


def exists(config: RunConfig) -> bool:
    return config.train.updates and config.needs_critic


UPDATE_CRITIC = UpdateStage(
    name="update_critic",
    label="critic",
    config=UpdateCriticConfig,
    exists=exists,
    reads={
        "generate": READ,
        "select": (),
        "advantages": ("returns", "loss_mask"),
        "values": ("values",),
    },
    compute=update_critic,
    role="critic",
)
