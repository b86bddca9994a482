"""ref_log_probs: log-probs of the responses by the frozen reference."""

from __future__ import annotations

from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.schema import TRAJECTORY
from tasks.spec import StageSpec
from tasks.stage import rows

SPEC = StageSpec(
    name="ref_log_probs",
    reads={"generate": ("prompt_ids", "response_ids"), "select": ()},
    writes=TRAJECTORY.of("ref_log_probs"),
    config_keys=("model.dtype", "reference", "rollout.temperature"),
    operational_keys=("actor.micro_batch_tokens",),
    role="reference",
)


@rows(SPEC)
def ref_log_probs(context: Context) -> TrajectoryBatch:
    config, batch = context.config, context.batch
    found = context.engine.infer(
        batch,
        ("log_probs",),
        temperature=config.rollout.temperature,
        micro_batch_tokens=config.actor.micro_batch_tokens,
    )
    return TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), "ref_log_probs": found["log_probs"]})
