"""Statistics over groups of trajectories that answer the same prompt."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int

from ratchet.rlhf.algorithms.tensor import Tensor


class Groups:
    """The groups of a batch.

    Every statistic takes values of shape (batch,) and returns a tensor of the same shape: for each trajectory, the
    statistic of its group.
    """

    def __init__(self, group_ids: Int[Tensor, " batch"]) -> None:
        """Find the groups.

        Args:
            group_ids: equal for trajectories of the same prompt, shape (batch,).
        """
        self.index: Int[Tensor, " batch"]
        _, self.index = group_ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        self.size: Int[Tensor, " batch"] = self.index.bincount()[self.index]
        self.alone: Bool[Tensor, " batch"] = self.size == 1

    def sum(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Sum over the group.

        Args:
            x: one value per trajectory, shape (batch,).

        Returns:
            For each trajectory, the sum over its group, shape (batch,).
        """
        return x.new_zeros(len(x)).index_add(0, self.index, x)[self.index]

    def mean(
        self, x: Float[Tensor, " batch"], weights: Float[Tensor, " batch"] | None = None
    ) -> Float[Tensor, " batch"]:
        """Average over the group. The mean of equal values is exactly their value: what rounding would leave of the
        difference becomes large when it is divided by a standard deviation that is nothing but rounding, too.

        Args:
            x: one value per trajectory, shape (batch,).
            weights: weight of each trajectory, shape (batch,); None: all count the same.

        Returns:
            For each trajectory, the mean over its group, shape (batch,).
        """
        total, count = (x, self.size) if weights is None else (weights * x, self.sum(weights).clamp(min=1.0))
        return (self.sum(total) / count).where(self.differ(x), x)

    def std(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Compute the Bessel-corrected standard deviation of the group.

        Args:
            x: one value per trajectory, shape (batch,).

        Returns:
            For each trajectory, the standard deviation of its group, shape (batch,); 0 for a group of one.
        """
        return (self.sum((x - self.mean(x)) ** 2) / (self.size - 1).clamp(min=1)).sqrt()

    def max(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Find the largest value of the group.

        Args:
            x: one value per trajectory, shape (batch,).

        Returns:
            For each trajectory, the largest value of its group, shape (batch,).
        """
        return x.new_zeros(len(x)).scatter_reduce(0, self.index, x, "amax", include_self=False)[self.index]

    def min(self, x: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Find the smallest value of the group.

        Args:
            x: one value per trajectory, shape (batch,).

        Returns:
            For each trajectory, the smallest value of its group, shape (batch,).
        """
        return -self.max(-x)

    def rank(self, x: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Number the trajectories of the group from the largest value to the smallest. Of equal values, the one that
        comes first in the batch has the lower number.

        Args:
            x: one value per trajectory, shape (batch,).

        Returns:
            For each trajectory its number in its group, from 0, shape (batch,).
        """
        order = x.argsort(stable=True, descending=True)
        order = order[self.index[order].argsort(stable=True)]
        sizes = self.index.bincount()
        firsts = (sizes.cumsum(0) - sizes)[self.index[order]]
        ranks = self.index.new_empty(len(x))
        ranks[order] = firsts.new_tensor(range(len(x))) - firsts
        return ranks

    def differ(self, x: Float[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Tell whether the group has different values; comparing equal values teaches nothing.

        Args:
            x: one value per trajectory, shape (batch,).

        Returns:
            For each trajectory, whether the values of its group differ, bool, shape (batch,); False for a group of one.
        """
        return self.max(x) > self.min(x)
