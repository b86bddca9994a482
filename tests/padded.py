"""Random padded mini-batches for the properties that hold for every algorithm."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from ratchet.rlhf.algorithms.base import Algorithm
from ratchet.rlhf.algorithms.checks import GARBAGE, Batch, padded, random_batch, rows, spoiled

__all__ = ["GARBAGE", "Batch", "batches", "members", "padded", "properties", "rows", "spoiled"]

properties = settings(max_examples=50, deadline=None, derandomize=True)


@st.composite
def batches(draw: st.DrawFn, scale: float | None = None) -> Batch:
    """Draws a mini-batch: trajectories of different lengths, masked tokens in their middle, garbage at masked
    positions.
    """
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = scale or draw(st.sampled_from([0.1, 1.0, 30.0]))
    batch = random_batch(rng, lengths, draw(st.integers(0, 2)), scale)
    return spoiled(batch, draw(st.sampled_from(GARBAGE)))


def members(union: Any) -> list[type[Algorithm]]:
    """Returns the classes of a union of algorithms, so that a new one is tested as soon as it is in the union."""
    if isinstance(union, type):
        return [union]
    return [member for part in get_args(union) for member in members(part) if not isinstance(part, FieldInfo)]
