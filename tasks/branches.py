"""Maps rows to trajectories: one row each, unless an agent edited its conversation, which starts another branch.

All branches have the trajectory's score. Code that compares or counts trajectories looks at the last branch of each;
code that trains on them gives every branch the advantage of its trajectory.
"""

from __future__ import annotations

import numpy as np

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.schema import trajectory_of


def trajectory_index(batch: TrajectoryBatch) -> np.ndarray:
    """Returns for each row the number of its trajectory, in order of first appearance, shape (batch,)."""
    numbers: dict[str, int] = {}
    names = map(trajectory_of, batch.list("trajectory_id"))
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def last_branches(batch: TrajectoryBatch) -> np.ndarray:
    """Returns the row of each trajectory's last branch, in order, shape (trajectories,)."""
    index = trajectory_index(batch)
    last = np.zeros(index.max(initial=-1) + 1, dtype=np.int64)
    last[index] = np.arange(len(index))  # of equal indices, the last assignment counts
    return last
