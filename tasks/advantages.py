"""advantages: from scores, KL and values to what the losses read. One shard, since groups and whitening span all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from infra.workers.worker import Context
from rlhf.algorithms.kl import AdaptiveCoefficient, kl_divergence
from rlhf.algorithms.rollout_correction import off_policy_metrics
from rlhf.batch import TrajectoryBatch, unpadded
from rlhf.schema import TRAJECTORY
from tasks.spec import StageSpec
from tasks.stage import rows

SPEC = StageSpec(
    name="advantages",
    reads={
        "generate": ("prompt_id", "prompt_ids", "response_mask", "rollout_log_probs", "finish_reason"),
        "select": (),
        "score": ("score", "reward_parts", "token_scores"),
        "greedy_baseline": ("greedy_score", "greedy_tokens"),
        "old_log_probs": ("old_log_probs", "entropy"),
        "ref_log_probs": ("ref_log_probs",),
        "values": ("values",),
    },
    writes=TRAJECTORY.of("advantages"),
    config_keys=(
        "rollout.max_response_tokens",
        "algorithm.advantage",
        "algorithm.kl",
        "algorithm.rollout_correction",
        "algorithm.overlong_penalty",
    ),
    sharded=False,
)


@rows(SPEC)
def advantages(context: Context) -> TrajectoryBatch:
    algorithm, batch = context.config.algorithm, context.batch
    estimator = algorithm.advantage
    mask, lengths = batch.padded("response_mask").double(), batch.lengths("response_mask")
    raw_scores = _doubles(batch, "score")
    scores = estimator.clipped(raw_scores)
    token_rewards, metrics, controllers = _token_rewards(context, mask, scores)
    _, groups = np.unique(batch.numpy("prompt_id").astype(str), return_inverse=True)
    inputs: dict[str, Any] = {"group_ids": torch.from_numpy(groups)}
    if "greedy_scores" in estimator.needs:
        inputs["greedy_scores"] = estimator.clipped(_doubles(batch, "greedy_score"))
        if algorithm.overlong_penalty is not None:
            longest = context.config.rollout.max_response_tokens
            inputs["greedy_scores"] += algorithm.overlong_penalty(_doubles(batch, "greedy_tokens"), longest)
    if "reward_parts" in estimator.needs:
        inputs["reward_parts"] = {name: estimator.clipped(part) for name, part in _reward_parts(batch).items()}
    for name in ("values", "entropy"):
        if name in batch:
            inputs[name] = batch.padded(name).double()
    found, returns = estimator(token_rewards, mask, **{name: inputs[name] for name in estimator.needs})

    loss_mask = estimator.loss_mask(mask, scores, inputs["group_ids"]).double()
    weights = None
    if "old_log_probs" in batch:
        loss_mask, weights, distance = _rollout_correction(context, mask, loss_mask)
        metrics |= distance
    metrics["actor/loss_tokens_share"] = float(loss_mask.sum() / mask.sum())
    context.outputs["controllers"] = controllers
    context.outputs["metrics"] = metrics | _metrics(batch, mask, raw_scores, token_rewards, found, returns)
    return TrajectoryBatch.of(
        {
            "trajectory_id": batch.array("trajectory_id"),
            "token_rewards": unpadded(token_rewards, lengths),
            "advantages": unpadded(found, lengths),
            "returns": unpadded(returns, lengths),
            "loss_mask": unpadded(loss_mask, lengths).cast(TRAJECTORY["loss_mask"].type),
            "rollout_is_weights": [None] * len(batch) if weights is None else unpadded(weights, lengths),
        }
    )


def _token_rewards(
    context: Context, mask: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float], dict[str, float]]:
    """The score, where it lies or else at the last token that the model wrote, and there the length penalty; less the
    KL penalty; metrics; controllers."""
    config, batch = context.config.algorithm, context.batch
    metrics: dict[str, float] = {}
    controllers: dict[str, float] = {}
    if config.overlong_penalty is not None:
        lengths = torch.from_numpy(batch.lengths("response_mask")).double()
        penalty = config.overlong_penalty(lengths, context.config.rollout.max_response_tokens)
        metrics["critic/overlong_penalty/mean"] = float(penalty.mean())
        scores = scores + penalty
    token_rewards = torch.zeros_like(mask)
    if batch.array("token_scores").null_count == 0:
        token_rewards = batch.padded("token_scores").double()
        scores = scores - token_rewards.sum(-1)
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(-1)
    token_rewards[torch.arange(len(batch)), last] += scores
    if "ref_log_probs" in batch:
        old = "old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"
        log_probs, ref = batch.padded(old).double(), batch.padded("ref_log_probs").double()
        kl = kl_divergence(log_probs, ref, config.kl.estimator) * mask
        metrics["actor/ref_kl"] = mean_kl = float(kl.sum() / mask.sum())
        if config.kl.in_reward is not None:
            coefficient = config.kl.in_reward
            if isinstance(config.kl.controller, AdaptiveCoefficient):
                coefficient = context.call.controllers.get("kl_in_reward", coefficient)
                controllers["kl_in_reward"] = config.kl.controller(coefficient, mean_kl, len(batch))
            token_rewards = token_rewards - coefficient * kl
            metrics["actor/kl_coef"] = coefficient
    return token_rewards, metrics, controllers


def _rollout_correction(
    context: Context, mask: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, float]]:
    """The mask without what is rejected, importance weights if there are any, and how far training is from rollout."""
    correction, batch = context.config.algorithm.rollout_correction, context.batch
    old, rollout = batch.padded("old_log_probs").double(), batch.padded("rollout_log_probs").double()
    metrics = off_policy_metrics(old, rollout, mask)
    weights = None
    if correction is not None:
        for rejection in correction.rejection:
            kept = rejection(old, rollout, mask)
            metrics[f"rejected/{rejection.statistic}"] = 1.0 - kept.sum() / mask.sum()
            loss_mask = loss_mask * kept
        if correction.weights is not None:
            weights = correction.weights(old, rollout, mask)
            metrics |= correction.weights.metrics(old, rollout, mask)
    return loss_mask, weights, {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def _reward_parts(batch: TrajectoryBatch) -> dict[str, torch.Tensor]:
    """The parts that the reward gave for every trajectory; `score` is one of them."""
    rows = [dict(parts) for parts in batch.list("reward_parts")]
    names = set.intersection(*(set(row) for row in rows)) if rows else set()
    parts = {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in sorted(names)}
    return {"score": _doubles(batch, "score"), **parts}


def _doubles(batch: TrajectoryBatch, name: str) -> torch.Tensor:
    return torch.from_numpy(batch.numpy(name).astype(np.float64))


def _metrics(
    batch: TrajectoryBatch,
    mask: torch.Tensor,
    scores: torch.Tensor,
    token_rewards: torch.Tensor,
    found: torch.Tensor,
    returns: torch.Tensor,
) -> dict[str, float]:
    """What people watch, under the names they know."""
    here = mask > 0
    prompts = torch.from_numpy(batch.lengths("prompt_ids")).double()
    responses = mask.sum(-1)
    columns = {
        "critic/score": scores,
        "critic/rewards": token_rewards.sum(-1),
        "critic/advantages": found[here],
        "critic/returns": returns[here],
        "response_length": responses,
        "prompt_length": prompts,
    }
    metrics = {"response_length/clip_ratio": float(np.mean(batch.numpy("finish_reason") == "length"))}
    if "entropy" in batch:
        metrics["actor/entropy"] = float(batch.padded("entropy").double()[here].mean())
    if "values" in batch:
        columns["critic/values"] = values = batch.padded("values").double()[here]
        spread = returns[here].var(unbiased=False)
        error = (returns[here] - values).var(unbiased=False)
        metrics["critic/vf_explained_var"] = float(1 - error / spread) if spread > 0 else 0.0
    for name, column in columns.items():
        metrics |= {
            f"{name}/mean": float(column.mean()),
            f"{name}/max": float(column.max()),
            f"{name}/min": float(column.min()),
        }
    return metrics | {"perf/prompt_tokens": float(prompts.sum()), "perf/response_tokens": float(responses.sum())}
