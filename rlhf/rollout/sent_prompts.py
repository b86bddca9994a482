"""Prompts with images, as engines take them that have the model's processor themselves.

Such an engine is given one placeholder for each image, and writes the tokens of the image in its place. Whether these
are the trainer's is checked: with other tokens, the trainer would learn from log-probs of another prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Bool

    from ratchet.rlhf.models.image_processor import ImageProcessor
    from ratchet.rlhf.rollout.engine import Request, Sampling


@dataclass(frozen=True)
class SentPrompt:
    """What an engine is sent of a request."""

    ids: list[int]
    """The tokens that the model reads."""
    short_ids: list[int]
    """The same, with one placeholder for each image."""
    images: tuple[bytes, ...]
    """The encoded images of the placeholders."""

    @classmethod
    def of(cls, request: Request, processor: ImageProcessor | None) -> SentPrompt:
        """Builds what is sent of a request; `processor` is None if the model reads text only."""
        ids = list(request.prompt_ids)
        if processor is None:
            return cls(ids, ids, ())
        ids = processor.readable(np.asarray(ids, dtype=np.int64), drawn(request)).tolist()
        return cls(ids, processor.collapsed(ids, request.images), request.images)


def drawn(request: Request) -> Bool[np.ndarray, " tokens"]:
    """Says which tokens of a request the policy drew: a placeholder among them is no image."""
    mask = np.array(request.mask, dtype=bool)
    return np.pad(mask, (len(request.prompt_ids) - len(mask), 0))


def stop_tokens(processor: ImageProcessor | None, sampling: Sampling, eos: Sequence[int]) -> list[int]:
    """Returns the tokens that end a response in an engine that reads what it draws.

    The trainer reads another token in place of a placeholder that the policy drew, so none may be drawn after one.
    """
    ends = [] if sampling.ignore_eos else list(eos)
    return ends if processor is None else [*ends, processor.token_id]


def check_read(ids: Sequence[int], read: Sequence[int], engine: str) -> None:
    """Raises UserError if an engine reads other tokens than the trainer.

    Args:
        ids: the trainer's tokens.
        read: the engine's.
        engine: its name, for the error.
    """
    if list(read) == list(ids):
        return
    raise UserError(
        f"{engine} reads a prompt with images as {len(read)} tokens, and the trainer as {len(ids)} other ones: let it "
        "load the same files of the processor and the tokenizer, or set rollout.engine: hf"
    )
