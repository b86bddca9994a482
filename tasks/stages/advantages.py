"""advantages: computes the inputs of the losses from scores, KL and values.

The stage has one shard, because groups and whitening span all trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch

from ratchet.infra.progress import note
from ratchet.infra.workers.calls import Context, ShardOutput, ShardSummary
from ratchet.rlhf.algorithms import Distillation, Experts, OverlongPenalty, RolloutCorrection
from ratchet.rlhf.algorithms.advantages import GDPO, AdvantageEstimator
from ratchet.rlhf.algorithms.kl import AdaptiveCoefficient, Controller, Estimator, kl_divergence
from ratchet.rlhf.algorithms.rollout_correction import off_policy_metrics
from ratchet.rlhf.batch import TrajectoryBatch, unpadded
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.user_algorithms import AnyAdvantage, loaded
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import TRAJECTORY, parts_of
from ratchet.rlhf.stage_config import StageConfig, key
from ratchet.tasks.stage import RowsStage


class AdvantagesConfig(StageConfig):
    max_response_tokens: int = key("rollout.max_response_tokens")
    advantage: AnyAdvantage = key("algorithm.advantage")
    kl_in_reward: float | None = key("algorithm.kl.in_reward")
    kl_estimator: Estimator = key("algorithm.kl.reward_estimator")
    kl_controller: Controller = key("algorithm.kl.controller")
    rollout_correction: RolloutCorrection | None = key("algorithm.rollout_correction")
    overlong_penalty: OverlongPenalty | None = key("algorithm.overlong_penalty")
    distillation: Distillation | None = key("algorithm.distillation")
    experts: Experts = key("algorithm.experts")


def advantages(context: Context[AdvantagesConfig]) -> ShardOutput[ShardSummary]:
    """Computes rewards, advantages, returns and loss mask of every response token.

    Returns:
        Per-token columns, of the lengths of the responses: `token_rewards`, `advantages`, `returns`, `loss_mask`, and
        `rollout_is_weights` if the rollout correction has weights, or experts wrote some answers; metrics; and the
        state of the KL controller.
    """
    config, batch = context.config, context.batch
    estimator = loaded(config.advantage)
    mask, lengths = batch.padded("response_mask").double(), batch.lengths("response_mask")
    raw_scores = _doubles(batch, "score")
    scores = estimator.clipped(raw_scores)
    by_expert = _by_expert(batch)
    # only tokens that a policy drew have a KL divergence
    drawn = mask * ~by_expert[:, None]
    token_rewards, metrics, controllers = _token_rewards(context, mask, drawn, scores)
    _, groups = np.unique(batch.numpy("prompt_id").astype(str), return_inverse=True)
    inputs: dict[str, Any] = {"group_ids": torch.from_numpy(groups)}
    is_supervised = torch.zeros_like(by_expert) if config.experts.compares else by_expert
    # each supervised answer is a group of its own, so that no other is compared with it
    inputs["group_ids"][is_supervised] = len(batch) + torch.arange(int(is_supervised.sum()))
    index, last = torch.from_numpy(batch.trajectory_index()), torch.from_numpy(batch.last_branches())
    teaches = estimator.teaches(scores[last], mask[last].sum(-1), inputs["group_ids"][last])[index] & ~is_supervised
    if "greedy_scores" in estimator.needs:
        has_baseline = torch.from_numpy(batch.array("greedy_score").is_valid().to_numpy(zero_copy_only=False))
        teaches &= has_baseline
        inputs["greedy_scores"] = estimator.clipped(_doubles(batch, "greedy_score").where(has_baseline, 0.0))
        if config.overlong_penalty is not None:
            greedy_lengths = _doubles(batch, "greedy_tokens")
            inputs["greedy_scores"] += config.overlong_penalty(greedy_lengths, config.max_response_tokens)
    if "reward_parts" in estimator.needs:
        parts = _reward_parts(batch, estimator.parts if isinstance(estimator, GDPO) else ())
        inputs["reward_parts"] = {name: estimator.clipped(part) for name, part in parts.items()}
    if "turns" in estimator.needs:
        inputs["turns"], inputs["states"] = _turns_and_states(batch)
    if "turn_values" in estimator.needs:
        inputs["turn_values"], is_known = _turn_values(batch)
        teaches &= is_known
    if "sum_pi_squared" in estimator.needs and batch.array("sum_pi_squared").null_count:
        raise UserError(
            f"algorithm.advantage {config.advantage.type} needs sum_pi_squared, but old_log_probs was computed for "
            "another advantage: fork at old_log_probs"
        )
    for name in ("values", "entropy", "old_log_probs", "sum_pi_squared"):
        if name in estimator.needs:
            inputs[name] = batch.padded(name).double()
    loss_mask = mask * teaches[:, None]
    needed = {name: inputs[name] for name in estimator.needs}
    if "group_ids" in estimator.needs and len(last) < len(batch):
        estimates, returns, *own_metrics = _by_trajectory(estimator, token_rewards, loss_mask, needed, index, last)
    else:
        estimates, returns, *own_metrics = estimator(token_rewards, loss_mask, **needed)
    metrics |= {f"advantages/{name}": float(value) for own in own_metrics for name, value in own.items()}

    if config.distillation is not None:
        old = batch.padded("old_log_probs" if "old_log_probs" in batch else "rollout_log_probs").double()
        teacher = batch.padded("teacher_log_probs").double()
        metrics["actor/teacher_kl"] = float(((old - teacher) * drawn).sum() / drawn.sum())
        if not config.distillation.in_loss:
            has_spans = batch.array("teacher_spans").null_count < len(batch)
            spans = batch.padded("teacher_spans").long() if has_spans else None
            estimates = estimates + config.distillation(old, teacher, drawn, spans)
        # the teacher scores every trajectory of the policy, whatever its reward
        teaches, loss_mask = teaches | ~by_expert, torch.maximum(loss_mask, drawn)
    estimates = estimates.where(~is_supervised[:, None], mask)  # an advantage of 1: supervised learning
    loss_mask = loss_mask.where(~is_supervised[:, None], mask)
    if not loss_mask.any():
        note(f"iteration {context.iteration} has nothing to learn from: no update changes the weights")

    weights = None
    if "old_log_probs" in batch:
        loss_mask, weights, distance = _rollout_correction(context, mask, loss_mask, by_expert)
        metrics |= distance
    metrics["actor/loss_tokens_share"] = float(loss_mask.sum() / mask.sum())
    prompt_tokens, response_tokens = batch.lengths("prompt_ids").sum(), mask.sum()
    metrics |= {"perf/prompt_tokens": float(prompt_tokens), "perf/response_tokens": float(response_tokens)}
    # all tokens if none is learned from, so that the metrics have values
    learned = mask if not teaches.any() else mask * teaches[:, None]
    own = ~by_expert
    metrics |= _metrics(
        batch if own.all() else batch.take(own.nonzero()[:, 0].tolist()),
        mask[own],
        learned[own] > 0,
        raw_scores[last[own[last]]],
        token_rewards[own],
        estimates[own],
        returns[own],
    )
    if by_expert.any():
        metrics |= _expert_metrics(batch, mask, raw_scores, by_expert)
    columns = {
        "trajectory_id": batch.array("trajectory_id"),
        "token_rewards": unpadded(token_rewards, lengths),
        "advantages": unpadded(estimates, lengths),
        "returns": unpadded(returns, lengths),
        "loss_mask": unpadded(loss_mask, lengths).cast(TRAJECTORY["loss_mask"].type),
        "rollout_is_weights": [None] * len(batch) if weights is None else unpadded(weights, lengths),
    }
    return ShardOutput(TrajectoryBatch.of(columns), ShardSummary(metrics=metrics, controllers=controllers))


def _by_trajectory(
    estimator: AdvantageEstimator,
    token_rewards: torch.Tensor,
    mask: torch.Tensor,
    inputs: Mapping[str, Any],
    index: torch.Tensor,
    last: torch.Tensor,
) -> tuple[Any, ...]:
    """Estimates advantages and returns, shape (batch, response), of trajectories that have several branches.

    Each trajectory counts once in its group, by its last branch. Its other branches get the mean of that branch's
    advantages and returns.

    Args:
        estimator: An estimator that compares the trajectories of a prompt.
        token_rewards: Rewards of the tokens, shape (batch, response).
        mask: 1 for tokens in the loss, same shape.
        inputs: The estimator's inputs, with a row per branch.
        index: The number of each row's trajectory, shape (batch,).
        last: The row of each trajectory's last branch, shape (trajectories,).
    """
    parts = inputs.get("reward_parts")
    chosen = {name: value[last] for name, value in inputs.items() if name != "reward_parts"}
    if parts is not None:
        chosen["reward_parts"] = {name: part[last] for name, part in parts.items()}
    spread: list[torch.Tensor] = []
    advantages, returns, *metrics = estimator(token_rewards[last], mask[last], **chosen)
    for values in (advantages, returns):
        means = values.sum(-1) / mask[last].sum(-1).clamp(min=1)
        every = means[index][:, None] * mask
        every[last] = values
        spread.append(every)
    return *spread, *metrics


def _token_rewards(
    context: Context[AdvantagesConfig], mask: torch.Tensor, drawn: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float], dict[str, float]]:
    """Computes per-token rewards, metrics, and the state of the KL controller.

    The score goes to the tokens in `token_scores`, and the rest of it, with the length penalty, to the last token that
    the model wrote. The KL penalty is subtracted at every token.

    Args:
        context: The batch, the config and the controllers' state before this iteration.
        mask: 1 for tokens that the model or an expert wrote, float64, shape (batch, response).
        drawn: 1 for tokens that a policy drew, same shape; only these have a KL divergence.
        scores: Clipped score of each trajectory, float64, shape (batch,).

    Returns:
        Rewards, float64, shape (batch, response); metrics; new state of the controllers.
    """
    config, batch = context.config, context.batch
    metrics: dict[str, float] = {}
    controllers: dict[str, float] = {}
    if config.overlong_penalty is not None:
        lengths = torch.from_numpy(batch.lengths("response_mask")).double()
        penalty = config.overlong_penalty(lengths, config.max_response_tokens)
        metrics["critic/overlong_penalty/mean"] = float(penalty.mean())
        scores = scores + penalty
    token_rewards = batch.padded("token_scores", mask.shape[1]).double()
    scores = scores - token_rewards.sum(-1)
    # the last token that the model wrote; an environment's tokens may follow it
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(-1)
    token_rewards[torch.arange(len(batch)), last] += scores
    if "ref_log_probs" in batch:
        old = "old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"
        log_probs, ref = batch.padded(old).double(), batch.padded("ref_log_probs").double()
        kl = kl_divergence(log_probs, ref, config.kl_estimator) * drawn
        metrics["actor/ref_kl"] = mean_kl = float(kl.sum() / drawn.sum())
        if config.kl_in_reward is not None:
            coefficient = config.kl_in_reward
            if isinstance(config.kl_controller, AdaptiveCoefficient):
                coefficient = context.call.controllers.get("kl_in_reward", coefficient)
                controllers["kl_in_reward"] = config.kl_controller(coefficient, mean_kl, len(batch))
            token_rewards = token_rewards - coefficient * kl
            metrics["actor/reward_kl_penalty"] = float((kl.sum(-1) / drawn.sum(-1).clamp(min=1)).mean())
            metrics["actor/reward_kl_penalty_coeff"] = coefficient
    return token_rewards, metrics, controllers


def _rollout_correction(
    context: Context[AdvantagesConfig], mask: torch.Tensor, loss_mask: torch.Tensor, by_expert: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, float]]:
    """Computes the loss mask without rejected tokens, the importance weights, and metrics of the off-policy distance.

    Args:
        mask: 1 for tokens that the model or an expert wrote, float64, shape (batch, response).
        loss_mask: 1 for the tokens of `mask` in the loss; same shape.
        by_expert: True if an expert wrote the response, shape (batch,). Experts' tokens are not rejected, have weights
            of their own, and do not count in the metrics.

    Returns:
        The new loss mask; importance weights of the same shape, or None; metrics.
    """
    config, batch, own = context.config, context.batch, ~by_expert
    correction = config.rollout_correction
    old, rollout = batch.padded("old_log_probs").double(), batch.padded("rollout_log_probs").double()
    compared = old[own], rollout[own], mask[own]
    metrics = off_policy_metrics(*compared)
    weights = torch.ones_like(mask) if by_expert.any() else None
    if correction is not None:
        for rejection in correction.rejection:
            kept = rejection(*compared)
            metrics[f"rollout_rs_{rejection.statistic}_masked_fraction"] = 1.0 - kept.sum() / mask[own].sum()
            loss_mask = loss_mask.clone()
            loss_mask[own] *= kept
        if correction.weights is not None:
            weights = torch.ones_like(mask)
            weights[own] = correction.weights(*compared)
            metrics |= correction.weights.metrics(*compared)
    if by_expert.any():
        assert weights is not None, "an expert's tokens have weights"
        weights[by_expert] = config.experts.weights(old[by_expert], mask[by_expert])
    return loss_mask, weights, {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def _by_expert(batch: TrajectoryBatch) -> torch.Tensor:
    """Returns True for responses that an expert wrote, shape (batch,)."""
    return torch.tensor(batch.list("by_expert"), dtype=torch.bool)


def _expert_metrics(
    batch: TrajectoryBatch, mask: torch.Tensor, scores: torch.Tensor, by_expert: torch.Tensor
) -> dict[str, float]:
    """Computes metrics of the answers of experts: their scores, and how probable they are to the policy."""
    written = mask[by_expert]
    log_probs = batch.padded("old_log_probs").double()[by_expert] * written
    return {
        "experts/score/mean": float(scores[by_expert].mean()),
        "experts/log_probs/mean": float(log_probs.sum() / written.sum()),
    }


def _reward_parts(batch: TrajectoryBatch, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    """Returns the reward parts that every trajectory has, including `score`, as tensors of shape (batch,).

    A trajectory whose reward failed has 0 for every part. If all rewards failed, the parts are unknown; the result then
    has the `wanted` ones.
    """
    rows = [parts_of(parts) for parts in batch.list("reward_parts")]
    scored = [error is None for error in batch.list("reward_error")]
    names = set.intersection(*(set(row) for row in compress(rows, scored))) if any(scored) else set(wanted)
    values = {name: [row[name] if good else 0.0 for row, good in zip(rows, scored, strict=True)] for name in names}
    parts = {name: torch.tensor(column, dtype=torch.float64) for name, column in sorted(values.items())}
    return {"score": _doubles(batch, "score"), **parts}


def _turns_and_states(batch: TrajectoryBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers the turns of tokens and the states in which the policy took them, int64, shape (batch, response).

    The state of a turn is the text before it: the environment's answer to the turn before, or the prompt. Tokens of the
    environment belong to the turn that follows them.
    """
    lengths = batch.lengths("response_mask")
    turns = np.zeros((len(batch), lengths.max(initial=0)), dtype=np.int64)
    states = np.zeros_like(turns)
    numbers: dict[str | None, int] = {}
    for row, (ends, said) in enumerate(zip(batch.list("turn_ends"), batch.list("turns"), strict=True)):
        followed = [None, *(turn["content"] for turn in said if turn["role"] == "environment")]
        of_turn = np.array([numbers.setdefault(text, len(numbers)) for text in followed])
        of_token = np.searchsorted(ends, np.arange(lengths[row]), side="right")
        turns[row, : lengths[row]], states[row, : lengths[row]] = of_token, of_turn[of_token]
    return torch.from_numpy(turns), torch.from_numpy(states)


