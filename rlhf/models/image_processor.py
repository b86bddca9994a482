"""Turns images into a model's tokens and inputs, as the processor of its folder does.

A chat template writes one placeholder for an image. The processor says which tokens take its place, one for each patch
of the image that the model sees, and computes the model's inputs. It computes with Pillow: torchvision, which some
machines cannot have, rounds differently.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ratchet.rlhf.data.images import decoded, digest_of, size_of
from ratchet.rlhf.errors import UserError, in_one_line
from ratchet.rlhf.models.families import VISION
from ratchet.rlhf.models.hf_configs import model_config
from ratchet.rlhf.models.model_folders import model_folder

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from ratchet.rlhf.config import ModelConfig

KEPT_BYTES = 2**28
"""Size of the processed images that a process keeps."""


@dataclass(frozen=True)
class ProcessedImage:
    """An image as a model reads it."""

    tokens: tuple[int, ...]
    """The tokens that take the place of its placeholder."""
    inputs: Mapping[str, Tensor]
    """Arguments of the model's forward, such as `pixel_values`; the first dimension counts images or patches."""


class ImageProcessor:
    """The image processor of a model. Thread-safe; keeps the images that it processed last."""

    def __init__(self, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Loads the processor of a model's folder. Raises UserError if the folder has none, or its files do not fit."""
        self._processor = _processor(model, tokenizer)
        self.token_id = int(tokenizer.convert_tokens_to_ids(self._processor.image_token))
        """The placeholder, and in most families the token of each patch."""
        self.stand_in = int(tokenizer.eos_token_id)
        """What a model reads in place of a placeholder that it drew itself."""
        self._tokens_of: dict[tuple[int, int], tuple[int, ...]] = {}
        """The tokens of images by width and height."""
        self._kept: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __call__(self, image: bytes) -> ProcessedImage:
        """Processes an encoded image (PNG, JPEG and the like)."""
        return self.stored(digest_of(image), lambda _: image)

    def stored(self, digest: str, read: Callable[[str], bytes]) -> ProcessedImage:
        """Processes an image, which is read by its digest unless it was processed lately."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest]
        processed = self._process(read(digest))
        with self._lock:
            if digest not in self._kept:
                self._kept[digest] = processed
                self._size += _size(processed)
                while self._size > KEPT_BYTES and len(self._kept) > 1:
                    self._size -= _size(self._kept.popitem(last=False)[1])
        return processed

    def expanded(self, ids: Sequence[int], images: Sequence[bytes], where: str) -> list[int]:
        """Replaces the placeholders in a tokenized prompt by the tokens of the images, in order.

        Raises UserError if there are more or fewer placeholders than images.
        """
        placeholders = sum(token == self.token_id for token in ids)
        if placeholders != len(images):
            raise UserError(
                f"{where}: the chat template writes {placeholders} placeholders for {len(images)} images: set "
                "model.chat_template to one that writes each image, or leave out such rows"
            )
        rest = iter(images)
        return [
            part for token in ids for part in (self._tokens(next(rest), where) if token == self.token_id else (token,))
        ]

    def left_out(self, ids: Sequence[int]) -> list[int]:
        """Removes the placeholders; see `ImageTokens`."""
        return [token for token in ids if token != self.token_id]

    def readable(self, ids: Int[np.ndarray, " tokens"], drawn: Bool[np.ndarray, " tokens"]) -> np.ndarray:
        """Replaces the placeholders that a policy drew: those that are left belong to images."""
        return np.where(drawn & (ids == self.token_id), self.stand_in, ids)

    def collapsed(self, ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Undoes `expanded`: replaces the tokens of the images by a placeholder for each.

        Args:
            ids: as `readable` returns them.
            images: the encoded images whose tokens they have, in order.
        """
        rest = [self._tokens(image, "a prompt") for image in images][::-1]
        short, place = list[int](), 0
        while place < len(ids):
            tokens = rest[-1] if rest else ()
            if tokens and ids[place] == tokens[0] and tuple(ids[place : place + len(tokens)]) == tokens:
                short.append(self.token_id)
                place += len(rest.pop())
            else:
                short.append(ids[place])
                place += 1
        assert not rest, "each image has its tokens"
        return short

    def _tokens(self, image: bytes, where: str) -> tuple[int, ...]:
        """Returns the tokens of an image. They depend on its size only, so few images are processed for them."""
        width, height = size_of(image, f"{where}: an image")
        if (width, height) not in self._tokens_of:
            try:
                self._tokens_of[width, height] = self(image).tokens
            except ValueError as error:  # such as a picture that is far too long for its width
                raise UserError(
                    f"{where}: the model's processor refuses an image of {width} × {height} pixels: "
                    f"{in_one_line(error)}: leave out such rows"
                ) from None
        return self._tokens_of[width, height]

    def _process(self, image: bytes) -> ProcessedImage:
        picture = decoded(image, "an image")
        processed = self._processor(
            text=[self._processor.image_token],
            images=[[picture]],
            return_tensors="pt",
            text_kwargs={"add_special_tokens": False},
        )
        names = self._processor.image_processor.model_input_names
        inputs = {name: processed[name] for name in names if name in processed}
        return ProcessedImage(tuple(processed["input_ids"][0].tolist()), inputs)


def joined(images: Sequence[ProcessedImage]) -> dict[str, Tensor]:
    """Joins the inputs of images for one call of the model. Smaller ones are padded with zeros, as in processors."""
    import torch

    columns: dict[str, Tensor] = {}
    for name in images[0].inputs if images else ():
        tensors = [image.inputs[name] for image in images]
        shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        padded = [
            torch.nn.functional.pad(
                tensor,
                [pad for size, full in zip(tensor.shape[:0:-1], shape[::-1], strict=True) for pad in (0, full - size)],
            )
            for tensor in tensors
        ]
        columns[name] = torch.cat(padded)
    return columns


@cache
def sees_images(model: ModelConfig) -> bool:
    """Returns True if a model is of a family that reads images here."""
    return model_config(model).model_type in VISION


def _size(image: ProcessedImage) -> int:
    return sum(tensor.nbytes for tensor in image.inputs.values())


def _processor(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    folder, config = model_folder(model), model_config(model)
    kind: type[ProcessorMixin] = PROCESSOR_MAPPING[type(config)]

    class Processor(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> type:
            return object  # None is no video processor, and one would need torchvision

    Processor.__name__ = kind.__name__  # a processor of transformers looks its settings up by its class
    try:
        of_images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        settings, _ = kind.get_processor_dict(folder)
        parts = {"image_processor": of_images, "tokenizer": tokenizer}
        return Processor.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], settings)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise UserError(f"model.path {model.path}: cannot load its image processor: {in_one_line(error)}") from None
