"""Converts values of tokens to values of turns, and back."""

from __future__ import annotations

from jaxtyping import Float, Int, Num

from ratchet.rlhf.algorithms.tensor import Tensor


class Turns:
    """The turns of a batch. Values of turns have the shape (batch, turn), and are 0 for turns without tokens."""

    def __init__(self, turns: Int[Tensor, "batch response"], mask: Float[Tensor, "batch response"]) -> None:
        """Finds the turns, from the number of each token's turn in its trajectory; masked tokens belong to none."""
        self._of_token = mask > 0
        self._index = turns.where(self._of_token, 0)
        self._count = int(self._index.max()) + 1 if self._index.numel() else 0
        self.mask: Float[Tensor, "batch turn"] = (self.sum(mask) > 0).to(mask.dtype)
        """1 for turns that have tokens, 0 for the rest."""

    def sum(self, x: Float[Tensor, "batch response"]) -> Float[Tensor, "batch turn"]:
        """Sums over the tokens of each turn."""
        return x.new_zeros(len(x), self._count).scatter_add(1, self._index, x.where(self._of_token, 0.0))

    def first(self, x: Num[Tensor, "batch response"]) -> Num[Tensor, "batch turn"]:
        """Returns the value of the first token of each turn."""
        width = self._index.shape[1]
        positions = self._index.new_ones(self._index.shape).cumsum(-1) - 1
        places = self._index.new_full((len(x), self._count), width).scatter_reduce(
            1, self._index, positions.where(self._of_token, width), "amin"
        )
        return x.gather(1, places.clamp(max=width - 1)).where(self.mask > 0, 0)

    def of_tokens(self, x: Float[Tensor, "batch turn"]) -> Float[Tensor, "batch response"]:
        """Gives each token the value of its turn, 0 where masked."""
        return x.gather(1, self._index).where(self._of_token, 0.0)