def _turn_values(batch: TrajectoryBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the value of each token's turn, float64, shape (batch, response), and True for trajectories whose values
    are all known, shape (batch,)."""
    lengths = batch.lengths("response_mask")
    values = np.zeros((len(batch), lengths.max(initial=0)))
    is_known = np.ones(len(batch), dtype=bool)
    for row, (ends, of_turn) in enumerate(zip(batch.list("turn_ends"), batch.list("turn_values"), strict=True)):
        is_known[row] = None not in of_turn
        if is_known[row]:
            # the environment's tokens after the last turn belong to none
            of_token = np.searchsorted(ends, np.arange(lengths[row]), side="right").clip(max=len(of_turn) - 1)
            values[row, : lengths[row]] = np.array(of_turn)[of_token]
    return torch.from_numpy(values), torch.from_numpy(is_known)


def _doubles(batch: TrajectoryBatch, name: str) -> torch.Tensor:
    return torch.from_numpy(batch.numpy(name).astype(np.float64))


def _metrics(
    batch: TrajectoryBatch,
    mask: torch.Tensor,
    learned: torch.Tensor,
    scores: torch.Tensor,
    token_rewards: torch.Tensor,
    estimates: torch.Tensor,
    returns: torch.Tensor,
) -> dict[str, float]:
    """Computes metrics under the names that are usual in the field.

    Args:
        mask: 1 for tokens that the model wrote, shape (batch, response).
        learned: True for tokens of trajectories in the loss, same shape.
        scores: Score of each trajectory before clipping, shape (trajectories,).
        token_rewards: Rewards of the tokens, shape (batch, response).
        estimates: Advantages, same shape.
        returns: Returns, same shape.
    """
    prompts = torch.from_numpy(batch.lengths("prompt_ids")).double()
    responses = mask.sum(-1)
    columns = {
        "critic/score": scores,
        "critic/rewards": token_rewards.sum(-1),
        "critic/advantages": estimates[learned],
        "critic/returns": returns[learned],
        "response_length": responses,
        "prompt_length": prompts,
    }
    metrics = {"response_length/clip_ratio": float(np.mean(batch.numpy("finish_reason") == "length"))}
    if "entropy" in batch:
        metrics["actor/entropy"] = float(batch.padded("entropy", mask.shape[1]).double()[mask > 0].mean())
    if "values" in batch:
        columns["critic/values"] = values = batch.padded("values", mask.shape[1]).double()[learned]
        spread = returns[learned].var(unbiased=False)
        error = (returns[learned] - values).var(unbiased=False)
        metrics["critic/vf_explained_var"] = float(1 - error / spread) if spread > 0 else 0.0
    for name, column in columns.items():
        metrics |= {
            f"{name}/mean": float(column.mean()),
            f"{name}/max": float(column.max()),
            f"{name}/min": float(column.min()),
        }
    return metrics


def exists(config: RunConfig) -> bool:
    return config.train.updates


ADVANTAGES = RowsStage(
    name="advantages",
    label="adv",
    config=AdvantagesConfig,
    exists=exists,
    reads={
        "generate": (
            "prompt_id",
            "prompt_ids",
            "response_mask",
            "rollout_log_probs",
            "by_expert",
            "finish_reason",
            "turns",
            "turn_ends",
        ),
        "select": (),
        "score": ("score", "reward_parts", "reward_error", "token_scores"),
        "greedy_baseline": ("greedy_score", "greedy_tokens"),
        "turn_values": ("turn_values",),
        "old_log_probs": ("old_log_probs", "entropy", "sum_pi_squared"),
        "ref_log_probs": ("ref_log_probs",),
        "teacher_log_probs": ("teacher_log_probs", "teacher_spans"),
        "values": ("values",),
    },
    outside=("advantage",),
    writes=TRAJECTORY.of("advantages"),
    compute=advantages,
    summary=ShardSummary,
    sharded=False,
)
