"""greedy_baseline: scores the actor's greedy answer to each prompt, the baseline of ReMax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ratchet.infra.workers.calls import Context, ShardOutput, ShardStart, ShardSummary
from ratchet.rlhf.agents.agent_loop import Rules
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.engines import RolloutEngine
from ratchet.rlhf.config.sections import RewardConfig
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.schema import IMAGES, TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key, section
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.stages.generate import PROMPT_COLUMNS
from ratchet.tasks.stages.score import counting, scores


class GreedyBaselineConfig(StageConfig):
    dtype: str = key("model.dtype")
    engine: RolloutEngine = key("rollout.engine")
    max_response_tokens: int = key("rollout.max_response_tokens")
    ignore_eos: bool = key("rollout.ignore_eos")
    stop: tuple[str, ...] = key("rollout.stop")
    reward: RewardConfig = section("reward")
    special_tokens: str = key("data.special_tokens")


class GreedyBaselineSummary(ShardSummary):
    errors: int = 0


def begin(context: Context[GreedyBaselineConfig]) -> ShardStart:
    config = context.config
    prompts, _ = _prompts(context.batch)
    rows = zip(*(prompts.list(name) for name in ("prompt_id", "prompt_ids", IMAGES)), strict=True)
    dialogues = tuple(
        Dialogue(Request(f"{prompt_id}-greedy", tuple(ids), images=context.stored_images(images)))
        for prompt_id, ids, images in rows
    )
    sampling = Sampling(
        temperature=0.0,
        top_p=1.0,
        max_tokens=config.max_response_tokens,
        seed=0,
        ignore_eos=config.ignore_eos,
        stop=config.stop,
    )
    return ShardStart(dialogues, Rules(sampling))


def _prompts(batch: TrajectoryBatch) -> tuple[TrajectoryBatch, np.ndarray]:
    """Returns the first trajectory of each prompt, and for each trajectory the number of its prompt."""
    _, first, of_row = np.unique(batch.numpy("prompt_id").astype(str), return_index=True, return_inverse=True)
    return batch.take(first), of_row


def greedy_baseline(context: Context[GreedyBaselineConfig]) -> ShardOutput[GreedyBaselineSummary]:
    """Scores the greedy answers, and writes each answer and its score to every trajectory of the prompt."""
    config, batch = context.config, context.batch
    prompts, of_row = _prompts(batch)
    responses = [dialogue.ids for dialogue in context.dialogues]
    texts = [response_text(response, context.resources.tokenizer) for response in responses]
    written = {
        "trajectory_id": [dialogue.request.trajectory_id for dialogue in context.dialogues],
        "finish_reason": [dialogue.finish_reason for dialogue in context.dialogues],
        "response": texts,
        "response_ids": responses,
        "response_mask": [[1] * len(response) for response in responses],
    }
    answers = TrajectoryBatch.of({name: prompts.array(name) for name in prompts.columns} | written)
    scored = scores(context, config.reward, config.reward.model, answers)
    counted = counting(config.reward.on_error, scored["reward_error"])
    columns: dict[str, list[Any]] = {
        "greedy_response": texts,
        "greedy_tokens": [len(response) for response in responses],
        "greedy_score": [score if counts else None for score, counts in zip(scored["score"], counted, strict=True)],
        "greedy_error": scored["reward_error"],
    }
    spread = {name: [values[prompt] for prompt in of_row] for name, values in columns.items()}
    summary = GreedyBaselineSummary(errors=sum(error is not None for error in scored["reward_error"]))
    return ShardOutput(TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), **spread}), summary)


def greedy_errors(summaries: Sequence[GreedyBaselineSummary]) -> dict[str, float]:
    errors = sum(shard.errors for shard in summaries)
    return {"reward/greedy_errors": float(errors)} if errors else {}


def exists(config: RunConfig) -> bool:
    return config.train.updates and config.needs_greedy_scores


GREEDY_BASELINE = RowsStage(
    name="greedy_baseline",
    label="greedy",
    config=GreedyBaselineConfig,
    exists=exists,
    reads={
        "generate": PROMPT_COLUMNS,
        "select": (),
    },
    writes=TRAJECTORY.of("greedy_baseline"),
    compute=greedy_baseline,
    begin=begin,
    summary=GreedyBaselineSummary,
    metrics=greedy_errors,
    outside=("reward", "tokenizer"),
    role="rollout",
)
