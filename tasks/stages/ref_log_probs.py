"""ref_log_probs: computes log-probs of the responses under the reference."""

from __future__ import annotations

from ratchet.infra.workers.calls import Context, ShardOutput, ShardSummary
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ReferenceConfig, RunConfig
from ratchet.rlhf.schema import READ, TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key
from ratchet.tasks.stage import RowsStage


class RefLogProbsConfig(StageConfig):
    dtype: str = key("model.dtype")
    reference: ReferenceConfig = key("reference")
    temperature: float = key("rollout.temperature")
    micro_batch_tokens: int = key("actor.micro_batch_tokens", operational=True)


def ref_log_probs(context: Context[RefLogProbsConfig]) -> ShardOutput[ShardSummary]:
    config, batch = context.config, context.batch
    outputs = context.engine.infer(
        batch, ("log_probs",), temperature=config.temperature, micro_batch_tokens=config.micro_batch_tokens
    )
    columns = {"trajectory_id": batch.array("trajectory_id"), "ref_log_probs": outputs["log_probs"]}
    return ShardOutput(TrajectoryBatch.of(columns), ShardSummary())


def exists(config: RunConfig) -> bool:
    return config.train.updates and config.needs_reference


REF_LOG_PROBS = RowsStage(
    name="ref_log_probs",
    label="ref",
    config=RefLogProbsConfig,
    exists=exists,
    reads={"generate": READ, "select": ()},
    writes=TRAJECTORY.of("ref_log_probs"),
    compute=ref_log_probs,
    summary=ShardSummary,
    role="reference",
)
