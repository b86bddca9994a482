"""Statistics over groups of trajectories that answer the same prompt."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int

from ratchet.rlhf.algorithms.tensor import Tensor


class Groups:
    """The groups of a batch.

    Every statistic takes values of shape (batch,) and returns a tensor of the same shape: for each trajectory, the
    statistic of its group. `sum` and `max` take more dimensions, too.
    """

    def __init__(self, group_ids: Int[Tensor, " batch"]) -> None:
        """Finds the groups; `group_ids` are equal for trajectories of the same prompt."""
        self.index: Int[Tensor, " batch"]
        _, self.index = group_ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        self.size: Int[Tensor, " batch"] = self.index.bincount()[self.index]
        self.alone: Bool[Tensor, " batch"] = self.size == 1

    def sum(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Sums over the group."""
        return x.new_zeros(x.shape).index_add(0, self.index, x)[self.index]

    def mean(
        self, x: Float[Tensor, " batch"], weights: Float[Tensor, " batch"] | None = None
    ) -> Float[Tensor, " batch"]:
        """Averages over the group. The mean of equal values is exactly their value."""
        total, count = (x, self.size) if weights is None else (weights * x, self.sum(weights).clamp(min=1.0))
        # a rounding error becomes large when it is divided by a standard deviation that is only rounding, too
        return (self.sum(total) / count).where(self.differ(x), x)

    def std(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Computes the Bessel-corrected standard deviation of the group; 0 for a group of one."""
        return (self.sum((x - self.mean(x)) ** 2) / (self.size - 1).clamp(min=1)).sqrt()

    def max(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Finds the maximum of the group."""
        index = self.index.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
        return x.new_zeros(x.shape).scatter_reduce(0, index, x, "amax", include_self=False)[self.index]

    def min(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Finds the minimum of the group."""
        return -self.max(-x)

    def rank(self, x: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Ranks the trajectories of the group from 0 by descending value; of equal values, the first one wins."""
        order = x.argsort(stable=True, descending=True)
        order = order[self.index[order].argsort(stable=True)]
        sizes = self.index.bincount()
        firsts = (sizes.cumsum(0) - sizes)[self.index[order]]
        ranks = self.index.new_empty(len(x))
        ranks[order] = firsts.new_tensor(range(len(x))) - firsts
        return ranks

    def differ(self, x: Float[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Returns True where the group has different values: comparing equal values teaches nothing."""
        return self.max(x) > self.min(x)
