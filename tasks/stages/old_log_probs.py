"""old_log_probs: computes log-probs and entropy of the responses under the actor before its update."""

from __future__ import annotations

from ratchet.infra.workers.calls import Context, ShardOutput, ShardSummary
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.user_algorithms import AnyAdvantage
from ratchet.rlhf.schema import READ, ROUTES, TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key
from ratchet.tasks.routes import with_routes
from ratchet.tasks.stage import RowsStage


class OldLogProbsConfig(StageConfig):
    # operational: it only decides whether there is one more column
    advantage: AnyAdvantage = key("algorithm.advantage", operational=True)
    dtype: str = key("model.dtype")
    temperature: float = key("rollout.temperature")
    router_replay: bool = key("rollout.router_replay")
    micro_batch_tokens: int = key("actor.micro_batch_tokens", operational=True)


def old_log_probs(context: Context[OldLogProbsConfig]) -> ShardOutput[ShardSummary]:
    config = context.config
    batch = with_routes(context.batch, config.router_replay)
    optional = ("sum_pi_squared",) if "sum_pi_squared" in config.advantage.needs else ()
    outputs = context.engine.infer(
        batch,
        ("log_probs", "entropy", *optional),
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
    )
    columns = {
        "trajectory_id": batch.array("trajectory_id"),
        "old_log_probs": outputs["log_probs"],
        "entropy": outputs["entropy"],
        "sum_pi_squared": outputs.get("sum_pi_squared", [None] * len(batch)),
    }
    return ShardOutput(TrajectoryBatch.of(columns), ShardSummary())


def exists(config: RunConfig) -> bool:
    return config.train.updates and config.needs_old_log_probs


OLD_LOG_PROBS = RowsStage(
    name="old_log_probs",
    label="old",
    config=OldLogProbsConfig,
    exists=exists,
    reads={"generate": (*READ, ROUTES), "select": ()},
    writes=TRAJECTORY.of("old_log_probs"),
    compute=old_log_probs,
    summary=ShardSummary,
    role="actor",
)
