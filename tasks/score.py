"""score: the reward of every response."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch

from infra.workers.worker import Context
from rlhf.algorithms.groups import Groups
from rlhf.batch import TrajectoryBatch
from rlhf.config_view import ConfigView
from rlhf.data.prompts import structures
from rlhf.errors import RatchetError
from rlhf.rewards import Score
from rlhf.rewards.pool import Row
from rlhf.schema import TRAJECTORY
from tasks.reward_model import judged
from tasks.spec import StageSpec
from tasks.stage import rows

REWARD_KEYS = ("reward.function", "reward.options", "reward.timeout_s", "reward.on_error", "reward.model.weight")

SPEC = StageSpec(
    name="score",
    reads={
        "generate": (
            "prompt_id",
            "data_source",
            "response",
            "ground_truth",
            "ground_truth_is_json",
            "extra_info",
            "environment_reward",
        ),
        "reward_model": TRAJECTORY.of("reward_model"),
    },
    writes=TRAJECTORY.of("score"),
    config_keys=REWARD_KEYS,
    operational_keys=("reward.workers",),
    digests=("reward",),
)


def _mean_score(outputs: list[dict[str, Any]]) -> dict[str, float]:
    """Over everything that was scored; the advantages' metrics are over what is learned from."""
    total, count = (sum(shard[name] for shard in outputs) for name in ("sum_of_scores", "scored"))
    errors = sum(shard.get("errors", 0) for shard in outputs)
    return ({"reward/mean": total / count} if count else {}) | ({"reward/errors": float(errors)} if errors else {})


@rows(SPEC, summary=_mean_score)
def score(context: Context) -> TrajectoryBatch:
    batch = context.batch
    found = scores(context, batch)
    _, group = np.unique(batch.numpy("prompt_id").astype(str), return_inverse=True)
    kept = counting(context.config, found["reward_error"])
    group, counted = group[kept], list(compress(found["score"], kept))
    differ = Groups(torch.from_numpy(group)).differ(torch.tensor(counted))  # in the precision in which it is stored
    context.outputs |= {"sum_of_scores": float(sum(counted)), "scored": len(counted)}
    context.outputs["errors"] = sum(error is not None for error in found["reward_error"])
    context.outputs["prompts_that_differ"] = len(np.unique(group[differ.numpy()]))
    return TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), **found})


def counting(config: ConfigView, errors: Sequence[str | None]) -> np.ndarray:
    """Which rewards count, [batch]: where one failed, `reward.on_error` says."""
    return np.array([error is None or config.reward.on_error != "drop" for error in errors], dtype=bool)


def scores(context: Context, batch: TrajectoryBatch) -> dict[str, list[Any]]:
    """The columns of `score` for the responses of a batch: what functions, reward model and environment give together.
    What the model says is in the batch, or it is asked now."""
    found = _rewards(context, _asked(batch))
    more: list[dict[str, float]] = [{} for _ in found]
    """To add to what the functions say, by its name in the parts."""
    token_scores: list[Any] = [None] * len(found)
    weight = 1.0
    if (model := context.config.reward.model) is not None:
        columns = {name: batch.list(name) for name in SPEC.reads["reward_model"] if name in batch}
        said, weight = columns or judged(context, batch), model.weight
        for row, (score, steps) in enumerate(zip(said["model_score"], said["model_token_scores"], strict=True)):
            more[row]["model"] = score
            if steps is not None:
                token_scores[row] = np.multiply(steps, weight if found[row].error is None else 0, dtype=np.float32)
    for row, reward in enumerate(batch.list("environment_reward") if "environment_reward" in batch else ()):
        if reward is not None:
            more[row]["environment"] = reward
    for row, (one, others) in enumerate(zip(found, more, strict=True)):
        if others:
            rule = {} if context.config.reward.function is None else {"rule": one.score}
            total = one.score + weight * others.get("model", 0.0) + others.get("environment", 0.0)
            found[row] = Score(total if one.error is None else 0.0, one.parts | rule | others, one.error)
    return {
        "score": [one.score for one in found],
        "reward_parts": [list(one.parts.items()) for one in found],
        "token_scores": token_scores,
        "reward_error": [one.error for one in found],
    }


def _asked(batch: TrajectoryBatch) -> list[Row]:
    names = ("data_source", "response", "ground_truth", "ground_truth_is_json", "extra_info")
    rows = zip(*(batch.list(name) for name in names), strict=True)
    return [(source, response, *structures(*prompt)) for source, response, *prompt in rows]


def _rewards(context: Context, rows: list[Row]) -> list[Score]:
    """What the functions say. Raises why one has no score, if that is to stop the run."""
    config = context.config.reward
    if config.function is None:
        return [Score(0.0, {}) for _ in rows]
    found = []
    for one in context.worker.rewards(config.function, config.options, config.workers, config.timeout_s).score(rows):
        if isinstance(one, RatchetError):
            if config.on_error == "fail":
                raise type(one)(f"{one}: nothing of the shard is committed; mend the reward and resume")
            one = Score(0.0, {}, error=str(one))
        found.append(one)
    return found
