"""select: keeps the prompts that the policy can learn from, among those that dynamic sampling drew."""

from __future__ import annotations

import numpy as np
import torch

from ratchet.infra.workers.calls import Context, ShardOutput, ShardSummary
from ratchet.rlhf.algorithms.groups import Groups
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import DynamicSamplingConfig, RunConfig
from ratchet.rlhf.rewards.functions import RewardFailed
from ratchet.rlhf.schema import TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.stages.reward_model import is_complete
from ratchet.tasks.stages.score import OnError, counting


class FilterGroupsConfig(StageConfig):
    prompts_per_iteration: int = key("data.prompts_per_iteration")
    dynamic_sampling: DynamicSamplingConfig | None = key("algorithm.dynamic_sampling")
    on_error: OnError = key("reward.on_error")


def filter_groups(context: Context[FilterGroupsConfig]) -> ShardOutput[ShardSummary]:
    """Selects trajectories, and writes the range of the scores in each group, `group_spread`.

    With dynamic sampling, keeps the first prompts whose scores differ; if there are too few, fills up with the first of
    the other prompts. Leaves out the trajectories whose environment failed and, with `reward.on_error: drop`, those
    whose reward failed.
    """
    config, batch = context.config, context.batch
    good = counting(config.on_error, batch.list("reward_error")) & is_complete(batch)
    prompts, group = np.unique(batch.numpy("prompt_id").astype(str), return_inverse=True)
    groups, scores = Groups(torch.from_numpy(group[good])), torch.tensor(batch.numpy("score")[good])
    spread = np.zeros(len(batch), dtype=np.float32)
    spread[good] = (groups.max(scores) - groups.min(scores)).numpy()
    kept, metrics = good, {"sampling/dropped": float((~good).sum())} if not good.all() else {}
    if config.dynamic_sampling is not None:
        wanted = config.prompts_per_iteration
        differs = np.zeros(len(prompts), dtype=bool)
        np.logical_or.at(differs, group, spread > 0)
        by_use = np.argsort(~differs, kind="stable")  # prompt ids sort in the order in which they were drawn
        kept = good & np.isin(group, by_use[:wanted])
        metrics |= {
            "sampling/prompts_drawn": float(len(prompts)),
            "sampling/prompts_that_differ": float(differs.sum()),
            "sampling/prompts_filled_up": float(max(wanted - int(differs.sum()), 0)),
        }
    if not kept.any():
        raise RewardFailed(
            "the environment or the reward failed for every trajectory: nothing is left to learn from; "
            '`ratchet query RUN "select rollout_error, reward_error from trajectories"` says why'
        )
    rows = np.flatnonzero(kept)
    ids = batch.array("trajectory_id").take(rows)
    columns = {"trajectory_id": ids, "group_spread": spread[rows].tolist()}
    return ShardOutput(TrajectoryBatch.of(columns), ShardSummary(metrics=metrics))


def exists(config: RunConfig) -> bool:
    return config.train.updates and config.selects


FILTER_GROUPS = RowsStage(
    name="select",
    label="select",
    config=FilterGroupsConfig,
    exists=exists,
    reads={"generate": ("prompt_id", "rollout_error"), "score": ("score", "reward_error")},
    writes=TRAJECTORY.of("select"),
    compute=filter_groups,
    summary=ShardSummary,
    sharded=False,
)
