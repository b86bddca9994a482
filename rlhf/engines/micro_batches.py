"""Cutting a batch into pieces that fit: rows of similar length together, at most so many tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from rlhf.batch import TrajectoryBatch


def by_token_budget(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Rows in pieces whose padded size (rows x longest) stays within `budget`; longest first, so that memory peaks
    at once rather than late. A row longer than the budget is a piece of its own."""
    pieces: list[np.ndarray] = []
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        size = max(1, budget // max(int(lengths[order[start]]), 1))
        pieces.append(order[start : start + size])
        start += size
    return pieces


@dataclass(frozen=True)
class MicroBatch:
    """Prompts and responses, one row each, prompt first and right-padded.

    With causal attention nothing sees the padding to its right, so no attention mask is needed.
    """

    rows: np.ndarray
    """Which rows of the batch these are."""
    input_ids: Int[Tensor, "micro time"]
    first: int
    """Position that predicts the first response token of the row with the shortest prompt."""
    at: Int[Tensor, "micro response"]
    """For each response token, the position that predicts it, counted from `first`."""
    response_lengths: np.ndarray

    @classmethod
    def of(cls, batch: TrajectoryBatch, rows: Sequence[int] | np.ndarray) -> MicroBatch:
        import torch

        part = batch.take(rows)
        prompts, responses = part.lengths("prompt_ids"), part.lengths("response_ids")
        total = prompts + responses
        input_ids = np.zeros((len(part), int(total.max())), dtype=np.int64)
        time = np.arange(input_ids.shape[1])[None, :]
        input_ids[time < prompts[:, None]] = part.flat("prompt_ids")
        input_ids[(time >= prompts[:, None]) & (time < total[:, None])] = part.flat("response_ids")
        first = int(prompts.min()) - 1
        at = np.arange(int(responses.max(initial=0)))[None, :] + (prompts - 1 - first)[:, None]
        return cls(
            rows=np.asarray(rows),
            input_ids=torch.from_numpy(input_ids),
            first=first,
            at=torch.from_numpy(np.minimum(at, input_ids.shape[1] - 2 - first)),
            response_lengths=responses,
        )

    def pick(self, per_position: Float[Tensor, "micro positions"]) -> Float[Tensor, "micro response"]:
        """From values at positions `first` onwards to values at response tokens; what is beyond a row's end is junk."""
        return per_position.gather(1, self.at.to(per_position.device))
