"""select: of the prompts that dynamic sampling drew, those whose trajectories are learned from."""

from __future__ import annotations

import numpy as np
import torch

from infra.workers.worker import Context
from rlhf.algorithms.groups import Groups
from rlhf.batch import TrajectoryBatch
from rlhf.schema import TRAJECTORY
from tasks.spec import StageSpec
from tasks.stage import rows

SPEC = StageSpec(
    name="select",
    reads={"generate": ("prompt_id",), "score": ("score",)},
    writes=TRAJECTORY.of("select"),
    config_keys=("data.prompts_per_iteration",),
    sharded=False,
)


@rows(SPEC)
def select(context: Context) -> TrajectoryBatch:
    """The first prompts whose scores differ; if they are too few, the first of the others besides."""
    batch, wanted = context.batch, context.config.data.prompts_per_iteration
    prompts, first, group = np.unique(batch.numpy("prompt_id").astype(str), return_index=True, return_inverse=True)
    groups, scores = Groups(torch.from_numpy(group)), torch.tensor(batch.list("score"))
    spread = (groups.max(scores) - groups.min(scores)).numpy()
    by_use = np.argsort(spread[first] == 0, kind="stable")  # prompt ids sort in the order in which they were drawn
    kept = np.isin(group, by_use[:wanted])
    differ = int((spread[first] > 0).sum())
    context.outputs["metrics"] = {
        "sampling/prompts_drawn": float(len(prompts)),
        "sampling/prompts_that_differ": float(differ),
        "sampling/prompts_filled_up": float(max(wanted - differ, 0)),
    }
    rows = np.flatnonzero(kept)
    ids = batch.array("trajectory_id").take(rows)
    return TrajectoryBatch.of({"trajectory_id": ids, "group_spread": spread[rows].tolist()})
