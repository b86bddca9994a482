"""score: computes the reward of every response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, compress
from typing import Any, Literal

import numpy as np
import torch

from ratchet.infra.workers.calls import C, Context, ShardOutput, ShardSummary
from ratchet.infra.workers.resources import RewardSettings
from ratchet.rlhf.algorithms.groups import Groups
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.sections import ClassifierConfig, RewardConfig
from ratchet.rlhf.data.prompts import original, structures
from ratchet.rlhf.errors import RatchetError
from ratchet.rlhf.rewards.functions import TAIL_CHARACTERS, RewardFailed, Score, Trajectory
from ratchet.rlhf.schema import TRAJECTORY, parts_of
from ratchet.rlhf.stage_config import StageConfig, section
from ratchet.rlhf.validation import add
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.stages.reward_model import is_complete, model_scores

OnError = Literal["fail", "zero", "drop"]
REWARD_READS = (
    "prompt_id",
    "sample",
    "data_source",
    "messages",
    "prompt_is_text",
    "prompt",
    "response",
    "response_ids",
    "response_mask",
    "finish_reason",
    "policy_version",
    "ground_truth",
    "ground_truth_is_json",
    "extra_info",
    "turns",
)
"""Columns that the reward functions receive, in addition to `trajectory_id`."""


class ScoreConfig(StageConfig):
    reward: RewardConfig = section("reward")


class ScoreSummary(ShardSummary):
    sum_of_scores: float
    scored: int
    extremes: tuple[float, float] | None = None
    """The smallest and the largest score; None: nothing was scored."""
    errors: int = 0
    prompts_that_differ: int = 0
    parts: dict[str, tuple[float, int]] = {}
    """The sum of each named part of the reward, and the number of trajectories that have it."""


def score(context: Context[ScoreConfig]) -> ShardOutput[ScoreSummary]:
    """Scores the trajectories of one shard, and counts the prompts whose scores differ.

    The last branch of a trajectory is scored, and all its branches get that score.
    """
    config, rows = context.config.reward, context.batch
    index, last = rows.trajectory_index(), rows.last_branches()
    batch = rows if len(last) == len(rows) else rows.take(last)
    columns = scores(context, config, None, batch)
    _, group = np.unique(batch.numpy("prompt_id").astype(str), return_inverse=True)
    parts: dict[str, tuple[float, int]] = {}
    kept = counting(config.on_error, columns["reward_error"]) & is_complete(batch)
    group, counted = group[kept], list(compress(columns["score"], kept))
    differ = Groups(torch.from_numpy(group)).differ(torch.tensor(counted))  # in float32, as scores are stored
    for name, value in chain.from_iterable(compress(columns["reward_parts"], kept)):
        add(parts, name, value, 1)
    summary = ScoreSummary(
        sum_of_scores=float(sum(counted)),
        scored=len(counted),
        extremes=(min(counted), max(counted)) if counted else None,
        errors=sum(error is not None for error in columns["reward_error"]),
        prompts_that_differ=len(np.unique(group[differ.numpy()])),
        parts=parts,
    )
    every = {name: [values[number] for number in index] for name, values in columns.items()}
    # a per-token score belongs to the tokens of the branch that was scored
    is_last = np.isin(np.arange(len(rows)), last)
    every["token_scores"] = [
        value if scored else None for value, scored in zip(every["token_scores"], is_last, strict=True)
    ]
    return ShardOutput(TrajectoryBatch.of({"trajectory_id": rows.array("trajectory_id"), **every}), summary)


def score_metrics(summaries: Sequence[ScoreSummary]) -> dict[str, float]:
    """Computes metrics of everything that was scored.

    In an iteration that learns, `critic/score` is that of `advantages` instead, over the trajectories in the loss.
    """
    count = sum(shard.scored for shard in summaries)
    errors = sum(shard.errors for shard in summaries)
    metrics = {"reward/errors": float(errors)} if errors else {}
    if count:
        mean = sum(shard.sum_of_scores for shard in summaries) / count
        metrics |= {"reward/mean": mean, "critic/score/mean": mean}
    ends = [shard.extremes for shard in summaries if shard.extremes is not None]
    if ends:
        metrics |= {"critic/score/min": min(ends)[0], "critic/score/max": max(high for _, high in ends)}
    parts: dict[str, tuple[float, int]] = {}
    for name, (total, terms) in chain.from_iterable(shard.parts.items() for shard in summaries):
        add(parts, name, total, terms)
    return metrics | {f"reward/{name}/mean": total / terms for name, (total, terms) in parts.items()}


def counting(on_error: OnError, errors: Sequence[str | None]) -> np.ndarray:
    """Returns True for rewards that count, shape (batch,): with `reward.on_error: drop`, those that did not fail."""
    return np.array([error is None or on_error != "drop" for error in errors], dtype=bool)


def scores(
    context: Context[C], config: RewardConfig, model: ClassifierConfig | None, batch: TrajectoryBatch
) -> dict[str, list[Any]]:
    """Returns the columns of `score`: the sum of reward functions, reward model and environment, and its parts.

    Args:
        model: The reward model to call; None: there is none, or the batch already has its scores.
        batch: Trajectories with the columns in `SCORE.reads`.

    Raises:
        RatchetError: A reward fails and `reward.on_error` is `fail`, or more than `reward.max_error_share` fail.
    """
    complete = is_complete(batch)
    told = _trajectories(batch, context.iteration)
    rewards = _rewards(context, config, told, complete)
    _check_errors(context, config, told, rewards, int(complete.sum()))
    more: list[dict[str, float]] = [{} for _ in rewards]
    """Rewards of the model and the environment per trajectory, by their name in the parts."""
    token_scores: list[Any] = [None] * len(rewards)
    weight = 1.0
    if config.model is not None:
        weight = config.model.weight
        names = TRAJECTORY.names("reward_model")
        given = {name: batch.list(name) for name in names} if model is None else model_scores(context, model, batch)
        for row, (model_score, steps) in enumerate(zip(given["model_score"], given["model_token_scores"], strict=True)):
            more[row]["model"] = model_score
            if steps is not None:
                # a trajectory whose reward function failed scores 0 in all
                factor = weight if rewards[row].error is None else 0
                token_scores[row] = np.multiply(steps, factor, dtype=np.float32)
    for row, given_reward in enumerate(batch.list("environment_reward") if "environment_reward" in batch else ()):
        if given_reward is not None:
            more[row]["environment"] = given_reward if complete[row] else 0.0
    for row, turn_scores in enumerate(_turn_scores(batch)):
        if turn_scores is not None:
            counted = turn_scores if complete[row] and rewards[row].error is None else np.zeros_like(turn_scores)
            token_scores[row] = counted if token_scores[row] is None else token_scores[row] + counted
    for row, (reward, added) in enumerate(zip(rewards, more, strict=True)):
        if added:
            rule = {} if config.function is None else {"rule": reward.score}
            total = reward.score + weight * added.get("model", 0.0) + added.get("environment", 0.0)
            rewards[row] = Score(total if reward.error is None else 0.0, reward.parts | rule | added, reward.error)
    for row, parts in enumerate(batch.list("agent_parts") if "agent_parts" in batch else ()):
        rewards[row] = Score(rewards[row].score, rewards[row].parts | parts_of(parts), rewards[row].error)
    return {
        "score": [reward.score for reward in rewards],
        "reward_parts": [list(reward.parts.items()) for reward in rewards],
        "token_scores": token_scores,
        "reward_error": [reward.error for reward in rewards],
    }


def _check_errors(
    context: Context[C], config: RewardConfig, trajectories: Sequence[Trajectory], rewards: Sequence[Score], count: int
) -> None:
    """Raises if the rewards of too many of `count` trajectories failed."""
    pairs = zip(trajectories, rewards, strict=True)
    errors = [(trajectory, reward.error) for trajectory, reward in pairs if reward.error is not None]
    if len(errors) > config.max_error_share * count:
        trajectory, error = errors[0]
        raise RewardFailed(
            f"the rewards of {len(errors)} of the {count} responses of shard {context.shard} ({context.call.stage}, "
            f"iteration {context.iteration}) failed, more than reward.max_error_share {config.max_error_share:g}: "
            "nothing of the shard is committed. Fix the reward and resume, or raise reward.max_error_share. The first "
            f"error: {trajectory.metadata['trajectory_id']}: {error}"
        )


def _turn_scores(batch: TrajectoryBatch) -> Iterator[np.ndarray | None]:
    """Yields the rewards of each trajectory's turns, placed at the last token of each turn; None without an
    environment."""
    if "turn_rewards" not in batch:
        return
    mask, lengths = batch.flat("response_mask"), batch.lengths("response_mask")
    firsts = np.cumsum(lengths) - lengths
    rows = zip(firsts, lengths, batch.list("turn_ends"), batch.list("turn_rewards"), strict=True)
    for first, length, ends, rewards in rows:
        if rewards is None:
            yield None
            continue
        placed = np.zeros(length, dtype=np.float32)
        for end, reward in zip(ends, rewards, strict=True):
            if end and mask[first + end - 1]:  # a turn without tokens has no place: its reward goes to the last token
                placed[end - 1] += reward
        yield placed


def _trajectories(batch: TrajectoryBatch, iteration: int) -> list[Trajectory]:
    """Builds the arguments of the reward functions. Greedy answers lack some columns."""
    trajectories: list[Trajectory] = []
    names = ("trajectory_id", *REWARD_READS)
    values = [batch.list(name) if name in batch else [None] * len(batch) for name in names]
    for row in (dict(zip(names, cells, strict=True)) for cells in zip(*values, strict=True)):
        truth, extra = structures(row["ground_truth"], row["ground_truth_is_json"], row["extra_info"])
        mask = row["response_mask"]
        trajectories.append(
            Trajectory(
                data_source=row["data_source"],
                solution_str=row["response"],
                ground_truth=truth,
                extra_info=extra,
                prompt=original(row["messages"], row["prompt_is_text"]),
                turns=row["turns"] or [{"role": "policy", "content": row["response"]}],
                metadata={
                    "trajectory_id": row["trajectory_id"],
                    "prompt_id": row["prompt_id"],
                    "sample": row["sample"],
                    "iteration": iteration,
                    "policy_version": row["policy_version"],
                    "finish_reason": row["finish_reason"],
                    "response_length": None if mask is None else sum(mask),
                },
                response_ids=row["response_ids"],
                prompt_tail=row["prompt"][-TAIL_CHARACTERS:],
            )
        )
    return trajectories


def _rewards(
    context: Context[C], config: RewardConfig, trajectories: list[Trajectory], complete: np.ndarray
) -> list[Score]:
    """Returns the scores of the reward functions; 0 for trajectories that are not `complete`.

    Raises the error of a failed reward if `reward.on_error` is `fail`.
    """
    rewards = [Score(0.0, {}) for _ in trajectories]
    if config.function is None:
        return rewards
    settings = RewardSettings(
        functions=config.functions,
        options=config.arguments,
        workers=config.workers,
        timeout_s=config.timeout_s,
        concurrency=config.concurrency,
    )
    scored = context.resources.rewards(settings).score(list(compress(trajectories, complete)))
    for row, reward in zip(np.flatnonzero(complete), scored, strict=True):
        if isinstance(reward, RatchetError):
            if config.on_error == "fail":
                raise type(reward)(f"{reward}: nothing of the shard is committed; fix the reward and resume")
            reward = Score(0.0, {}, error=str(reward))
        rewards[row] = reward
    return rewards


def exists(config: RunConfig) -> bool:
    return True


SCORE = RowsStage(
    name="score",
    label="score",
    config=ScoreConfig,
    exists=exists,
    reads={
        "generate": (*REWARD_READS, "environment_reward", "rollout_error", "turn_ends", "turn_rewards", "agent_parts"),
        "reward_model": TRAJECTORY.names("reward_model"),
    },
    writes=TRAJECTORY.of("score"),
    compute=score,
    summary=ScoreSummary,
    metrics=score_metrics,
    outside=("reward",),
)
