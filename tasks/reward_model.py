"""reward_model: what the reward model says of every response, or of each of its steps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.engines.reward_engine import text_lengths
from rlhf.errors import UserError
from rlhf.schema import TRAJECTORY
from tasks.spec import StageSpec
from tasks.stage import rows

MODEL_KEYS = ("reward.model.kind", "reward.model.dtype", "reward.model.step_separator")
MODEL_OPERATIONAL_KEYS = ("reward.model.micro_batch_tokens",)

SPEC = StageSpec(
    name="reward_model",
    reads={"generate": ("messages", "response", "response_ids", "response_mask")},
    writes=TRAJECTORY.of("reward_model"),
    config_keys=MODEL_KEYS,
    operational_keys=MODEL_OPERATIONAL_KEYS,
    digests=("reward_model",),
    role="reward",
)


@rows(SPEC)
def reward_model(context: Context) -> TrajectoryBatch:
    batch = context.batch
    return TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), **judged(context, batch)})


def judged(context: Context, batch: TrajectoryBatch) -> dict[str, list[Any]]:
    """The columns of `reward_model` for the responses of a batch."""
    config, engine = context.config.reward.model, context.worker.engine("reward")
    if batch.array("messages").null_count:
        raise UserError(
            "these trajectories were generated before their messages were stored, so that a reward model cannot read "
            "them: generate anew"
        )
    messages = [json.loads(each) for each in batch.list("messages")]
    asked = list(zip(messages, batch.list("response"), strict=True))
    if config.kind == "outcome":
        found = engine.scores(asked, micro_batch_tokens=config.micro_batch_tokens)
        return {"model_score": found, "model_token_scores": [None] * len(found)}
    token_scores = []
    steps = engine.steps(asked, config.step_separator, micro_batch_tokens=config.micro_batch_tokens)
    written = zip(steps, batch.list("response_ids"), batch.list("response_mask"), strict=True)
    for of_steps, ids, mask in written:
        scores = np.zeros(len(ids), dtype=np.float32)
        by_model = np.flatnonzero(mask)
        lengths = text_lengths(ids, context.tokenizer)
        for step in of_steps:
            at = np.searchsorted(lengths, step.end)
            last = int(np.searchsorted(by_model, at, side="right")) - 1
            scores[by_model[max(last, 0)]] += step.score / len(of_steps)
        token_scores.append(scores)
    return {"model_score": [float(each.sum()) for each in token_scores], "model_token_scores": token_scores}
