"""advantages: from scores, KL and values to what the losses read. One shard, since groups and whitening span all."""

from __future__ import annotations

import numpy as np
import torch

from infra.workers.worker import Context
from rlhf.algorithms.kl import kl_divergence
from rlhf.batch import TrajectoryBatch, unpadded
from rlhf.schema import TRAJECTORY
from tasks.spec import StageSpec
from tasks.stage import rows

SPEC = StageSpec(
    name="advantages",
    reads={
        "generate": ("prompt_id", "prompt_ids", "response_mask", "rollout_log_probs", "finish_reason"),
        "score": ("score",),
        "old_log_probs": ("old_log_probs", "entropy"),
        "ref_log_probs": ("ref_log_probs",),
        "values": ("values",),
    },
    writes=TRAJECTORY.of("advantages"),
    config_keys=("algorithm.advantage", "algorithm.kl"),
    sharded=False,
)


@rows(SPEC)
def advantages(context: Context) -> TrajectoryBatch:
    config, batch = context.config.algorithm, context.batch
    mask = batch.padded("response_mask").double()
    lengths = batch.lengths("response_mask")
    scores = torch.from_numpy(batch.numpy("score").astype(np.float64))
    token_rewards = torch.zeros_like(mask)
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(-1)  # of the tokens that the model wrote
    token_rewards[torch.arange(len(batch)), last] = scores

    metrics: dict[str, float] = {}
    controllers: dict[str, float] = {}
    if "ref_log_probs" in batch:
        old = "old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"
        log_probs, ref = batch.padded(old).double(), batch.padded("ref_log_probs").double()
        kl = kl_divergence(log_probs, ref, config.kl.estimator) * mask
        metrics["actor/ref_kl"] = mean_kl = float(kl.sum() / mask.sum())
        if config.kl.in_reward is not None:
            coefficient = context.call.controllers.get("kl_in_reward", config.kl.in_reward)
            token_rewards = token_rewards - coefficient * kl
            controllers["kl_in_reward"] = config.kl.controller(coefficient, mean_kl, len(batch))
            metrics["actor/kl_coef"] = coefficient

    _, groups = np.unique(batch.numpy("prompt_id").astype(str), return_inverse=True)
    inputs = {"groups": torch.from_numpy(groups)}
    if "values" in batch:
        inputs["values"] = batch.padded("values").double()
    estimator = config.advantage
    found, returns = estimator(token_rewards, mask, **{name: inputs[name] for name in estimator.needs})

    context.outputs["controllers"] = controllers
    context.outputs["metrics"] = metrics | _metrics(batch, mask, scores, token_rewards, found, returns)
    return TrajectoryBatch.of(
        {
            "trajectory_id": batch.array("trajectory_id"),
            "token_rewards": unpadded(token_rewards, lengths),
            "advantages": unpadded(found, lengths),
            "returns": unpadded(returns, lengths),
            "loss_mask": batch.array("response_mask"),
        }
    )


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
