"""Looks at the images of a run, for people: kinds, sizes, and smaller copies."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image, ImageOps

from ratchet.infra.store.images import Images
from ratchet.infra.store.records import sha256_of
from ratchet.rlhf.data.images import FORMATS, MAX_PIXELS
from ratchet.rlhf.errors import UserError, in_one_line

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""The kinds of images that browsers are given as they are, by Pillow's names."""
SHORT = 8
"""Digits of a digest that people see."""


@dataclass(frozen=True)
class Picture:
    """What an image is, without its pixels."""

    digest: str
    kind: str
    """Its format, by Pillow's name."""
    width: int
    height: int
    size: int
    """Number of its encoded bytes."""

    def __str__(self) -> str:
        return f"{self.width}×{self.height} {self.kind}, {shown_size(self.size)}, {self.digest[:SHORT]}"


@dataclass(frozen=True)
class Shown:
    """An image for a browser. Its kind is one of `MEDIA_TYPES`: others, such as SVG, may hold programs."""

    data: bytes
    media_type: str


def picture(data: bytes) -> Picture:
    """Describes an image; its bytes decide what it is, and its pixels are not read.

    Raises:
        UserError: the bytes are no image of `FORMATS`.
    """
    with _opened(data) as image:
        return Picture(sha256_of(data), str(image.format), *image.size, len(data))


def shown(data: bytes, side: int | None = None) -> Shown:
    """Returns an image as a browser shows it: as it is, or a copy as PNG or JPEG if its kind is none of `MEDIA_TYPES`.

    Args:
        side: the longest side of a copy, in pixels, of the first frame; an image that is small already stays as it is.
            None: of any size.

    Raises:
        UserError: the bytes are no image of `FORMATS`, or a copy is needed and Pillow cannot read the pixels.
    """
    with _opened(data) as image:
        media_type = MEDIA_TYPES.get(str(image.format))
        is_small = side is None or (max(image.size) <= side and len(data) <= 4 * side * side)
        if media_type is not None and is_small:
            return Shown(data, media_type)
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"it has {image.width}×{image.height} pixels, more than {MAX_PIXELS:,}")
        if side is not None:
            image.draft("RGB", (side, side))  # a JPEG is decoded at a fraction of its size
        copy = ImageOps.exif_transpose(image)
        if side is not None:
            copy.thumbnail((side, side))
        sink = io.BytesIO()
        if copy.mode in ("L", "RGB", "CMYK", "YCbCr") and side is not None:
            copy.convert("RGB").save(sink, "JPEG", quality=80)
            return Shown(sink.getvalue(), MEDIA_TYPES["JPEG"])
        copy.convert("RGBA").save(sink, "PNG")
        return Shown(sink.getvalue(), MEDIA_TYPES["PNG"])


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
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    # Pillow's errors about damaged bytes are of many types
    except (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, Image.DecompressionBombError) as error:
        raise UserError(
            f"images/{sha256_of(data)} cannot be shown: it is no {', '.join(FORMATS)} that Pillow reads "
            f"({in_one_line(error).partition(' <')[0]}); `open_run(RUN).image(DIGEST)` returns its bytes"
        ) from None
