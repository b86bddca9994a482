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


def by_token_budget(lengths: np.ndarray, budget: int, *, packed: bool = False) -> list[np.ndarray]:
    """Rows in pieces whose size (padded: rows x longest; packed: the sum) stays within `budget`; longest first, so
    that memory peaks at once rather than late. A row longer than the budget is a piece of its own."""
    pieces: list[np.ndarray] = []
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        rest = lengths[order[start:]]
        fit = np.searchsorted(np.cumsum(rest), budget, side="right") if packed else budget // max(rest[0], 1)
        size = max(1, int(fit))
        pieces.append(order[start : start + size])
        start += size
    return pieces


@dataclass(frozen=True)
class MicroBatch:
    """Prompts and responses, prompt first: one row each, right-padded; or packed, one after the other in one row.

    With causal attention nothing sees the padding to its right, so no attention mask is needed; packed sequences are
    told apart by their positions, which begin again with each.
    """

    rows: np.ndarray
    """Which rows of the batch these are."""
    input_ids: Int[Tensor, "sequences time"]
    position_ids: Int[Tensor, "sequences time"] | None
    """None: counted from the left."""
    at: Int[Tensor, " tokens"]
    """For each response token, the place in the flattened `input_ids` that predicts it."""
    targets: Int[Tensor, " tokens"]
    """The response tokens, row after row."""
    response_lengths: np.ndarray

    @classmethod
    def of(cls, batch: TrajectoryBatch, rows: Sequence[int] | np.ndarray, *, packed: bool = False) -> MicroBatch:
        import torch

        part = batch.take(rows)
        prompts, responses = part.lengths("prompt_ids"), part.lengths("response_ids")
        total = prompts + responses
        width = int(total.max())
        time = np.arange(width)[None, :]
        real, is_prompt = time < total[:, None], time < prompts[:, None]
        input_ids = np.zeros((len(part), width), dtype=np.int64)
        input_ids[is_prompt] = part.flat("prompt_ids")
        input_ids[real & ~is_prompt] = part.flat("response_ids")
        starts = np.cumsum(total) - total if packed else np.arange(len(part)) * width
        within = np.concatenate([np.arange(length) for length in responses])
        at = np.repeat(starts + prompts - 1, responses) + within
        positions = None
        if packed:
            input_ids = input_ids[real][None]
            positions = torch.from_numpy(np.broadcast_to(time, real.shape)[real][None])
        return cls(
            rows=np.asarray(rows),
            input_ids=torch.from_numpy(input_ids),
            position_ids=positions,
            at=torch.from_numpy(at),
            targets=torch.from_numpy(part.flat("response_ids").astype(np.int64)),
            response_lengths=responses,
        )

    @property
    def horizon(self) -> int:
        return int(self.response_lengths.max(initial=0))

    def padded(self, per_token: Float[Tensor, " tokens"]) -> Float[Tensor, "micro response"]:
        """Zero beyond a row's end."""
        import torch

        lengths = torch.from_numpy(self.response_lengths).to(per_token.device)
        real = torch.arange(self.horizon, device=per_token.device)[None, :] < lengths[:, None]
        return per_token.new_zeros(real.shape).masked_scatter(real, per_token)
