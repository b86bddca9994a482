"""A key-value cache for generation, which responses to the same prompt share, and which grows in place.

transformers' own cache has a copy of the prompt for each response, and is copied at every step.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ratchet.rlhf.models import prefix_sharing

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel

ROOM = 64
"""Minimum number of positions by which a buffer grows; a large one grows by half."""


class InPlaceLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a layer: `keys` and `values` are views of the used parts of larger buffers."""

    keys: Tensor
    values: Tensor

    def update(
        self,
        key_states: Float[Tensor, "rows heads new dim"],
        value_states: Float[Tensor, "rows heads new dim"],
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values; returns those of all positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._keep(key_states[:, :, :0], value_states[:, :, :0])
        new = key_states.shape[-2]
        used, total = self.keys.shape[-2], self.keys.shape[-2] + new
        if total > self._buffers[0].shape[-2]:
            self._keep(self.keys, self.values, new)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, used:total] = states
        self.keys, self.values = (buffer[:, :, :total] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Int[Tensor, " kept"]) -> None:
        """Keeps only some rows."""
        if self.is_initialized:
            self._keep(self.keys[indices], self.values[indices])

    def _keep(self, keys: Tensor, values: Tensor, new: int = 0) -> None:
        """Copies keys and values into buffers with room for at least `new` more."""
        self._buffers = _with_room(keys, new), _with_room(values, new)
        self.keys, self.values = (buffer[:, :, : keys.shape[-2]] for buffer in self._buffers)


def _with_room(used: Tensor, new: int) -> Tensor:
    rows, heads, time, dim = used.shape
    buffer = used.new_empty((rows, heads, time + max(ROOM, new, time // 2), dim))
    buffer[:, :, :time] = used
    return buffer


def in_place(layers: int) -> DynamicCache:
    """Returns an empty cache for the tokens that responses generate one by one."""
    cache = DynamicCache()
    cache.layers = [InPlaceLayer() for _ in range(layers)]
    return cache


@dataclass(frozen=True)
class CachedPrompts:
    """Keys and values of prompts, which the responses to each prompt share."""

    keys: tuple[Float[Tensor, "prompts key_heads prompt dim"], ...]
    """One tensor per layer; prompts are padded on the left."""
    values: tuple[Float[Tensor, "prompts key_heads prompt dim"], ...]
    visible: Bool[Tensor, "prompts prompt"] | None
    """True where a position is not padding; None: there is no padding."""
    prompt_of: Int[Tensor, " rows"]
    """Number of each response's prompt."""
    members: Int[Tensor, "prompts n"]
    """The rows of each prompt's responses, filled up with any row."""
    place: Int[Tensor, " rows"]
    """Index of each row in the flattened `members`."""

    @classmethod
    def of(cls, cache: DynamicCache, visible: Tensor | None, prompt_of: Int[Tensor, " rows"]) -> CachedPrompts:
        """Takes the keys and values of prompts from a cache, which a forward pass over them has filled."""
        keys, values = zip(*((layer.keys, layer.values) for layer in cache.layers), strict=True)
        return cls._grouped(keys, values, visible, prompt_of)

    def only(self, rows: Int[Tensor, " kept"]) -> CachedPrompts:
        """Keeps some responses, and their prompts."""
        used, prompt_of = torch.unique(self.prompt_of[rows], return_inverse=True)
        keys, values, visible = self.keys, self.values, self.visible
        if len(used) < len(self.members):
            keys, values = (tuple(layer[used] for layer in layers) for layers in (keys, values))
            visible = None if visible is None else visible[used]
        return self._grouped(keys, values, visible, prompt_of)

    @classmethod
    def _grouped(
        cls, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], visible: Tensor | None, prompt_of: Tensor
    ) -> CachedPrompts:
        counts = torch.bincount(prompt_of, minlength=len(keys[0]))
        order = prompt_of.argsort(stable=True)
        n, first = int(counts.max()), counts.cumsum(0) - counts
        place = torch.empty_like(prompt_of)
        place[order] = prompt_of[order] * n + torch.arange(len(order), device=order.device) - first[prompt_of[order]]
        members = prompt_of.new_zeros(len(counts) * n)
        members[place] = torch.arange(len(order), device=order.device)
        return cls(keys, values, visible, prompt_of, members.view(-1, n), place)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Float[Tensor, "rows 1 heads dim"]:
        """Computes the attention of the newest token of each response to its prompt and to its own tokens.

        `query` has shape (rows, heads, 1, dim); `key` and `value` of the own tokens (rows, key heads, time, dim).
        """
        rows, heads, _, dim = query.shape
        query = query.view(rows, key.shape[1], -1, dim)
        prompt_scores = self._by_row(self._by_prompt(query) @ self.keys[layer].transpose(-1, -2))
        if self.visible is not None:
            prompt_scores = prompt_scores.masked_fill(~self.visible[self.prompt_of, None, None], -torch.inf)
        scores = torch.cat([prompt_scores, query @ key.transpose(-1, -2)], dim=-1)
        weights = (scores * scale).softmax(-1)
        of_prompt, of_response = weights.tensor_split([prompt_scores.shape[-1]], dim=-1)
        attended = self._by_row(self._by_prompt(of_prompt) @ self.values[layer]) + of_response @ value
        return attended.reshape(rows, 1, heads, -1)

    def _by_prompt(self, rows: Tensor) -> Tensor:
        """[rows, key heads, group, width] -> [prompts, key heads, n * group, width]"""
        return rows[self.members].transpose(1, 2).flatten(2, 3)

    def _by_row(self, prompts: Tensor) -> Tensor:
        """[prompts, key heads, n * group, width] -> [rows, key heads, group, width]"""
        n = self.members.shape[1]
        by_member = prompts.view(*prompts.shape[:2], n, -1, prompts.shape[-1]).transpose(1, 2)
        return by_member.flatten(0, 1)[self.place]


def cache_name(model: PreTrainedModel) -> str:
    """Returns the name under which a model takes and returns its cache: transformers 5.24 calls it `cache`."""
    accepted = (
        inspect.signature(model.base_model.forward).parameters.keys() | inspect.signature(model.forward).parameters
    )
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in accepted), "past_key_values")


@torch.no_grad()
def fits(model: PreTrainedModel) -> bool:
    """Returns True if a model that shares prompts computes the same with `CachedPrompts`, on a few tokens.

    Some architectures change keys and values between their cache and their attention.
    """
    prompt, new = torch.arange(3, device=model.device)[None], torch.arange(3, 5, device=model.device)[:, None]
    base, was_training, name = model.base_model, model.training, cache_name(model)
    model.eval()  # gradient checkpointing turns caches off in training
    try:
        alone = base(input_ids=torch.cat([prompt.expand(2, 3), new], dim=1), use_cache=False).last_hidden_state[:, 3:]
        cache = DynamicCache(config=model.config)
        base(input_ids=prompt, **{name: cache}, use_cache=True)
        prompts = CachedPrompts.of(cache, None, torch.zeros(2, dtype=torch.long, device=model.device))
        together = base(
            input_ids=new,
            position_ids=torch.full_like(new, 3),
            use_cache=True,
            **{name: in_place(len(cache.layers))},
            **prefix_sharing.inputs(prompts),
        ).last_hidden_state
    except RuntimeError:  # the cache's tensors have other shapes than attention's
        return False
    finally:
        model.train(was_training)
    return prefix_sharing.agree(together, alone)
