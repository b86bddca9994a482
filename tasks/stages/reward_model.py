"""reward_model: scores every response, or each of its steps, with the reward model."""

from __future__ import annotations

from typing import Any

import numpy as np

from ratchet.infra.workers.calls import C, Context, ShardOutput, ShardSummary
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.sections import ClassifierConfig
from ratchet.rlhf.data.equal_text import text_lengths
from ratchet.rlhf.data.prompts import stored_chat
from ratchet.rlhf.schema import TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key, section
from ratchet.tasks.stage import RowsStage


class RewardModelStageConfig(StageConfig):
    model: ClassifierConfig = section("reward.model")
    special_tokens: str = key("data.special_tokens")


def reward_model(context: Context[RewardModelStageConfig]) -> ShardOutput[ShardSummary]:
    batch = context.batch
    columns = {"trajectory_id": batch.array("trajectory_id"), **model_scores(context, context.config.model, batch)}
    return ShardOutput(TrajectoryBatch.of(columns), ShardSummary())


def model_scores(context: Context[C], config: ClassifierConfig, batch: TrajectoryBatch) -> dict[str, list[Any]]:
    """Scores the responses of a batch with the reward model.

    Args:
        context: Context with the reward model and the policy's tokenizer.
        config: The section `reward.model`.
        batch: Trajectories with the columns in `REWARD_MODEL.reads`.

    Returns:
        `model_score`, a number per trajectory (0 if its environment failed), and `model_token_scores`: for a process
        reward model, float32 arrays of the lengths of the responses, where the score of a step is at its last token;
        otherwise None.
    """
    complete = is_complete(batch)
    if not complete.all():
        return _spread(model_scores(context, config, batch.take(np.flatnonzero(complete))), batch, complete)
    engine = context.engines.reward_model()
    chats = map(stored_chat, batch.list("messages"), batch.list("tools"))
    dialogues = list(zip(chats, batch.list("response"), strict=True))
    if config.kind == "outcome":
        response_scores = engine.scores(dialogues, micro_batch_tokens=config.micro_batch_tokens)
        return {"model_score": response_scores, "model_token_scores": [None] * len(response_scores)}
    token_scores = []
    steps = engine.steps(dialogues, config.step_separator, micro_batch_tokens=config.micro_batch_tokens)
    rows = zip(steps, batch.list("response_ids"), batch.list("response_mask"), strict=True)
    for row_steps, ids, mask in rows:
        scores = np.zeros(len(ids), dtype=np.float32)
        by_model = np.flatnonzero(mask)
        lengths = text_lengths(ids, context.resources.tokenizer)
        for step in row_steps:
            # a step ends at a character of the text: find the model's last token up to it
            end = np.searchsorted(lengths, step.end)
            last = int(np.searchsorted(by_model, end, side="right")) - 1
            # divided, so that the score of the response is the mean of its steps
            scores[by_model[max(last, 0)]] += step.score / len(row_steps)
        token_scores.append(scores)
    return {"model_score": [float(scores.sum()) for scores in token_scores], "model_token_scores": token_scores}


def is_complete(batch: TrajectoryBatch) -> np.ndarray:
    """Returns False for trajectories that a failure of the environment ended, shape (batch,)."""
    if "rollout_error" not in batch:
        return np.ones(len(batch), dtype=bool)
    return np.array([error is None for error in batch.list("rollout_error")], dtype=bool)


def _spread(given: dict[str, list[Any]], batch: TrajectoryBatch, complete: np.ndarray) -> dict[str, list[Any]]:
    """Extends the columns of the `complete` trajectories to a whole batch, with 0 for the others."""
    token_scores: list[Any] = [None] * len(batch)
    response_scores = [0.0] * len(batch)
    of_complete = zip(given["model_score"], given["model_token_scores"], strict=True)
    for row, (response_score, scores) in zip(np.flatnonzero(complete), of_complete, strict=True):
        response_scores[row], token_scores[row] = response_score, scores
    if any(scores is not None for scores in token_scores):
        lengths = batch.lengths("response_ids")
        for row in np.flatnonzero(~complete):
            token_scores[row] = np.zeros(lengths[row], dtype=np.float32)
    return {"model_score": response_scores, "model_token_scores": token_scores}


def exists(config: RunConfig) -> bool:
    return config.reward.model is not None


REWARD_MODEL = RowsStage(
    name="reward_model",
    label="model",
    config=RewardModelStageConfig,
    exists=exists,
    reads={"generate": ("messages", "tools", "response", "response_ids", "response_mask", "rollout_error")},
    writes=TRAJECTORY.of("reward_model"),
    compute=reward_model,
    summary=ShardSummary,
    outside=("reward_model",),
    role="reward",
)
