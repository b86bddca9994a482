"""update_actor: PPO epochs over shuffled mini-batches of the iteration's trajectories."""

from __future__ import annotations

import numpy as np

from infra.workers.worker import Context
from rlhf.algorithms.objectives import ActorObjective
from rlhf.batch import ragged
from rlhf.seeding import generator
from tasks.optimizer_steps import TRAINER_KEYS, optimizer_steps
from tasks.spec import StageSpec
from tasks.stage import update

SPEC = StageSpec(
    name="update_actor",
    reads={
        "generate": ("prompt_ids", "response_ids", "rollout_log_probs"),
        "select": (),
        "advantages": ("advantages", "loss_mask", "rollout_is_weights"),
        "old_log_probs": ("old_log_probs",),
        "ref_log_probs": ("ref_log_probs",),
    },
    config_keys=(
        "run.seed",
        "model.dtype",
        "rollout.temperature",
        "rollout.max_response_tokens",
        "algorithm.loss",
        "algorithm.kl.in_loss",
        "algorithm.kl.loss_estimator",
        "algorithm.entropy_coef",
        "algorithm.rollout_correction",
        "critic.warmup_iterations",
        *(f"actor.{key}" for key in TRAINER_KEYS),
    ),
    operational_keys=("actor.micro_batch_tokens",),
    role="actor",
    sharded=False,
    version=2,
)


@update(SPEC)
def update_actor(context: Context) -> dict[str, float]:
    config, batch = context.config, context.batch
    correction, loss = config.algorithm.rollout_correction, config.algorithm.loss
    if correction is not None and correction.bypass:
        batch = batch.renamed({"rollout_log_probs": "old_log_probs"})
    if "selection_noise" in loss.needs:
        lengths = batch.lengths("response_ids")
        draw = generator(config.run.seed, context.call.stage, context.iteration, "selection")
        noise = ragged(draw.random(lengths.sum(), dtype=np.float32), lengths)
        batch = batch.with_column("selection_noise", noise)
    objective = ActorObjective(
        policy_loss=loss,
        kl_in_loss=config.algorithm.kl.in_loss,
        kl_estimator=config.algorithm.kl.loss_estimator,
        entropy_coef=config.algorithm.entropy_coef,
        on_policy="old_log_probs" not in batch,
        weighted=correction is not None and correction.weights is not None,
        horizon=config.rollout.max_response_tokens,
    )
    warmup = 0 if config.critic is None else config.critic.warmup_iterations
    schedule = optimizer_steps(context, config.actor, temperature=config.rollout.temperature, skipped=warmup)
    return {**context.engine.update(batch, objective, schedule), "actor/lr": schedule.lr}
