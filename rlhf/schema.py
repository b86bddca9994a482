"""The columns of the trajectories: name, Arrow type, meaning, unit, and the stage that writes them.

One row is one trajectory. Per-token columns, marked `[T]`, cover only the tokens of the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
_TOKENS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())
MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
"""Type of a column of messages."""
PARTS = pa.list_(pa.struct({"name": pa.string(), "value": pa.float32()}))
"""Type of a column of named parts of a reward. A map would be unreadable for `datasets`; see decision 045."""
SECONDS = pa.list_(pa.struct({"model": pa.float64(), "tool": pa.float64(), "waiting": pa.float64()}))
"""Type of a column of the seconds of turns."""
CONTINUATIONS = pa.list_(
    pa.struct(
        {
            "turn": pa.int16(),
            "earned": pa.float32(),
            "finish_reason": pa.string(),
            "error": pa.string(),
            "response": pa.string(),
            "response_ids": _TOKENS,
            "response_mask": pa.list_(pa.int8()),
        }
    )
)
"""Type of a column of trajectories that play on from turns of others."""
IMAGES = "images"
"""The column of the images among the tokens."""
TURN_IMAGES = "turn_images"
"""The column of how many of them answered each turn."""
READ = ("prompt_ids", "response_ids", "response_mask", IMAGES, TURN_IMAGES)
"""The columns of what a model reads of a trajectory."""
ROUTES = "routed_experts"
"""The column of the experts that the rollout chose."""


def prompt_images(images: Sequence[T] | None, turn_images: Sequence[int] | None) -> Sequence[T]:
    """Returns those of a trajectory's images that are in its prompt.

    Args:
        images: one for each image of the column `images`; None: there are none.
        turn_images: the cell of the column of this name.
    """
    images = () if images is None else images
    return images[: len(images) - sum(() if turn_images is None else turn_images)]


def parts_of(cell: Sequence[Mapping[str, object]] | None) -> dict[str, float]:
    """Decodes a cell of a column of `PARTS`; empty if it is null."""
    return {str(part["name"]): part["value"] for part in cell or ()}  # type: ignore[misc]  # Arrow has checked them


def frame_of(table: pa.Table) -> pd.DataFrame:
    """Converts a table to pandas, with a dictionary, or None, for each cell of a column of `PARTS`."""
    import pandas as pd

    frame: pd.DataFrame = table.to_pandas()
    for field in table.schema:
        if field.type == PARTS:
            cells: list[object] = [cell if cell is None else parts_of(cell) for cell in table[field.name].to_pylist()]
            frame[field.name] = pd.Series(cells, index=frame.index, dtype=object)
    return frame


def branch_id(trajectory_id: str, number: int) -> str:
    """Returns the id of a row: its trajectory's, with the number of the branch for an agent's further conversations."""
    return f"{trajectory_id}-b{number:02d}" if number else trajectory_id


def trajectory_of(row_id: str) -> str:
    """Returns the trajectory of a row; see `branch_id`."""
    return row_id.partition("-b")[0]


@dataclass(frozen=True)
class Column:
    """A column of the trajectories. Its Arrow type is the same in all stages."""

    name: str
    type: pa.DataType
    stage: str
    meaning: str = ""
    unit: str = ""
    null: str = ""
    """When it is null; empty: never."""
    is_measured: bool = False
    """True if it holds measured times, which differ whenever the same trajectory is computed again."""


@dataclass(frozen=True)
class TrajectorySchema:
    """All columns, in the order of the stages that write them."""

    columns: tuple[Column, ...]

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    def __getitem__(self, name: str) -> Column:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def type_of(self, name: str) -> pa.DataType | None:
        """Returns the type of a column, or None if it is not in the schema."""
        return self[name].type if name in self else None

    def of(self, stage: str) -> tuple[Column, ...]:
        """Returns the columns that a stage writes, without `trajectory_id`."""
        return tuple(column for column in self.columns if column.stage == stage)

    def names(self, stage: str) -> tuple[str, ...]:
        """Returns the names of the columns that a stage writes, without `trajectory_id`."""
        return tuple(column.name for column in self.of(stage))

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """The stages that write these columns, in order."""
        return tuple(dict.fromkeys(column.stage for column in self.columns if column.stage))

    def arrow(self, names: tuple[str, ...]) -> pa.Schema:
        return pa.schema([pa.field(name, self[name].type) for name in names])


TRAJECTORY = TrajectorySchema(
    (
        Column(
            "trajectory_id",
            pa.string(),
            "",
            "stable id, such as it000007-p00012-s03: iteration, prompt, sample; an agent's further conversations end "
            "in -b01, -b02",
        ),
        Column("prompt_id", pa.string(), "generate", "id of the prompt, which is also the trajectory's group"),
        Column("sample", pa.int32(), "generate", "index of the trajectory among those of its prompt", "index"),
        Column(
            "dataset_row", pa.int64(), "generate", "row of the prompt in the files, counted over all of them", "index"
        ),
        Column("data_source", pa.string(), "generate", "data source of the prompt"),
        Column("messages", pa.string(), "generate", "messages of the prompt [{role, content}], as JSON"),
        Column(
            "tools",
            pa.string(),
            "generate",
            "JSON schemas of the functions that the prompt's row offers, a list as JSON",
            null="the row has no tools",
        ),
        Column(
            "prompt_is_text",
            pa.bool_(),
            "generate",
            "whether the dataset has the prompt as a text, and not as messages",
        ),
        Column("prompt", pa.string(), "generate", "text of the prompt, rendered by the chat template"),
        Column("response", pa.string(), "generate", "text of the response"),
        Column("prompt_ids", _TOKENS, "generate", "tokens of the prompt", "token id"),
        Column("response_ids", _TOKENS, "generate", "tokens of the response, including end-of-sequence", "token id"),
        Column(
            "rollout_log_probs",
            _FLOATS,
            "generate",
            "log-probs [T] from the rollout engine; 0 for an expert's tokens",
            "nat",
        ),
        Column(
            "response_mask", pa.list_(pa.int8()), "generate", "1 [T] if the model wrote the token, else 0", "0 or 1"
        ),
        Column(
            "finish_reason",
            pa.string(),
            "generate",
            "stop (the response ended), length (token limit), turns (rollout.environment.max_turns), or error "
            "(rollout_error)",
        ),
        Column(
            "policy_version",
            pa.int32(),
            "generate",
            "number of updates of the weights that drew the first token",
            "iterations",
        ),
        Column(
            "replayed_from",
            pa.string(),
            "generate",
            "run, iteration and id of the trajectory that this one repeats, or file and row of an expert's answer "
            "(data.replay)",
            null="it was generated",
        ),
        Column("by_expert", pa.bool_(), "generate", "whether the answer is an expert's (data.replay.files)"),
        Column(
            "token_versions",
            pa.list_(pa.int32()),
            "generate",
            "policy_version of each token [T]",
            "iterations",
            null="the tokens do not differ in it",
        ),
        Column(
            "ground_truth",
            pa.string(),
            "generate",
            "ground truth of the prompt: a text, or JSON",
            null="the prompt has none",
        ),
        Column("ground_truth_is_json", pa.bool_(), "generate", "whether ground_truth is JSON: it was not a text"),
        Column(
            "extra_info",
            pa.string(),
            "generate",
            "extra_info of the prompt in the dataset, as JSON",
            null="the prompt has none",
        ),
        Column(
            "turns",
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
            "generate",
            "turns of the policy and the environment, or the agent, in the response",
            null="there is neither a rollout.environment nor a rollout.agent",
        ),
        Column(
            "rollout_error",
            pa.string(),
            "generate",
            "error of the environment or the agent that ended the trajectory",
            null="nothing failed",
        ),
        Column(
            "tool_error",
            pa.string(),
            "generate",
            "first error of a tool in the trajectory, which read it and went on",
            null="no tool failed, or there are none",
        ),
        Column(
            "environment_reward",
            pa.float32(),
            "generate",
            "sum of the environment's rewards, of turn_rewards; or the reward that the agent returned",
            null="there is no rollout.environment, and no agent that returned a reward",
        ),
        Column(
            "turn_rewards",
            _FLOATS,
            "generate",
            "the environment's reward for each turn of the policy; 0 for a turn that it did not answer",
            null="there is no rollout.environment",
        ),
        Column(
            "turn_starts",
            _TOKENS,
            "generate",
            "position in the response of the first token of each turn of the policy",
            "tokens",
            null="there is neither a rollout.environment nor a rollout.agent",
        ),
        Column(
            "turn_ends",
            _TOKENS,
            "generate",
            "position in the response after the last token of each turn of the policy",
            "tokens",
            null="there is neither a rollout.environment nor a rollout.agent",
        ),
        Column(
            "turn_states",
            pa.list_(pa.string()),
            "generate",
            "state of the environment after each turn that it has answered, as its snapshot returned it",
            null="the environment has no `snapshot`",
        ),
        Column(
            "turn_seconds",
            SECONDS,
            "generate",
            "what each turn of the policy took: `model`, in the rollout engine; `tool`, in the environment or the "
            "agent's program, from the answer to its next call; `waiting`, for new weights, a free slot or the store; "
            "null what was not measured, such as before a crash",
            "s",
            null="there is neither a rollout.environment nor a rollout.agent, or the run is older",
            is_measured=True,
        ),
        Column(
            "branch",
            pa.int32(),
            "generate",
            "index of the conversation among those of the trajectory, one row each",
            "index",
            null="there is no rollout.agent",
        ),
        Column(
            "calls",
            pa.list_(
                pa.struct(
                    [
                        ("asked", pa.string()),
                        ("answer", pa.string()),
                        ("start", pa.int32()),
                        ("end", pa.int32()),
                        ("started", pa.float64()),
                        ("seconds", pa.float64()),
                    ]
                )
            ),
            "generate",
            "calls of the agent: what each added to the conversation and the policy's message, as JSON; the position "
            "of the answer's first token and after its last; time since 1970 and duration, in seconds",
            null="there is no rollout.agent",
        ),
        Column(
            "agent_parts",
            PARTS,
            "generate",
            "named parts of the reward that the agent returned; or sums of those of the environment's observations",
            null="there is neither a rollout.environment nor a rollout.agent",
        ),
        Column(
            IMAGES,
            pa.list_(pa.string()),
            "generate",
            "sha256 of each image among the tokens, in order; the run's folder has them as images/<sha256>",
            null="there are none",
        ),
        Column(
            TURN_IMAGES,
            pa.list_(pa.int32()),
            "generate",
            "how many of the images, the last ones, are in the environment's answer to each turn of the policy",
            null="the environment answered with none",
        ),
        Column(
            ROUTES,
            pa.large_list(pa.int16()),
            "generate",
            "experts that the model chose for each token that it read [(P + T - 1) L k]: token by token, then layer by "
            "layer with experts, the k that the router chose; -1 where they are not known; an empty list if none is, "
            "as for an expert's answer",
            "index of the expert",
            null="rollout.router_replay is false",
        ),
        Column("seed", pa.int64(), "generate", "seed of the run, from which sampling derives"),
        Column("model_score", pa.float32(), "reward_model", "score of the reward model; mean of a process reward"),
        Column(
            "model_token_scores",
            _FLOATS,
            "reward_model",
            "share [T] of each step in model_score, at the step's last token",
            null="the reward model scores whole responses",
        ),
        Column("score", pa.float32(), "score", "reward of the whole response"),
        Column("reward_parts", PARTS, "score", "named parts of the reward"),
        Column(
            "token_scores",
            _FLOATS,
            "score",
            "part of the score that belongs to single tokens [T]: a process reward, and turn_rewards",
            null="there is neither a process reward nor a rollout.environment",
        ),
        Column("reward_error", pa.string(), "score", "error that prevented the reward", null="nothing failed"),
        Column("group_spread", pa.float32(), "select", "largest minus smallest score in the trajectory's group"),
        Column("greedy_response", pa.string(), "greedy_baseline", "greedy answer of the actor to the prompt"),
        Column("greedy_tokens", pa.int32(), "greedy_baseline", "length of the greedy answer", "tokens"),
        Column(
            "greedy_score",
            pa.float32(),
            "greedy_baseline",
            "reward of the greedy answer",
            null="it failed and reward.on_error is drop, which leaves the prompt out",
        ),
        Column(
            "greedy_error",
            pa.string(),
            "greedy_baseline",
            "error that prevented the greedy reward",
            null="nothing failed",
        ),
        Column(
            "turn_values",
            _FLOATS,
            "turn_values",
            "value of the state in which each turn of the policy begins: mean of continuation_returns; null within the "
            "list if all continuations failed",
        ),
        Column(
            "continuation_returns",
            pa.list_(_FLOATS),
            "turn_values",
            "what each continuation of the state in which a turn begins earned from there on; those of the first turn "
            "are the scores of the prompt's other trajectories",
        ),
        Column(
            "continuations",
            CONTINUATIONS,
            "turn_values",
            "the trajectories that were played on: after how many turns of the policy, what they earned from there on "
            "(null if they failed), and what followed, as text and tokens",
        ),
        Column("old_log_probs", _FLOATS, "old_log_probs", "log-probs [T] from the actor before the update", "nat"),
        Column("entropy", _FLOATS, "old_log_probs", "entropy [T] of the actor's distribution", "nat"),
        Column(
            "sum_pi_squared",
            _FLOATS,
            "old_log_probs",
            "sum [T] of the squared probabilities of the actor's distribution",
            null="no algorithm.advantage needs it",
        ),
        Column("ref_log_probs", _FLOATS, "ref_log_probs", "log-probs [T] from the reference", "nat"),
        Column(
            "teacher_log_probs",
            _FLOATS,
            "teacher_log_probs",
            "log-probs [T] from the teacher; with teacher.align text, that of a span is at its last token, and the "
            "others are 0",
            "nat",
        ),
        Column(
            "teacher_spans",
            _TOKENS,
            "teacher_log_probs",
            "number of the span of text [T], from 0, that each token belongs to",
            null="teacher.align is tokens",
        ),
        Column(
            "teacher_topk_ids",
            _TOKENS,
            "teacher_log_probs",
            "the k most likely tokens of the teacher at each token [T k], the most likely first; k is teacher.top_k",
            "token id",
            null="teacher.top_k is 0",
        ),
        Column(
            "teacher_topk_log_probs",
            _FLOATS,
            "teacher_log_probs",
            "their log-probs [T k] from the teacher",
            "nat",
            null="teacher.top_k is 0",
        ),
        Column(
            "teacher_tail_log_probs",
            _FLOATS,
            "teacher_log_probs",
            "log of the probability [T] that the teacher gives to all other tokens; at least -100",
            "nat",
            null="teacher.top_k is 0",
        ),
        Column("values", _FLOATS, "values", "values [T] from the critic before the update"),
        Column(
            "token_rewards",
            _FLOATS,
            "advantages",
            "reward [T]: token_scores, plus the rest of the score and the length penalty at the last token that the "
            "model wrote, minus the KL penalty",
        ),
        Column("advantages", _FLOATS, "advantages", "advantages [T]"),
        Column("returns", _FLOATS, "advantages", "target [T] of the critic"),
        Column(
            "loss_mask", pa.list_(pa.int8()), "advantages", "1 [T] if the token enters the losses, else 0", "0 or 1"
        ),
        Column(
            "rollout_is_weights",
            _FLOATS,
            "advantages",
            "importance weights [T]",
            null="there is no algorithm.rollout_correction.weights",
        ),
    )
)
