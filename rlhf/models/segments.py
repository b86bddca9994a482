"""Attention of several sequences, one after the other in a row, without a mask of all their positions.

A mask of 131,072 x 131,072 positions takes 16 GiB. Here each sequence attends separately.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ratchet.rlhf.distributed import accelerator

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

MASK_ELEMENTS = 2**24
"""Maximum size of a mask, in elements."""


@dataclass(frozen=True)
class Segments:
    """How concatenated tokens attend to each other, for a kernel that takes pieces of any lengths.

    A piece is a prompt, a response, a whole sequence or a part of one. There is neither padding nor a mask: the last
    token of a piece attends to all keys of the piece, and each token before it to one less.
    """

    keys: Int[Tensor, " keys"] | None
    """Indices of the tokens that the pieces attend to, one piece after the other; None: to their own."""
    query_ends: Int[Tensor, " ends"]
    """Ends of the pieces in the concatenated tokens, from 0, int32."""
    key_ends: Int[Tensor, " ends"]
    """Ends of the pieces in `keys`, from 0, int32."""
    tokens: int
    """Number of tokens of all pieces."""
    longest_query: int
    """Length of the longest piece."""
    longest_keys: int
    """Maximum number of keys of a piece."""

    @classmethod
    def of(cls, prompts: np.ndarray, responses: np.ndarray, prompt_of: np.ndarray) -> Segments:
        """Describes the concatenation of prompts, and then of their responses; see `SharedPrompts.of`."""
        starts = np.cumsum(prompts) - prompts
        response_starts = prompts.sum() + np.cumsum(responses) - responses
        real = np.flatnonzero(responses)
        own = [np.arange(start, start + length) for start, length in zip(starts, prompts, strict=True)]
        read = [
            np.concatenate(
                [own[prompt_of[row]], np.arange(response_starts[row], response_starts[row] + responses[row])]
            )
            for row in real
        ]
        keys = [*own, *read]
        return cls.of_pieces(
            np.concatenate([prompts, responses[real]]), np.array([len(piece) for piece in keys]), np.concatenate(keys)
        )

    @classmethod
    def of_sequences(cls, lengths: np.ndarray) -> Segments:
        """Describes the concatenation of whole sequences of the given lengths, shape (sequences,)."""
        return cls.of_pieces(lengths, lengths, None)

    @classmethod
    def of_pieces(cls, queries: np.ndarray, keys: np.ndarray, at: np.ndarray | None) -> Segments:
        """Describes pieces of any kind.

        Args:
            queries: length of each piece, shape (pieces,).
            keys: number of keys of each piece, shape (pieces,).
            at: indices of the keys, one piece after the other, shape (keys,); None: those of the piece itself.
        """
        query_ends, key_ends = (
            torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)) for lengths in (queries, keys)
        )
        indices = None if at is None else torch.from_numpy(at)
        return cls(indices, query_ends, key_ends, int(queries.sum()), int(queries.max()), int(keys.max()))

    def to(self, device: torch.device) -> Segments:
        """Returns the segments on a device."""
        keys = None if self.keys is None else accelerator.placed(self.keys, device)
        ends = accelerator.placed(self.query_ends, device), accelerator.placed(self.key_ends, device)
        return replace(self, keys=keys, query_ends=ends[0], key_ends=ends[1])

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # one kernel, which takes the pieces' lengths
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Computes attention; `query` and the result have shape (tokens, heads, dim), `key` and `value` fewer heads."""
        device = query.device.type
        # autocast does not cast the inputs of this kernel
        if query.dtype == torch.float32 and torch.is_autocast_enabled(device):
            query, key, value = (heads.to(torch.get_autocast_dtype(device)) for heads in (query, key, value))
        if self.keys is not None:
            key, value = key.index_select(0, self.keys), value.index_select(0, self.keys)
        if value.shape[-1] != query.shape[-1] or not has_kernel(query.shape[-1], query.device, query.dtype):
            return self._attend_one_by_one(query, key, value, scale)
        from torch.nn.attention.varlen import varlen_attn

        attended = varlen_attn(
            query,
            key,
            value,
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_keys,
            scale=scale,
            window_size=(-1, 0),  # causal, aligned to the last key
            enable_gqa=query.shape[1] > key.shape[1],
        )
        assert isinstance(attended, torch.Tensor)
        return attended

    def _attend_one_by_one(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Computes the same as the kernel where there is none, by a call per piece."""
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and accelerator.is_gpu(key.device):  # no other fast kernel takes groups
            key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
        q_sizes, k_sizes = self.query_ends.diff().tolist(), self.key_ends.diff().tolist()
        of_pieces = (
            torch.split(heads.transpose(0, 1)[None], sizes, dim=2)
            for heads, sizes in ((query, q_sizes), (key, k_sizes), (value, k_sizes))
        )
        pieces = [_attend_piece(q, k, v, scale)[0] for q, k, v in zip(*of_pieces, strict=True)]
        return torch.cat(pieces, dim=1).transpose(0, 1)


def _attend_piece(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attends from the last tokens of a piece, shape (1, heads, tokens, dim), to the piece."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    rows = max(1, MASK_ELEMENTS // keys)
    if rows >= queries:
        return _attend_masked(query, key, value, scale)
    ends = [min(start + rows, queries) for start in range(0, queries, rows)]
    return torch.cat(
        [
            checkpoint(  # so that no masks are kept for the backward pass
                _attend_masked,
                rows_of_query,
                key[:, :, : keys - queries + end],
                value[:, :, : keys - queries + end],
                scale,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for rows_of_query, end in zip(torch.split(query, rows, dim=2), ends, strict=True)
        ],
        dim=2,
    )


def _attend_masked(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=True)


@cache
def has_kernel(dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if PyTorch has a kernel for `Segments` of heads of this size, on this device, in this type."""
    if dtype != torch.bfloat16 or (accelerator.cuda_capability(device) or (0, 0)) < (8, 0):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters and dim % 8 == 0 and dim <= 256
