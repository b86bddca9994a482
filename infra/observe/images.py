"""Images in the rows of another trainer: their bytes go to the store, and the rows keep their digests."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from PIL import Image

from ratchet.rlhf.data.images import MARK, check_image
from ratchet.rlhf.errors import UserError

KINDS = ("image", "image_url", "input_image")
"""The types of content parts that are images."""
DATA_URL = "data:image/"


def with_digests(row: Mapping[str, Any], put: Callable[[bytes], str], where: str) -> dict[str, Any]:
    """Stores the images of a row, and returns it with digests in the column `images`.

    The images are in its column `images`, or are parts of the contents of its messages, which become marks ``<image>``
    and the message's `images`. A part without an image stands for the next one of the column. A message stays as it is
    if an image of it is not in the row, such as one that a URL or a path names.

    Args:
        put: stores encoded bytes, and returns their digest.
        where: names the row in errors.

    Raises:
        UserError: what is in the column, or the bytes in a message, are no image that can be shown.
    """
    own = dict(row)
    given = own.get("images")
    if given is not None:
        own["images"] = [put(_bytes(image, where)) for image in given] or None
    name = "messages" if "messages" in own else "prompt"
    messages = own.get(name)
    if isinstance(messages, str) or messages is None or not any(map(_image_parts, messages)):
        return own
    waiting = list(own.get("images") or ())
    digests: list[str] = []
    own[name] = [_marked(message, put, waiting, digests, where) for message in messages]
    own["images"] = [*digests, *waiting] or None
    return own


def _image_parts(message: object) -> list[Mapping[str, Any]]:
    """Lists the parts of a message's content that are images."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") in KINDS]


def _marked(
    message: Mapping[str, Any], put: Callable[[bytes], str], waiting: list[str], digests: list[str], where: str
) -> Mapping[str, Any]:
    """Returns a message whose content is a text with marks; moves digests that it uses from `waiting` to `digests`."""
    parts = _image_parts(message)
    given = [_given(part) for part in parts]
    if not parts or given.count(None) > len(waiting) or any(isinstance(image, str) for image in given):
        return message
    own = [waiting.pop(0) if image is None else put(_bytes(image, where)) for image in given]
    digests += own
    texts = (
        part if isinstance(part, str) else MARK if part.get("type") in KINDS else str(part.get("text", ""))
        for part in message["content"]
    )
    return {**message, "content": "".join(texts), "images": own}


def _given(part: Mapping[str, Any]) -> object:
    """Returns what a part holds: an image, a text that is none, or None."""
    image = next((part[name] for name in ("image", "image_url", "url") if part.get(name) is not None), None)
    image = _inner(image)
    if isinstance(image, str) and image.startswith(DATA_URL):
        with suppress(binascii.Error):
            return base64.b64decode(image.partition(",")[2], validate=True)
    return image


def _inner(image: object) -> object:
    """Takes an image out of Hugging Face's form, or of OpenAI's `image_url`."""
    if isinstance(image, Mapping):
        return next((image[name] for name in ("bytes", "url", "path") if image.get(name) is not None), None)
    return image


def _bytes(image: object, where: str) -> bytes:
    """Returns the encoded bytes of an image. Raises `UserError` if it is none that can be shown."""
    image = _inner(image)
    if isinstance(image, Image.Image):
        sink = io.BytesIO()
        image.save(sink, "PNG")
        return sink.getvalue()
    if not isinstance(image, bytes | bytearray | memoryview):
        raise UserError(f"{where}: images: {type(image).__name__} is no image: give its bytes, or an image of Pillow")
    data = bytes(image)
    check_image(data, f"{where}: an image")
    return data
