"""Trajectories that answer the same prompt, and statistics over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


class Groups:
    """The groups of a batch. Every statistic is given per trajectory: that of the group it belongs to."""

    def __init__(self, group_ids: Int[Tensor, " batch"]) -> None:
        self.index: Int[Tensor, " batch"]
        _, self.index = group_ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        self.size: Int[Tensor, " batch"] = self.index.bincount()[self.index]
        self.alone: Bool[Tensor, " batch"] = self.size == 1

    def sum(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        return x.new_zeros(len(x)).index_add(0, self.index, x)[self.index]

    def mean(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        return self.sum(x) / self.size

    def std(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Bessel-corrected; 0 for a trajectory alone."""
        return (self.sum((x - self.mean(x)) ** 2) / (self.size - 1).clamp(min=1)).sqrt()

    def max(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        return x.new_zeros(len(x)).scatter_reduce(0, self.index, x, "amax", include_self=False)[self.index]

    def min(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        return -self.max(-x)

    def differ(self, x: Float[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Whether the group's values are not all the same: only then is there something to learn from comparing."""
        return self.max(x) > self.min(x)
