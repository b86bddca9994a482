"""Finds the tokens that stand for images in the text of a prompt or response, and folds each run of them.

A processor writes a token for each patch of an image, a hundred or a thousand times the same, between tokens that tell
rows and tiles apart. Each model has its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.rlhf.errors import counted

_PATCH = r"<\|?(?:[\w-]*(?:image|img|vision_pad|patch)[\w-]*)\|?>|\[IMG\]"
"""A token for a patch, such as <|image_pad|>, <image>, <image_soft_token>, <IMG_CONTEXT> or [IMG]."""
_BETWEEN = r"<fake_token_around_image>|<row_\d+_col_\d+>|<global-img>|\[IMG_BREAK\]"
"""A token that tells rows or tiles of an image apart."""
_EDGE = re.compile(
    r"<\|?/?(?:vision_(?:start|end)|(?:image|img)_(?:start|end)|(?:start|end)_of_image|img)\|?>", re.IGNORECASE
)
"""A token before or after an image, which is text."""
_RUN = re.compile(rf"(?:(?:{_BETWEEN})\s*)*(?:{_PATCH})(?:\s*(?:{_PATCH}|{_BETWEEN}))*", re.IGNORECASE)
_TOKEN = re.compile(rf"{_PATCH}|{_BETWEEN}", re.IGNORECASE)


@dataclass(frozen=True)
class Part:
    """A part of a text: as it is, or a run of tokens for an image."""

    text: str
    """The text; empty for a run."""
    tokens: int = 0
    """The number of tokens of a run."""
    image: int | None = None
    """The place of the run's image among those of the trajectory, from 0; None: it is not known, or it is text."""


@dataclass(frozen=True)
class Fold:
    """Tokens of a response that stand for an image."""

    start: int
    end: int
    """The place of its first token, and after its last."""
    image: int | None
    """As in `Part`."""


@dataclass(frozen=True)
class PatchRun:
    """A run of tokens for an image in a text."""

    start: int
    end: int
    """The place of its first character, and after its last."""
    tokens: int


def runs_in(text: str) -> list[PatchRun]:
    """Lists the runs of tokens for images in a text."""
    found: list[PatchRun] = []
    for run in _RUN.finditer(text):
        # tokens around an image look like those of its patches in some models, and end a run
        start, tokens, end = None, 0, run.start()
        for token in _TOKEN.finditer(text, run.start(), run.end()):
            if _EDGE.fullmatch(token[0]):
                if start is not None and tokens:
                    found.append(PatchRun(start, end, tokens))
                start, tokens = None, 0
                continue
            start = token.start() if start is None else start
            tokens, end = tokens + 1, token.end()
        if start is not None and tokens:
            found.append(PatchRun(start, end, tokens))
    return found


def without_patches(text: str) -> str:
    """Replaces each run of an image's tokens by their number."""
    parts = parts_of(text, None)
    return "".join(f"[{counted(part.tokens, 'token')} of an image]" if part.tokens else part.text for part in parts)


def first_images(prompt: str, response: str, images: int) -> tuple[int | None, int | None]:
    """Returns the places of the first images of a prompt and of its response; None: the texts do not tell.

    They tell if there are as many runs as images. A model that tiles images may write more.
    """
    in_prompt, in_response = len(runs_in(prompt)), len(runs_in(response))
    return (0, in_prompt) if in_prompt + in_response == images else (None, None)


def parts_of(text: str, first: int | None) -> list[Part]:
    """Splits a text at its runs; a list of one part if it has none.

    Args:
        first: the place of the image of the first run; None: it is not known, and a single token is left as it is,
            which may be a word of the user's.
    """
    parts: list[Part] = []
    end = 0
    for number, run in enumerate(runs_in(text)):
        if first is None and run.tokens == 1:
            continue
        if run.start > end:
            parts.append(Part(text[end : run.start]))
        parts.append(Part("", run.tokens, None if first is None else first + number))
        end = run.end
    return [*parts, Part(text[end:])] if end < len(text) or not parts else parts


def folds_of(tokens: Sequence[str], first: int | None) -> list[Fold]:
    """Finds the runs among the texts of tokens; `first` is as in `parts_of`."""
    if not any(character in token for token in tokens for character in "<["):
        return []
    starts, length = [], 0
    for token in tokens:
        starts.append(length)
        length += len(token)
    folds: list[Fold] = []
    for number, run in enumerate(runs_in("".join(tokens))):
        if first is None and run.tokens == 1:
            continue
        inside = [place for place, start in enumerate(starts) if run.start <= start < run.end and tokens[place]]
        if inside:
            folds.append(Fold(inside[0], inside[-1] + 1, None if first is None else first + number))
    return folds
