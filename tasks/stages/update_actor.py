"""update_actor: runs PPO epochs over shuffled mini-batches of the iteration's trajectories."""

from __future__ import annotations

import numpy as np
from pydantic import JsonValue

from ratchet.infra.workers.calls import Context
from ratchet.rlhf.algorithms import Distillation, RolloutCorrection
from ratchet.rlhf.algorithms.kl import Estimator
from ratchet.rlhf.algorithms.objectives import TEACHER, ActorObjective
from ratchet.rlhf.batch import TrajectoryBatch, ragged
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.sections import UpdateConfig
from ratchet.rlhf.config.user_algorithms import AnyPolicyLoss, loaded
from ratchet.rlhf.schema import READ, ROUTES
from ratchet.rlhf.seeding import generator
from ratchet.rlhf.stage_config import StageConfig, key, section
from ratchet.rlhf.train.performance import memory
from ratchet.tasks.optimizer_steps import optimizer_steps, updated
from ratchet.tasks.routes import with_routes
from ratchet.tasks.stage import UpdateStage


class UpdateActorConfig(StageConfig):
    seed: int = key("run.seed")
    dtype: str = key("model.dtype")
    temperature: float = key("rollout.temperature")
    router_replay: bool = key("rollout.router_replay")
    max_response_tokens: int = key("rollout.max_response_tokens")
    loss: AnyPolicyLoss = key("algorithm.loss")
    kl_in_loss: float | None = key("algorithm.kl.in_loss")
    kl_estimator: Estimator = key("algorithm.kl.loss_estimator")
    entropy_coef: float = key("algorithm.entropy_coef")
    rollout_correction: RolloutCorrection | None = key("algorithm.rollout_correction")
    distillation: Distillation | None = key("algorithm.distillation")
    critic_warmup_iterations: int | None = key("critic.warmup_iterations")
    trainer: UpdateConfig = section("actor")
    # the loaded engine has them
    engine_args: dict[str, JsonValue] = key("actor.engine.args")


def update_actor(context: Context[UpdateActorConfig]) -> dict[str, float]:
    config = context.config
    batch = with_routes(context.batch, config.router_replay)
    correction, loss = config.rollout_correction, loaded(config.loss)
    bypass = correction if correction is not None and correction.bypass else None
    if bypass is not None:
        # the rollout's log-probs take the place of the actor's
        batch = batch.renamed({"rollout_log_probs": "old_log_probs"})
    if "selection_noise" in loss.needs:
        lengths = batch.lengths("response_ids")
        draw = generator(config.seed, context.call.stage, context.iteration, "selection")
        noise = ragged(draw.random(lengths.sum(), dtype=np.float32), lengths)
        batch = batch.with_column("selection_noise", noise)
    distillation = config.distillation if config.distillation is not None and config.distillation.in_loss else None
    if distillation is None and "teacher_topk_ids" in batch:
        batch = TrajectoryBatch(batch.table.drop_columns(list(TEACHER)))
    objective = ActorObjective(
        policy_loss=loss,
        kl_in_loss=config.kl_in_loss,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        on_policy="old_log_probs" not in batch,
        correction=bypass,
        distillation=distillation,
        weighted=not batch.array("rollout_is_weights").null_count,
        horizon=config.max_response_tokens,
    )
    plan = optimizer_steps(
        context,
        config.trainer,
        config.seed,
        temperature=config.temperature,
        skipped=config.critic_warmup_iterations or 0,
    )
    return {**updated(context, batch, objective, plan), **memory()}


def exists(config: RunConfig) -> bool:
    return "actor" in config.roles


def skipped(config: RunConfig, iteration: int) -> str | None:
    if not config.train.updates:
        return "this run only scores"
    warms_up = config.needs_critic and config.critic is not None and iteration < config.critic.warmup_iterations
    return "the critic warms up" if warms_up else None


UPDATE_ACTOR = UpdateStage(
    name="update_actor",
    label="actor",
    config=UpdateActorConfig,
    exists=exists,
    reads={
        "generate": (*READ, "rollout_log_probs", ROUTES),
        "select": (),
        "advantages": ("advantages", "loss_mask", "rollout_is_weights"),
        "old_log_probs": ("old_log_probs",),
        "ref_log_probs": ("ref_log_probs",),
        "teacher_log_probs": TEACHER,
    },
    outside=("loss",),
    compute=update_actor,
    skipped=skipped,
    role="actor",
)
