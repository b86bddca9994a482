"""turn_values: estimates the value of each turn's state by playing on from it several times.

The value of a state is the mean of what its `rollout.continuations` continuations earn from there on (VinePPO, arXiv
2410.01679). For the state after the prompt, the group's other trajectories are continuations that the iteration has
anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ratchet.infra.workers.calls import Context, ShardOutput, ShardStart, ShardSummary
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.engines import RolloutEngine
from ratchet.rlhf.config.sections import EnvironmentConfig, RewardConfig, SamplingConfig
from ratchet.rlhf.data.prompts import stored_chat
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import CONTINUED, Beginning, Dialogue
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.schema import IMAGES, TRAJECTORY, TURN_IMAGES, prompt_images
from ratchet.rlhf.stage_config import StageConfig, key, section
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.stages.generate import PROMPT_COLUMNS, check_errors, environment_rules, turn_columns
from ratchet.tasks.stages.reward_model import is_complete
from ratchet.tasks.stages.score import counting, scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TurnValuesConfig(StageConfig):
    seed: int = key("run.seed")
    dtype: str = key("model.dtype")
    engine: RolloutEngine = key("rollout.engine")
    sampling: SamplingConfig = section("rollout")
    continuations: int = key("rollout.continuations")
    environment: EnvironmentConfig = section("rollout.environment")
    reward: RewardConfig = section("reward")
    special_tokens: str = key("data.special_tokens")


class TurnValuesSummary(ShardSummary):
    continuations: int
    turns: int
    """Turns of the continuations that the environments answered."""
    errors: int = 0
    """Continuations whose environment or reward failed."""


def begin(context: Context[TurnValuesConfig]) -> ShardStart:
    """Starts the continuations of all states, trajectory by trajectory."""
    config = context.config
    dialogues: list[Dialogue] = []
    for row in context.batch.table.to_pylist():
        chat = stored_chat(row["messages"], row["tools"])
        beginning = Beginning(
            chat.messages, row["ground_truth"], row["ground_truth_is_json"], row["extra_info"], chat.tools
        )
        seen = context.stored_images(row[IMAGES])
        ids, images = tuple(row["prompt_ids"]), tuple(prompt_images(seen, row[TURN_IMAGES]))
        for turn in range(1, len(row["turn_ends"])):
            prefix = _prefix(row, turn, seen[len(images) :])
            for number in range(config.continuations):
                name = f"{row['trajectory_id']}-t{turn:02d}-c{number:02d}"
                dialogues.append(Dialogue.continuing(Request(name, ids, images=images), beginning, prefix))
    sampling = Sampling.of_rollout(config.sampling, config.seed)
    return ShardStart(tuple(dialogues), environment_rules(context, config.environment, sampling))


def _prefix(row: Mapping[str, Any], turn: int, images: Sequence[bytes]) -> dict[str, Any]:
    """Returns a stored trajectory up to where a turn begins, whose environment answered with images; see
    `Dialogue.continuing`."""
    end, of_turns = row["turn_starts"][turn], {name: (row[name] or [])[:turn] for name in CONTINUED}
    return {
        "ids": row["response_ids"][:end],
        "log_probs": row["rollout_log_probs"][:end],
        "mask": row["response_mask"][:end],
        "versions": (row["token_versions"] or [row["policy_version"]] * end)[:end],
        "states": (row["turn_states"] or [])[:turn],
        "images": list(images[: sum(of_turns[TURN_IMAGES])]),
        **of_turns,
    }


def turn_values(context: Context[TurnValuesConfig]) -> ShardOutput[TurnValuesSummary]:
    """Scores the continuations, and writes what they earn and the mean of it to each turn of the trajectories."""
    config, batch, played = context.config, context.batch, context.dialogues
    check_errors(context.call, played, config.environment)
    turns = [len(ends) for ends in batch.list("turn_ends")]
    states = [(row, turn) for row, count in enumerate(turns) for turn in range(1, count)]
    earned = _earned(context, [row for row, _ in states for _ in range(config.continuations)])
    before = [np.cumsum([0.0, *rewards]) for rewards in batch.list("turn_rewards")]
    returns: list[list[list[float]]] = [[of_others] for of_others in _of_others(config, batch)]
    told: list[list[dict[str, Any]]] = [[] for _ in turns]
    for number, (row, turn) in enumerate(states):
        of_state = slice(number * config.continuations, (number + 1) * config.continuations)
        from_there = [None if score is None else float(score - before[row][turn]) for score in earned[of_state]]
        returns[row].append([value for value in from_there if value is not None])
        for dialogue, value in zip(played[of_state], from_there, strict=True):
            told[row].append(_told(dialogue, turn, value, context.resources.tokenizer))
    columns = {
        "trajectory_id": batch.array("trajectory_id"),
        "turn_values": [[float(np.mean(values)) if values else None for values in of_turns] for of_turns in returns],
        "continuation_returns": [of_turns[: max(count, 1)] for of_turns, count in zip(returns, turns, strict=True)],
        "continuations": told,
    }
    summary = TurnValuesSummary(
        continuations=len(played),
        turns=sum(dialogue.answered - len(dialogue.prefix["turn_rewards"]) for dialogue in played if dialogue.prefix),
        errors=sum(score is None for score in earned),
    )
    return ShardOutput(TrajectoryBatch.of(columns), summary)


def _told(dialogue: Dialogue, turn: int, earned: float | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Returns what is stored of a continuation: how it went on after a turn, without what it continued."""
    assert dialogue.prefix is not None
    begin = len(dialogue.prefix["ids"])
    ids = dialogue.ids[begin:]
    return {
        "turn": turn,
        "earned": earned,
        "finish_reason": dialogue.finish_reason,
        "error": dialogue.error,
        "response": response_text(ids, tokenizer),
        "response_ids": ids,
        "response_mask": dialogue.mask[begin:],
    }


