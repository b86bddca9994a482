"""score: the reward of every response."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from infra.workers.worker import Context
from rlhf.algorithms.groups import Groups
from rlhf.batch import TrajectoryBatch
from rlhf.rewards import load_reward
from rlhf.rewards import score as score_response
from rlhf.schema import TRAJECTORY
from tasks.spec import StageSpec
from tasks.stage import rows

SPEC = StageSpec(
    name="score",
    reads={"generate": ("prompt_id", "data_source", "response", "ground_truth", "extra_info")},
    writes=TRAJECTORY.of("score"),
    config_keys=("reward",),
    digests=("reward",),
)


def _mean_score(outputs: list[dict[str, Any]]) -> dict[str, float]:
    """Over everything that was scored; the advantages' metrics are over what is learned from."""
    total, count = (sum(shard[name] for shard in outputs) for name in ("sum_of_scores", "scored"))
    return {"reward/mean": total / count}


@rows(SPEC, summary=_mean_score)
def score(context: Context) -> TrajectoryBatch:
    batch = context.batch
    found = scores(context, batch)
    _, group = np.unique(batch.numpy("prompt_id").astype(str), return_inverse=True)
    differ = Groups(torch.from_numpy(group)).differ(torch.tensor(found["score"]))
    context.outputs |= {"sum_of_scores": float(sum(found["score"])), "scored": len(batch)}
    context.outputs["prompts_that_differ"] = len(np.unique(group[differ.numpy()]))
    return TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), **found})


def scores(context: Context, batch: TrajectoryBatch) -> dict[str, list[Any]]:
    """The columns of `score` for the responses of a batch."""
    function = load_reward(context.config.reward.function)
    asked = zip(*(batch.list(name) for name in ("data_source", "response", "ground_truth", "extra_info")), strict=True)
    found = [score_response(function, *row) for row in asked]
    return {
        "score": [one.score for one in found],
        "reward_parts": [list(one.parts.items()) for one in found],
        "token_scores": [None] * len(found),
        "reward_error": [None] * len(found),
    }
