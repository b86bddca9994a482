"""Formats the calls of an agent for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Said(NamedTuple):
    """A line of a transcript."""

    role: str
    """policy, or the role of a message of the program; tools: the tools that it offered."""
    content: str


def transcript(calls: Iterable[Mapping[str, Any]]) -> list[Said]:
    """Formats the calls of a conversation (the column `calls` of a trajectory).

    Each call yields the messages that it added, and the policy's answer, with tool calls as ``name(arguments)``.
    """
    lines: list[Said] = []
    for call in calls:
        asked = json.loads(call["asked"])
        if "tools" in asked:
            lines.append(Said("tools", ", ".join(tool["function"]["name"] for tool in asked["tools"])))
        if "prompt" in asked:
            lines.append(Said("prompt", str(asked["prompt"])))
        lines += [Said(message["role"], content_text(message)) for message in asked.get("messages", ())]
        lines.append(Said("policy", content_text(json.loads(call["answer"]))))
    return lines


def content_text(message: Mapping[str, Any]) -> str:
    """Returns the text of a message, with tool calls as ``name(arguments)``."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = [f"{call['name']}({arguments_text(call['arguments'])})" for call in calls]
    return "\n".join(part for part in (message.get("content"), *written) if part)


def arguments_text(arguments: Any) -> str:
    """Returns the arguments of a tool call as JSON."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
