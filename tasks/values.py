"""values: what the critic expects of every response token, before its update."""

from __future__ import annotations

from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.schema import TRAJECTORY
from tasks.spec import StageSpec
from tasks.stage import rows

SPEC = StageSpec(
    name="values",
    reads={"generate": ("prompt_ids", "response_ids"), "select": ()},
    writes=TRAJECTORY.of("values"),
    config_keys=("model.dtype", "critic.model"),
    operational_keys=("critic.micro_batch_tokens",),
    role="critic",
)


@rows(SPEC)
def values(context: Context) -> TrajectoryBatch:
    batch = context.batch
    found = context.engine.infer(
        batch, ("values",), temperature=1.0, micro_batch_tokens=context.config.critic.micro_batch_tokens
    )
    return TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), "values": found["values"]})
