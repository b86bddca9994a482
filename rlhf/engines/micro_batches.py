"""Splitting a batch into micro-batches of rows of similar length, within a token budget."""

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
    """Split rows into pieces within a token budget, longest rows first, so that memory peaks early rather than late.

    Args:
        lengths: length of each row in tokens, shape (rows,).
        budget: maximum size of a piece in tokens; a longer row is a piece by itself.
        packed: whether the size of a piece is the sum of its lengths; otherwise rows x longest, padding included.

    Returns:
        Row numbers of each piece.
    """
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
    """Sequences of a prompt and its response: one per row, right-padded; or packed one after the other into one row.

    With causal attention no token sees the padding to its right, so no attention mask is needed. Packed sequences are
    distinguished by their positions, which restart with each sequence.
    """

    rows: np.ndarray
    """Row numbers in the batch."""
    input_ids: Int[Tensor, "sequences time"]
    position_ids: Int[Tensor, "sequences time"] | None
    """None: counted from the left."""
    at: Int[Tensor, " tokens"]
    """For each response token, the index in the flattened `input_ids` of the position that predicts it."""
    targets: Int[Tensor, " tokens"]
    """The response tokens, row after row."""
    response_lengths: np.ndarray
    """Number of response tokens of each row."""

    @classmethod
    def of(cls, batch: TrajectoryBatch, rows: Sequence[int] | np.ndarray, *, packed: bool = False) -> MicroBatch:
        """Build a micro-batch.

        Args:
            batch: must have the columns `prompt_ids` and `response_ids`.
            rows: rows of the batch.
            packed: whether to pack the sequences into one row.

        Returns:
            The micro-batch, on the CPU.
        """
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
        """Length of the longest response, in tokens."""
        return int(self.response_lengths.max(initial=0))

    def padded(self, per_token: Float[Tensor, " tokens"]) -> Float[Tensor, "micro response"]:
        """Pad values of the response tokens, shape (tokens,), with 0 to shape (micro-batch, response)."""
        import torch

        lengths = torch.from_numpy(self.response_lengths).to(per_token.device)
        real = torch.arange(self.horizon, device=per_token.device)[None, :] < lengths[:, None]
        return per_token.new_zeros(real.shape).masked_scatter(real, per_token)
