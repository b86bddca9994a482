"""update_critic: the value loss, over shuffled mini-batches of the iteration's trajectories."""

from __future__ import annotations

from infra.workers.worker import Context
from rlhf.algorithms.objectives import CriticObjective
from tasks.optimizer_steps import TRAINER_KEYS, optimizer_steps
from tasks.spec import StageSpec
from tasks.stage import update

SPEC = StageSpec(
    name="update_critic",
    reads={
        "generate": ("prompt_ids", "response_ids"),
        "select": (),
        "advantages": ("returns", "loss_mask"),
        "values": ("values",),
    },
    config_keys=(
        "run.seed",
        "model.dtype",
        "critic.model",
        "critic.cliprange_value",
        *(f"critic.{key}" for key in TRAINER_KEYS),
    ),
    operational_keys=("critic.micro_batch_tokens",),
    role="critic",
    sharded=False,
    version=2,
)


@update(SPEC)
def update_critic(context: Context) -> dict[str, float]:
    critic = context.config.critic
    objective = CriticObjective(cliprange_value=critic.cliprange_value)
    schedule = optimizer_steps(context, critic, temperature=1.0)
    return {**context.engine.update(context.batch, objective, schedule), "critic/lr": schedule.lr}
