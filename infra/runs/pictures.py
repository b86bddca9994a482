"""Looks at the images of a run, for people: kinds, sizes, and smaller copies."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image, ImageOps

from ratchet.infra.store.images import Images
from ratchet.infra.store.records import sha256_of
from ratchet.rlhf.errors import UserError, in_one_line

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""The kinds of images that are shown, by Pillow's names. Others, such as SVG, may hold programs."""
SHORT = 8
"""Digits of a digest that people see."""


@dataclass(frozen=True)
class Picture:
    """What an image is, without its pixels."""

    digest: str
    kind: str
    """A key of `MEDIA_TYPES`."""
    width: int
    height: int
    size: int
    """Number of its encoded bytes."""

    def __str__(self) -> str:
        return f"{self.width}×{self.height} {self.kind}, {shown_size(self.size)}, {self.digest[:SHORT]}"


def picture(data: bytes) -> Picture:
    """Describes an image; its bytes decide what it is, and its pixels are not read.

    Raises:
        UserError: the bytes are no image of `MEDIA_TYPES`.
    """
    with _opened(data) as image:
        return Picture(sha256_of(data), str(image.format), *image.size, len(data))


def media_type(data: bytes) -> str:
    """Returns the media type of an image. Raises `UserError` if it is none of `MEDIA_TYPES`."""
    return MEDIA_TYPES[picture(data).kind]


def thumbnail(data: bytes, side: int) -> bytes:
    """Returns an image without frames after the first, as PNG or JPEG, no side of which is longer than `side` pixels.

    The image itself is returned if it is small already. Raises `UserError` if the bytes are no image of `MEDIA_TYPES`,
    or Pillow cannot read its pixels.
    """
    with _opened(data) as image:
        if max(image.size) <= side and len(data) <= 4 * side * side:
            return data
        image.draft("RGB", (side, side))  # a JPEG is decoded at a fraction of its size
        small = ImageOps.exif_transpose(image)
        small.thumbnail((side, side))
        is_opaque = small.mode in ("L", "RGB", "CMYK", "YCbCr")
        sink = io.BytesIO()
        if is_opaque:
            small.convert("RGB").save(sink, "JPEG", quality=80)
        else:
            small.convert("RGBA").save(sink, "PNG")
        return sink.getvalue()


def described(images: Images, digest: str) -> Picture | str:
    """Describes a stored image, or says in one line why it cannot be shown."""
    try:
        return picture(images.get(digest))
    except UserError as error:
        return str(error)


def shown_size(size: int) -> str:
    """Returns a number of bytes for people, such as ``1.2 kB``."""
    for unit, factor in (("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """Opens an image, and raises Pillow's errors about its bytes as `UserError`."""
    try:
        with Image.open(io.BytesIO(data), formats=list(MEDIA_TYPES)) as image:
            yield image
    # Pillow's errors about damaged bytes are of many types
    except (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, Image.DecompressionBombError) as error:
        raise UserError(
            f"images/{sha256_of(data)} cannot be shown: it is no {', '.join(MEDIA_TYPES)} that Pillow reads "
            f"({in_one_line(error).partition(' <')[0]}); `open_run(RUN).image(DIGEST)` returns its bytes"
        ) from None
