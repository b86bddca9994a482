"""Divides what the policy wrote into what it thought and what it said, and puts it together again, to the character.

A conversation continues the policy's tokens only if its text comes back as it was. So the marks around a thought, with
their white space, travel with it, in a field that clients return unread.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import NamedTuple

_CLOSED = re.compile(r"(\s*<think>\s*)?(.*?)(\s*</think>\s*)(.*)", re.DOTALL)
_OPEN = re.compile(r"(\s*<think>\s*)(.*)()()", re.DOTALL)


class Thought(NamedTuple):
    """The parts of a text, in order."""

    opening: str
    """The mark before the thought; empty if the chat template has written it."""
    thinking: str
    closing: str
    """The mark after the thought; empty if the answer was cut off before."""
    text: str
    """The rest."""


def divided(content: str) -> Thought | None:
    """Divides a text; returns None if it has no thought."""
    match = _CLOSED.fullmatch(content) or _OPEN.fullmatch(content)
    return None if match is None else Thought(*(part or "" for part in match.groups()))


def written(thinking: str) -> str:
    """Writes a thought that another model had."""
    return f"<think>\n{thinking}\n</think>\n\n"


def sealed(*texts: str) -> str:
    """Packs texts into a field that clients return unread."""
    return base64.b64encode(json.dumps(texts).encode()).decode()


def unsealed(seal: str, count: int) -> list[str] | None:
    """Returns the texts of `sealed`; None if the field is from elsewhere."""
    try:
        texts = json.loads(base64.b64decode(seal, validate=True))
    except (binascii.Error, ValueError, RecursionError):
        return None
    good = isinstance(texts, list) and len(texts) == count and all(isinstance(text, str) for text in texts)
    return texts if good else None