def _earned(context: Context[TurnValuesConfig], rows: Sequence[int]) -> list[float | None]:
    """Returns the score of each continuation, as if its trajectory had gone on like this; None if it failed.

    Args:
        rows: the row of the trajectory that each continues.
    """
    if not rows:
        return []
    config, played, tokenizer = context.config, context.dialogues, context.resources.tokenizer
    written = [turn_columns(dialogue, tokenizer) for dialogue in played]
    own = {name: [row[name] for row in written] for name in written[0]}
    own |= {
        "trajectory_id": [dialogue.request.trajectory_id for dialogue in played],
        "finish_reason": [dialogue.finish_reason for dialogue in played],
        "response": [response_text(dialogue.ids, tokenizer) for dialogue in played],
        "response_ids": [dialogue.ids for dialogue in played],
        "response_mask": [dialogue.mask for dialogue in played],
        "rollout_error": [dialogue.error for dialogue in played],
        "environment_reward": [dialogue.reward for dialogue in played],
    }
    shared = context.batch.take(rows)
    continued = TrajectoryBatch.of({name: shared.array(name) for name in shared.columns} | own)
    scored = scores(context, config.reward, config.reward.model, continued)
    kept = counting(config.reward.on_error, scored["reward_error"]) & is_complete(continued)
    return [score if counts else None for score, counts in zip(scored["score"], kept, strict=True)]


def _of_others(config: TurnValuesConfig, batch: TrajectoryBatch) -> list[list[float]]:
    """Returns for each trajectory the scores of the others of its prompt."""
    prompts, scored = batch.list("prompt_id"), batch.list("score")
    kept = counting(config.reward.on_error, batch.list("reward_error")) & is_complete(batch)
    members: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(prompts):
        members.setdefault(prompt_id, []).append(row)
    return [
        [scored[other] for other in members[prompt_id] if other != row and kept[other]]
        for row, prompt_id in enumerate(prompts)
    ]


def turn_value_metrics(summaries: Sequence[TurnValuesSummary]) -> dict[str, float]:
    errors = sum(shard.errors for shard in summaries)
    metrics = {
        "turn_values/continuations": float(sum(shard.continuations for shard in summaries)),
        "turn_values/turns": float(sum(shard.turns for shard in summaries)),
    }
    return metrics | ({"turn_values/errors": float(errors)} if errors else {})


def exists(config: RunConfig) -> bool:
    return config.train.updates and config.needs_turn_values


TURN_VALUES = RowsStage(
    name="turn_values",
    label="mc",
    config=TurnValuesConfig,
    exists=exists,
    reads={
        "generate": (
            *PROMPT_COLUMNS,
            "sample",
            "response_ids",
            "response_mask",
            "rollout_log_probs",
            "policy_version",
            "token_versions",
            "rollout_error",
            *CONTINUED,
            "turn_states",
        ),
        "select": (),
        "score": ("score", "reward_error"),
    },
    writes=TRAJECTORY.of("turn_values"),
    version=2,
    compute=turn_values,
    begin=begin,
    summary=TurnValuesSummary,
    metrics=turn_value_metrics,
    outside=("reward", "tokenizer", "environment"),
    role="rollout",
)
