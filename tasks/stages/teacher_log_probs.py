"""teacher_log_probs: computes log-probs of the responses, and of the most likely tokens, under the teacher."""

from __future__ import annotations

from ratchet.infra.workers.calls import Context, ShardOutput, ShardSummary
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig, TeacherConfig
from ratchet.rlhf.schema import READ, TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key
from ratchet.tasks.stage import RowsStage

TOP_K = "topk_ids", "topk_log_probs", "tail_log_probs"


class TeacherLogProbsConfig(StageConfig):
    teacher: TeacherConfig = key("teacher")
    temperature: float = key("rollout.temperature")
    micro_batch_tokens: int = key("actor.micro_batch_tokens", operational=True)


def teacher_log_probs(context: Context[TeacherLogProbsConfig]) -> ShardOutput[ShardSummary]:
    config, batch = context.config, context.batch
    outputs = context.engine.infer(
        batch,
        ("log_probs", *(TOP_K if config.teacher.top_k else ())),
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
        top_k=config.teacher.top_k,
    )
    columns = {"trajectory_id": batch.array("trajectory_id"), "teacher_log_probs": outputs["log_probs"]}
    columns |= {f"teacher_{name}": outputs.get(name, [None] * len(batch)) for name in ("spans", *TOP_K)}
    return ShardOutput(TrajectoryBatch.of(columns), ShardSummary())


def exists(config: RunConfig) -> bool:
    return config.train.updates and "teacher" in config.roles


TEACHER_LOG_PROBS = RowsStage(
    name="teacher_log_probs",
    label="teacher",
    config=TeacherLogProbsConfig,
    exists=exists,
    reads={
        "generate": (*READ, "data_source", "messages", "tools", "finish_reason"),
        "select": (),
    },
    writes=TRAJECTORY.of("teacher_log_probs"),
    compute=teacher_log_probs,
    summary=ShardSummary,
    role="teacher",
)
