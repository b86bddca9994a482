"""score: the reward of every response."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from infra.workers.worker import Context
from rlhf.algorithms.groups import Groups
from rlhf.batch import TrajectoryBatch
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
        "generate": ("prompt_id", "data_source", "response", "ground_truth", "extra_info"),
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
    return {"reward/mean": total / count} | ({"reward/errors": float(errors)} if errors else {})


@rows(SPEC, summary=_mean_score)
def score(context: Context) -> TrajectoryBatch:
    batch = context.batch
    found = scores(context, batch)
    _, group = np.unique(batch.numpy("prompt_id").astype(str), return_inverse=True)
    differ = Groups(torch.from_numpy(group)).differ(torch.tensor(found["score"]))
    context.outputs |= {"sum_of_scores": float(sum(found["score"])), "scored": len(batch)}
    context.outputs["errors"] = sum(error is not None for error in found["reward_error"])
    context.outputs["prompts_that_differ"] = len(np.unique(group[differ.numpy()]))
    return TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), **found})


def scores(context: Context, batch: TrajectoryBatch) -> dict[str, list[Any]]:
    """The columns of `score` for the responses of a batch. Where there is a reward model, what it says of them is in
    the batch, or it is asked now."""
    names = ("data_source", "response", "ground_truth", "extra_info")
    found = _rewards(context, list(zip(*(batch.list(name) for name in names), strict=True)))
    token_scores: list[Any] = [None] * len(found)
    if (model := context.config.reward.model) is not None:
        columns = {name: batch.list(name) for name in SPEC.reads["reward_model"] if name in batch}
        said = columns or judged(context, batch)
        for row, (one, score) in enumerate(zip(found, said["model_score"], strict=True)):
            total = one.score + model.weight * score if one.error is None else 0.0
            rule = {} if context.config.reward.function is None else {"rule": one.score}
            found[row] = Score(total, one.parts | rule | {"model": score}, one.error)
            if (steps := said["model_token_scores"][row]) is not None:
                token_scores[row] = np.multiply(steps, model.weight if one.error is None else 0.0, dtype=np.float32)
    return {
        "score": [one.score for one in found],
        "reward_parts": [list(one.parts.items()) for one in found],
        "token_scores": token_scores,
        "reward_error": [one.error for one in found],
    }


def _rewards(context: Context, rows: list[Row]) -> list[Score]:
    """What the functions say. Raises why one has no score, if that is to stop the run."""
    config = context.config.reward
    if config.function is None:
        return [Score(0.0, {}) for _ in rows]
    found = []
    for one in context.worker.rewards(config.function, config.options, config.workers, config.timeout_s).score(rows):
        if isinstance(one, RatchetError):
            if config.on_error == "fail":
                raise one
            one = Score(0.0, {}, error=str(one))
        found.append(one)
    return found
