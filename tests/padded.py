"""Random padded mini-batches for the properties that hold for every algorithm."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo
from torch import Tensor

from ratchet.rlhf.algorithms.base import Algorithm

Batch = dict[str, Tensor]

COLUMNS = (
    "log_probs",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "rollout_is_weights",
    "selection_noise",
    "entropy",
    "sum_pi_squared",
    "advantages",
    "returns",
    "values",
    "token_rewards",
)

properties = settings(max_examples=50, deadline=None, derandomize=True)

GARBAGE = (0.0, -3.5, 1e30, -1e30)
"""Values at masked positions, where no algorithm should look."""


@st.composite
def batches(draw: st.DrawFn, scale: float | None = None) -> Batch:
    """Draws a mini-batch: trajectories of different lengths, masked tokens in their middle, garbage at masked
    positions.
    """
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = scale or draw(st.sampled_from([0.1, 1.0, 30.0]))
    shape = (len(lengths), max(1, *lengths) + draw(st.integers(0, 2)))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]) & (rng.random(shape) < 0.8)
    batch = {name: torch.from_numpy(rng.standard_normal(shape) * scale) for name in COLUMNS}
    batch["rollout_is_weights"] = batch["rollout_is_weights"].abs()
    batch["mask"] = torch.from_numpy(mask.astype(np.float64))
    batch["group_ids"] = torch.from_numpy(rng.integers(0, 3, shape[0]))
    batch |= {name: torch.from_numpy(rng.standard_normal(shape[0]) * scale) for name in ("greedy_scores", "part")}
    batch["turns"] = torch.from_numpy(np.cumsum(rng.random(shape) < 0.4, axis=1))
    said = rng.integers(0, 3, (shape[0], shape[1] + 1))
    batch["states"] = torch.from_numpy(np.take_along_axis(said, batch["turns"].numpy(), axis=1))
    return spoiled(batch, draw(st.sampled_from(GARBAGE)))


def spoiled(batch: Batch, garbage: float) -> Batch:
    """Returns the same batch with other values at its masked positions."""
    mask = batch["mask"] > 0
    return {
        name: x.where(mask, garbage if x.is_floating_point() else int(garbage) % 1000) if x.dim() == 2 else x
        for name, x in batch.items()
        if name != "mask"
    } | {"mask": batch["mask"]}


def padded(batch: Batch, columns: int) -> Batch:
    """Returns the same batch, padded further to the right."""
    return {name: torch.nn.functional.pad(x, (0, columns)) if x.dim() == 2 else x for name, x in batch.items()}


def rows(batch: Batch, which: Any) -> Batch:
    return {name: x[which] for name, x in batch.items()}


def members(union: Any) -> list[type[Algorithm]]:
    """Returns the classes of a union of algorithms, so that a new one is tested as soon as it is in the union."""
    if isinstance(union, type):
        return [union]
    return [member for part in get_args(union) for member in members(part) if not isinstance(part, FieldInfo)]
