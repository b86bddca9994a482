"""What a model needs beside the tokens to see the images among them.

A policy may draw the placeholder of an image, although there is none. The model then reads another token in its place,
the same one wherever the trajectory is computed: otherwise it would look for an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ratchet.rlhf.models.image_processor import ImageProcessor, ProcessedImage
from ratchet.rlhf.models.tokenizers import image_processor

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.config import ModelConfig

GRID = "image_grid_thw"
"""The input of models with several axes of positions that says how many patches an image has along each."""


def vision_of(model: ModelConfig, image: Callable[[str], bytes] | None) -> Callable[[PreTrainedModel], Vision] | None:
    """Returns what makes the `Vision` of a loaded model; None if the model reads text only.

    Args:
        image: reads an image by its digest; None: there are no stored images.
    """
    processor = image_processor(model)
    return None if processor is None else lambda loaded: Vision(loaded, processor, image or _no_image)


def _no_image(digest: str) -> bytes:
    raise AssertionError(f"there is no run that has the image {digest}")


class Vision:
    """The images of a model's inputs."""

    def __init__(self, model: PreTrainedModel, processor: ImageProcessor, read: Callable[[str], bytes]) -> None:
        """Takes a function that reads an encoded image by its digest."""
        self._base = model.base_model
        self._processor = processor
        self._read = read

    def __call__(self, image: bytes) -> ProcessedImage:
        """Processes an encoded image; see `ImageProcessor`."""
        return self._processor(image)

    def stored(self, digests: Sequence[str]) -> list[ProcessedImage]:
        """Reads and processes images; the last ones are kept in memory."""
        return [self._processor.stored(digest, self._read) for digest in digests]

    def readable(self, ids: Int[np.ndarray, " tokens"], drawn: Bool[np.ndarray, " tokens"]) -> np.ndarray:
        """Replaces the placeholders that a policy drew; see `ImageProcessor.readable`."""
        return self._processor.readable(ids, drawn)

    def next_tokens(self, drawn: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        """Replaces the placeholders among tokens that a policy has just drawn."""
        return torch.where(drawn == self._processor.token_id, self._processor.stand_in, drawn)

    def positions(
        self, ids: Int[np.ndarray, " tokens"], images: Sequence[ProcessedImage]
    ) -> Int[np.ndarray, "axes tokens"]:
        """Returns the positions of a sequence, on one axis, or on several in models whose positions have as many.

        Args:
            ids: the tokens of a whole sequence, as `readable` returns them.
            images: the images of its placeholders.
        """
        if not hasattr(self._base, "get_rope_index"):
            return np.arange(len(ids))[None]
        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
        grids = {GRID: torch.cat([image.inputs[GRID] for image in images])} if images else {}
        is_image = (tokens == self._processor.token_id).int()
        positions, _ = self._base.get_rope_index(input_ids=tokens, mm_token_type_ids=is_image, **grids)
        return np.asarray(positions[:, 0].numpy())
