"""Decoding: a model reads tokens bit by bit, and keeps what it needs of them in a cache.

Families keep different things: keys and values, recurrent states, the last inputs of convolutions. Not all can be
padded on the left, or have rows chosen; a trial on a few tokens finds out.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.kv_cache import cache_name
from ratchet.rlhf.models.prefix_sharing import agree
from ratchet.rlhf.models.truncated import truncated

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedModel


class Decoder:
    """A model with a cache of the tokens that it has read."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wraps a model, with an empty cache."""
        self.model = model
        base = inspect.signature(model.base_model.forward).parameters
        accepted = inspect.signature(model.forward).parameters.keys() | base.keys()
        self._name = cache_name(model)
        self._takes_positions = "position_ids" in accepted
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in accepted:
            self._options["logits_to_keep"] = 1
        if getattr(model.config, "output_router_logits", False):
            self._options["output_router_logits"] = False  # the router loss does not accept a cache's masks
        self.cache: Any = None  # the model makes one, of its kind

    def read(
        self, input_ids: Int[Tensor, "rows time"], position_ids: Int[Tensor, "rows time"], **inputs: Any
    ) -> Float[Tensor, "rows vocab"]:
        """Reads tokens after those in the cache; returns the logits of the next token of each row."""
        if self._takes_positions:
            inputs["position_ids"] = position_ids
        inputs[self._name] = self.cache
        outputs = self.model(input_ids=input_ids, **inputs, **self._options)
        self.cache = outputs[self._name]
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def select(self, rows: Int[Tensor, " selected"]) -> None:
        """Replaces the cache's rows by a selection of them, in which a row may occur several times."""
        is_recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.cache.layers)
        # a layer with states selects only its keys and values
        select = self.cache.reorder_cache if is_recurrent else self.cache.batch_select_indices
        select(rows)


@dataclass(frozen=True)
class Decoding:
    """What a model's cache allows."""

    selects: bool
    """True if rows can be chosen and repeated; otherwise each response reads its own prompt, to the last step."""
    pads: bool
    """True if padding on the left leaves no trace; otherwise only prompts of the same length are read together."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Decoding | None:
        """Tries a model on a few tokens; returns None if it computes other logits with a cache than without."""
        trial = _Trial(model)
        if not trial.passes(trial.alone):
            return None
        return cls(selects=trial.passes(trial.selected), pads=trial.passes(trial.padded))

    def said(self, model_type: str) -> str:
        """Says what generates more slowly than it could."""
        limits = [
            *([] if self.pads else ["only prompts of the same length are generated together"]),
            *([] if self.selects else ["each response computes its prompt, and finished ones leave with the last"]),
        ]
        return f"rollout.engine hf is slow with {model_type}: {', and '.join(limits)}; vLLM has no such limits"


def decoding_of(model: PreTrainedModel) -> Decoding:
    """Tries a small model of the same architecture; raises UserError if it cannot generate with a cache."""
    attention = model.config._attn_implementation
    plain = attention if attention in ("sdpa", "eager") else "sdpa"
    found = Decoding.of(truncated(model, attention=plain).to(model.device))
    if found is None:
        raise UserError(f"rollout.engine hf {cannot_cache(model.config.model_type)}")
    return found


def cannot_cache(model_type: str) -> str:
    """Says that a model cannot generate with a cache, and what to do."""
    return (
        f"cannot generate with {model_type}: its cache is of another kind, or changes its log-probs: "
        "set rollout.engine: vllm if vLLM knows it, or choose a model of another architecture"
    )


class _Trial:
    """Reads two prompts, each followed by a few tokens, with a cache and without."""

    long, short, new = 6, 3, 3

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        tokens = 2 + torch.arange(2 * (self.long + self.new), device=model.device).view(2, -1)
        self.tokens = tokens % model.config.get_text_config().vocab_size
        self.positions = torch.arange(self.long + self.new, device=model.device).expand(2, -1)

    @torch.no_grad()
    def passes(self, way: Any) -> bool:
        was_training = self.model.training
        self.model.eval()  # gradient checkpointing turns caches off in training
        try:
            return all(agree(actual, expected) for actual, expected in way())
        except Exception:  # models fail in their own ways
            return False
        finally:
            self.model.train(was_training)

    def _whole(self, rows: Tensor) -> Tensor:
        """Computes the logits that follow the prompts and each new token, shape (rows, 1 + new, vocab)."""
        logits: Tensor = self.model(input_ids=rows, use_cache=False).logits[:, -1 - self.new :]
        return logits

    def alone(self) -> Any:
        for row in range(2):
            decoder, tokens, positions = Decoder(self.model), self.tokens[row : row + 1], self.positions[:1]
            expected = self._whole(tokens)[0]
            yield decoder.read(tokens[:, : self.long], positions[:, : self.long])[0], expected[0]
            for at in range(self.new):
                step = slice(self.long + at, self.long + at + 1)
                yield decoder.read(tokens[:, step], positions[:, step])[0], expected[at + 1]

    def selected(self) -> Any:
        decoder, expected = Decoder(self.model), torch.cat([self._whole(row[None]) for row in self.tokens])
        rows = torch.tensor([1, 0, 1], device=self.tokens.device)
        decoder.read(self.tokens[:, : self.long], self.positions[:, : self.long])
        decoder.select(rows)
        for at in range(self.new):
            step = slice(self.long + at, self.long + at + 1)
            logits = decoder.read(self.tokens[rows][:, step], self.positions[:1, step].expand(len(rows), -1))
            yield logits, expected[rows, at + 1]
            if at == 0:
                kept = torch.tensor([0, 1], device=rows.device)
                decoder.select(kept)
                rows = rows[kept]

    def padded(self) -> Any:
        padding = self.long - self.short
        short = self.tokens[:1, padding:]
        expected = torch.cat([self._whole(short), self._whole(self.tokens[1:])])
        tokens = torch.cat([torch.nn.functional.pad(short, (padding, 0)), self.tokens[1:]])
        hidden = torch.tensor([[padding], [0]], device=tokens.device)
        positions, is_real = (self.positions - hidden).clamp(min=0), self.positions >= hidden
        decoder = Decoder(self.model)
        ends = range(self.long, self.long + self.new + 1)
        for at, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            step = slice(first, end)
            yield (
                decoder.read(tokens[:, step], positions[:, step], attention_mask=is_real[:, :end]),
                expected[:, at],
            )
