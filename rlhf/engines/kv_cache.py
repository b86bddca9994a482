"""A key-value cache for generation that is written in place.

transformers' own cache is copied at every step. This one has room for the next steps, and moves to a larger buffer only
when that is used up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

ROOM = 64
"""Smallest number of positions by which a buffer grows; a large one grows by half."""


class InPlaceLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a layer: `keys` and `values` are the used part of larger buffers."""

    def __init__(
        self, keys: Float[Tensor, "rows heads time dim"], values: Float[Tensor, "rows heads time dim"]
    ) -> None:
        """Copy the keys and values of earlier positions.

        Args:
            keys: shape (rows, heads, time, dim).
            values: same shape, but for the last dimension.
        """
        super().__init__()
        self.lazy_initialization(keys, values)
        self._buffers = _with_room(keys), _with_room(values)
        self._use(keys.shape[-2])

    def update(
        self,
        key_states: Float[Tensor, "rows heads new dim"],
        value_states: Float[Tensor, "rows heads new dim"],
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; returns those of all positions."""
        used, total = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if total > self._buffers[0].shape[-2]:
            self._buffers = _with_room(self.keys, key_states.shape[-2]), _with_room(self.values, key_states.shape[-2])
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, used:total] = new
        self._use(total)
        return self.keys, self.values

    def batch_select_indices(self, indices: Int[Tensor, " kept"]) -> None:
        """Keep only some rows."""
        self._buffers = _with_room(self.keys[indices]), _with_room(self.values[indices])
        self._use(self.keys.shape[-2])

    def _use(self, time: int) -> None:
        self.keys, self.values = (buffer[:, :, :time] for buffer in self._buffers)


def _with_room(used: Tensor, new: int = 0) -> Tensor:
    """Copy a tensor into a longer buffer, with room for at least `new` positions."""
    rows, heads, time, dim = used.shape
    buffer = used.new_empty((rows, heads, time + max(ROOM, new, time // 2), dim))
    buffer[:, :, :time] = used
    return buffer


def spread(cache: DynamicCache, rows: Int[Tensor, " rows"]) -> None:
    """Give each sequence its own copy of the keys and values of a prompt, and room for those of its response.

    Args:
        cache: the keys and values of prompts, changed in place. Layers with a window keep transformers' own cache.
        rows: number of each sequence's prompt, shape (rows,).
    """
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[number] = InPlaceLayer(layer.keys[rows], layer.values[rows])
        else:
            layer.batch_select_indices(rows)
