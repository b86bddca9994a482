"""old_log_probs: log-probs and entropy of the responses by the actor that is about to be updated."""

from __future__ import annotations

from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.schema import TRAJECTORY
from tasks.spec import StageSpec
from tasks.stage import rows

SPEC = StageSpec(
    name="old_log_probs",
    reads={"generate": ("prompt_ids", "response_ids"), "select": ()},
    writes=TRAJECTORY.of("old_log_probs"),
    config_keys=("model.dtype", "rollout.temperature"),
    operational_keys=("actor.micro_batch_tokens",),
    role="actor",
)


@rows(SPEC)
def old_log_probs(context: Context) -> TrajectoryBatch:
    config, batch = context.config, context.batch
    found = context.engine.infer(
        batch,
        ("log_probs", "entropy"),
        temperature=config.rollout.temperature,
        micro_batch_tokens=config.actor.micro_batch_tokens,
    )
    return TrajectoryBatch.of(
        {
            "trajectory_id": batch.array("trajectory_id"),
            "old_log_probs": found["log_probs"],
            "entropy": found["entropy"],
        }
    )
