"""reward_model: what the reward model says of every response, or of each of its steps."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np

from infra.workers.calls import C, Context, ShardOutput, ShardSummary
from rlhf.batch import TrajectoryBatch
from rlhf.config import RunConfig
from rlhf.engines.reward_engine import text_lengths
from rlhf.errors import UserError
from rlhf.schema import TRAJECTORY
from rlhf.stage_config import StageConfig, key
from tasks.stage import RowsStage


class RewardModelConfig(StageConfig):
    section = "reward.model"
    kind: Literal["outcome", "process"] = key("kind")
    dtype: str = key("dtype")
    step_separator: str = key("step_separator")
    micro_batch_tokens: int = key("micro_batch_tokens", operational=True)


def reward_model(context: Context[RewardModelConfig]) -> ShardOutput[ShardSummary]:
    batch = context.batch
    columns = {"trajectory_id": batch.array("trajectory_id"), **model_scores(context, context.config, batch)}
    return ShardOutput(TrajectoryBatch.of(columns), ShardSummary())


def model_scores(context: Context[C], config: RewardModelConfig, batch: TrajectoryBatch) -> dict[str, list[Any]]:
    """The columns of `reward_model` for the responses of a batch."""
    engine = context.engines.reward_model()
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
        lengths = text_lengths(ids, context.resources.tokenizer)
        for step in of_steps:
            at = np.searchsorted(lengths, step.end)
            last = int(np.searchsorted(by_model, at, side="right")) - 1
            scores[by_model[max(last, 0)]] += step.score / len(of_steps)
        token_scores.append(scores)
    return {"model_score": [float(each.sum()) for each in token_scores], "model_token_scores": token_scores}


def exists(config: RunConfig) -> bool:
    return config.reward.model is not None


REWARD_MODEL = RowsStage(
    name="reward_model",
    label="model",
    config=RewardModelConfig,
    exists=exists,
    reads={"generate": ("messages", "response", "response_ids", "response_mask")},
    writes=TRAJECTORY.of("reward_model"),
    compute=reward_model,
    summary=ShardSummary,
    outside=("reward_model",),
    role="reward",
)
