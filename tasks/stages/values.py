"""values: computes the critic's value of every response token, before its update."""

from __future__ import annotations

from ratchet.infra.workers.calls import Context, ShardOutput, ShardSummary
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ModelConfig, RunConfig
from ratchet.rlhf.schema import READ, TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key
from ratchet.tasks.stage import RowsStage


class ValuesConfig(StageConfig):
    dtype: str = key("model.dtype")
    critic_model: ModelConfig | None = key("critic.model")
    micro_batch_tokens: int = key("critic.micro_batch_tokens", operational=True)


def values(context: Context[ValuesConfig]) -> ShardOutput[ShardSummary]:
    batch = context.batch
    outputs = context.engine.infer(
        batch, ("values",), temperature=1.0, micro_batch_tokens=context.config.micro_batch_tokens
    )
    columns = {"trajectory_id": batch.array("trajectory_id"), "values": outputs["values"]}
    return ShardOutput(TrajectoryBatch.of(columns), ShardSummary())


def exists(config: RunConfig) -> bool:
    return config.train.updates and config.needs_critic


VALUES = RowsStage(
    name="values",
    label="value",
    config=ValuesConfig,
    exists=exists,
    reads={"generate": READ, "select": ()},
    writes=TRAJECTORY.of("values"),
    compute=values,
    summary=ShardSummary,
    role="critic",
)
