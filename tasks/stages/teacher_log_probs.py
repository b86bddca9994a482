"""teacher_log_probs: computes log-probs of the responses under the teacher, for on-policy distillation."""

from __future__ import annotations

from ratchet.infra.workers.calls import Context, ShardOutput, ShardSummary
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig, RunConfig
from ratchet.rlhf.schema import TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key
from ratchet.tasks.stage import RowsStage


class TeacherLogProbsConfig(StageConfig):
    teacher: ModelConfig = key("teacher")
    temperature: float = key("rollout.temperature")
    micro_batch_tokens: int = key("actor.micro_batch_tokens", operational=True)


def teacher_log_probs(context: Context[TeacherLogProbsConfig]) -> ShardOutput[ShardSummary]:
    config, batch = context.config, context.batch
    outputs = context.engine.infer(
        batch, ("log_probs",), temperature=config.temperature, micro_batch_tokens=config.micro_batch_tokens
    )
    columns = {"trajectory_id": batch.array("trajectory_id"), "teacher_log_probs": outputs["log_probs"]}
    return ShardOutput(TrajectoryBatch.of(columns), ShardSummary())


def exists(config: RunConfig) -> bool:
    return config.train.updates and "teacher" in config.roles


TEACHER_LOG_PROBS = RowsStage(
    name="teacher_log_probs",
    label="teacher",
    config=TeacherLogProbsConfig,
    exists=exists,
    reads={"generate": ("prompt_ids", "response_ids"), "select": ()},
    writes=TRAJECTORY.of("teacher_log_probs"),
    compute=teacher_log_probs,
    summary=ShardSummary,
    role="teacher",
)
