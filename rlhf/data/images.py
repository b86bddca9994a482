"""Reads the images of prompts: their encoded bytes (PNG, JPEG and the like), and whether these can be decoded."""

from __future__ import annotations

import base64
import binascii
import hashlib
import sys
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.rlhf.errors import UserError, in_one_line

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageError(UserError):
    """An image of a row cannot be used, or the row's images do not fit its messages."""


MARK = "<image>"
"""What stands for an image in the content of a message."""
MAX_BYTES = 32 * 2**20
"""Largest size of an encoded image."""
MAX_PIXELS = 2**26
"""Largest width times height of an image."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are decoded; of several frames, the first. Others of Pillow start programs, or are no pictures."""
FORMS = 'a path, a data: URL, or an object such as {"bytes": ...}, {"path": ...} or {"base64": ...}'
"""How data may give an image, for errors."""
KEYS = ("bytes", "base64", "image", "image_url", "url", "path")
"""Keys of an object that gives an image, in order of precedence."""
TEXTS = ("bytes", "base64")
"""Those whose text is base64."""
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of an object that ask for another size of its image."""


def digest_of(data: bytes) -> str:
    """Returns the sha256 of an encoded image, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def image_bytes(value: object, folder: str, where: str) -> bytes:
    """Reads the encoded bytes of an image, which may be those of no image; see `check_image`.

    Args:
        value: a path; a URL that fsspec reads, or `data:`; bytes; a PIL image; or an object with one of `KEYS`, as
            OpenAI's content parts and the package `datasets` have.
        folder: local folder, or fsspec URL, where relative paths begin.
        where: file, row and number of the image, for errors.

    Raises:
        ImageError: there is no such image, it is on the web, or too large.
    """
    found = _found(value, where)
    data = found if isinstance(found, bytes) else _read(found, folder, where)
    if len(data) > MAX_BYTES:
        raise ImageError(f"{where} has more than the {MAX_BYTES:,} bytes that an image may have: make it smaller")
    return data


@lru_cache(maxsize=64)
def of_data_url(url: str) -> bytes:
    """Reads the encoded bytes of an image that callers of the policy show it, who name no files.

    Raises:
        ImageError: the URL is not `data:`, or its image cannot be decoded.
    """
    if url[:5].lower() != "data:":
        raise ImageError(f"an image is at {in_one_line(url):.60}: send its bytes, as data:image/png;base64,...")
    data = image_bytes(url, "", "an image")
    check_image(data, "an image")
    return data


def is_picture(value: object) -> bool:
    """Returns True if a value is a PIL image."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def data_url(data: bytes) -> str:
    """Returns the `data:` URL of an encoded image."""
    from PIL import Image

    with _opened(data, "an image") as image:
        kind = Image.MIME[str(image.format)]
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def is_named(value: object) -> bool:
    """Returns True if an image is in a file of its own, as `image_bytes` reads it."""
    try:
        return isinstance(_found(value, ""), str)
    except ImageError:
        return False


def _found(value: object, where: str) -> bytes | str:
    """Returns the encoded bytes of an image, or its path or URL."""
    if isinstance(value, dict):
        key = next((name for name in KEYS if value.get(name)), None)
        if key is None:
            raise ImageError(f"{where} is empty, or has another form: write {FORMS}")
        if size := next((name for name in SIZES if value.get(name) is not None), None):
            raise ImageError(f"{where} has {size}, and images are resized by the model's processor alone: remove it")
        inner = value[key]
        return _decoded(inner, where) if key in TEXTS and isinstance(inner, str) else _found(inner, where)
    if isinstance(value, str) and value[:5].lower() == "data:":
        head, comma, text = value.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ImageError(f"{where} is a data: URL without base64: write data:image/png;base64,...")
        return _decoded(text, where)
    if isinstance(value, bytes | str) and value:
        return value
    if is_picture(value):
        return _encoded(value)
    what = in_one_line(repr(value)) if value else "empty"
    raise ImageError(f"{where} is {what:.40}: write {FORMS}")


def check_image(data: bytes, where: str) -> None:
    """Raises ImageError if an image cannot be decoded completely, or has more than `MAX_PIXELS`."""
    with _opened(data, where) as image:
        image.draft(None, (1, 1))  # a JPEG is read to its end, but a small picture is made of it
        try:
            image.load()
        except Exception as error:
            raise _broken(where, error) from None


def size_of(data: bytes, where: str) -> tuple[int, int]:
    """Returns the width and height of an image, whose pixels are not decoded. Raises UserError as `decoded`."""
    with _opened(data, where) as image:
        return image.size


def decoded(data: bytes, where: str) -> Image:
    """Decodes an image in RGB. Raises ImageError if it cannot be decoded, or has more than `MAX_PIXELS`."""
    with _opened(data, where) as image:
        try:
            picture = image.convert("RGB")
        except Exception as error:
            raise _broken(where, error) from None
    picture.info = {}  # vLLM would turn a picture as its metadata asks
    return picture


def as_decoded(data: bytes, where: str) -> bytes:
    """Encodes an image as a PNG that everybody decodes as `decoded` does. Raises ImageError as it does.

    Others blend transparent pixels with white, or turn a photograph as its metadata asks.
    """
    with _opened(data, where) as image:
        if image.format == "PNG" and image.mode == "RGB" and not image.info and not image.getexif():
            return data
    return _encoded(decoded(data, where))


def _opened(data: bytes, where: str) -> Image:
    """Opens an image, whose pixels are not decoded yet."""
    from PIL import Image

    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise ImageError(f"{where} has more than {MAX_PIXELS:,} pixels: make it smaller") from None
    except Exception as error:
        raise _broken(where, error) from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{where} has {width} × {height} pixels, more than the {MAX_PIXELS:,} that an image may have: make it "
            "smaller"
        )
    return image


def _broken(where: str, error: Exception) -> ImageError:
    from PIL import UnidentifiedImageError

    # its message names an object in memory
    unknown = f"it is none of {', '.join(FORMATS)}"
    why = unknown if isinstance(error, UnidentifiedImageError) else in_one_line(error)
    return ImageError(f"{where} cannot be decoded ({why}): write the image again, or leave out the row")


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ImageError(f"{where} is not base64 ({error}): encode its bytes again") from None


def _read(path: str, folder: str, where: str) -> bytes:
    """Reads a file, but no more than shows that it is too large."""
    import fsspec

    if any(part.lower().startswith(("http:", "https:")) for part in path.split("::")):
        raise ImageError(
            f"{where} is at {path:.60}, and a run reads no images from the web: download it, and name its path"
        )
    is_absolute = "://" in path or Path(path).is_absolute()
    url = path if is_absolute or not folder else f"{folder.rstrip('/')}/{path}"
    try:
        with fsspec.open(url, "rb", expand=False) as file:
            data: bytes = file.read(MAX_BYTES + 1)
            return data
    except FileNotFoundError:
        fix = "correct its path" if is_absolute else "correct its path, which begins at the folder of the data"
        raise ImageError(f"{where} does not exist ({in_one_line(url)}): put it there, or {fix}") from None
    except Exception as error:  # each file system raises its own errors
        raise ImageError(
            f"{where} cannot be read ({in_one_line(url)}: {in_one_line(error)}): correct its path"
        ) from None


def _encoded(image: Any) -> bytes:
    """Encodes a PIL image as PNG; equal pixels give equal bytes."""
    written = BytesIO()
    image = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else image.convert("RGB")
    image.save(written, "PNG")
    return written.getvalue()
