"""Messages of other trainers as texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ratchet.rlhf.data.formats import Message, text_of


def text(message: Mapping[str, Any]) -> str:
    """Returns the text of a message, and its calls of tools as JSON."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content if part.get("type") == "text")
    return text_of(cast(Message, {"content": content, "tool_calls": message.get("tool_calls") or []}))
