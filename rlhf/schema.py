"""The columns of a trajectory: name, Arrow type, meaning, unit, and the stage that writes each.

One row is one trajectory. Per-token columns (`[T]`) cover the response's tokens only.
"""

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

_TOKENS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())


@dataclass(frozen=True)
class Column:
    """A column of the trajectories. Its values have one Arrow type, whatever stage or release wrote them."""

    name: str
    type: pa.DataType
    stage: str
    meaning: str = ""
    unit: str = ""


@dataclass(frozen=True)
class TrajectorySchema:
    columns: tuple[Column, ...]

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    def __getitem__(self, name: str) -> Column:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def type_of(self, name: str) -> pa.DataType | None:
        """A column's type; None if the schema does not have it."""
        return self[name].type if name in self else None

    def of(self, stage: str) -> tuple[Column, ...]:
        """The columns that a stage writes, besides `trajectory_id`."""
        return tuple(column for column in self.columns if column.stage == stage)

    def names(self, stage: str) -> tuple[str, ...]:
        """Names of the columns that a stage writes, besides `trajectory_id`."""
        return tuple(column.name for column in self.of(stage))

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """The stages that write these columns, in order."""
        return tuple(dict.fromkeys(column.stage for column in self.columns if column.stage))

    def arrow(self, names: tuple[str, ...]) -> pa.Schema:
        return pa.schema([pa.field(name, self[name].type) for name in names])


TRAJECTORY = TrajectorySchema(
    (
        Column("trajectory_id", pa.string(), "", "stable id, such as it000007-p00012-s03: iteration, prompt, sample"),
        Column("prompt_id", pa.string(), "generate", "the trajectory's group: the prompt it answers"),
        Column("sample", pa.int32(), "generate", "which of the prompt's samples", "index"),
        Column("data_source", pa.string(), "generate", "where the prompt comes from"),
        Column("messages", pa.string(), "generate", "the prompt's messages [{role, content}], as JSON"),
        Column("prompt", pa.string(), "generate", "the prompt as the model reads it"),
        Column("response", pa.string(), "generate", "the response's text"),
        Column("prompt_ids", _TOKENS, "generate", "the prompt's tokens", "token id"),
        Column("response_ids", _TOKENS, "generate", "the response's tokens, end-of-sequence included", "token id"),
        Column("rollout_log_probs", _FLOATS, "generate", "log-probs [T] by the rollout engine", "nat"),
        Column("response_mask", pa.list_(pa.int8()), "generate", "1 [T] where the model wrote the token", "0 or 1"),
        Column(
            "finish_reason",
            pa.string(),
            "generate",
            "stop (its end), length (no room for more), or turns (rollout.environment.max_turns)",
        ),
        Column(
            "policy_version",
            pa.int32(),
            "generate",
            "updates that the actor had seen that drew the first token",
            "iterations",
        ),
        Column(
            "token_versions",
            pa.list_(pa.int32()),
            "generate",
            "the same for each token [T], if they differ",
            "iterations",
        ),
        Column("ground_truth", pa.string(), "generate", "what the reward compares with: a text, or else JSON"),
        Column("ground_truth_is_json", pa.bool_(), "generate", "whether it is JSON: no text in the dataset"),
        Column("extra_info", pa.string(), "generate", "what else the dataset says of the prompt, as JSON"),
        Column(
            "turns",
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
            "generate",
            "the response as turns of policy and environment, if there is one",
        ),
        Column("environment_reward", pa.float32(), "generate", "what the environment gave, if there is one"),
        Column("seed", pa.int64(), "generate", "the run's seed, from which sampling derives"),
        Column("model_score", pa.float32(), "reward_model", "the reward model's score; of a process reward, the mean"),
        Column(
            "model_token_scores",
            _FLOATS,
            "reward_model",
            "of a process reward, [T] each step's share of that mean, at its last token",
        ),
        Column("score", pa.float32(), "score", "the reward of the whole response"),
        Column("reward_parts", pa.map_(pa.string(), pa.float32()), "score", "named parts of the reward"),
        Column("token_scores", _FLOATS, "score", "the part of the score that lies on single tokens [T], if any"),
        Column("reward_error", pa.string(), "score", "why the reward could not be computed, if so"),
        Column("group_spread", pa.float32(), "select", "largest less smallest score of the trajectory's group"),
        Column("greedy_response", pa.string(), "greedy_baseline", "the actor's greedy answer to the prompt"),
        Column("greedy_tokens", pa.int32(), "greedy_baseline", "the length of that answer", "tokens"),
        Column(
            "greedy_score",
            pa.float32(),
            "greedy_baseline",
            "the reward of that answer; null where it failed and reward.on_error is drop: the prompt is left out",
        ),
        Column("greedy_error", pa.string(), "greedy_baseline", "why that reward could not be computed, if so"),
        Column("old_log_probs", _FLOATS, "old_log_probs", "log-probs [T] by the actor before the update", "nat"),
        Column("entropy", _FLOATS, "old_log_probs", "entropy [T] of the actor's distribution", "nat"),
        Column("ref_log_probs", _FLOATS, "ref_log_probs", "log-probs [T] by the reference", "nat"),
        Column("values", _FLOATS, "values", "the critic's values [T] before the update"),
        Column(
            "token_rewards",
            _FLOATS,
            "advantages",
            "the score, where token_scores say, else at the last token that the model wrote, as the length penalty is; "
            "less the KL penalty [T]",
        ),
        Column("advantages", _FLOATS, "advantages", "advantages [T]"),
        Column("returns", _FLOATS, "advantages", "what the critic should predict [T]"),
        Column("loss_mask", pa.list_(pa.int8()), "advantages", "1 [T] where the token enters the losses", "0 or 1"),
        Column("rollout_is_weights", _FLOATS, "advantages", "importance weights [T] of rollout correction, if any"),
    )
)
