"""Tools that the policy calls by its chat template: Python functions, and tools of MCP servers.

A turn may contain calls in the format of Hermes and Qwen (``<tool_call>{"name": …, "arguments": {…}}</tool_call>``), of
Llama 3 (``{"name": …, "parameters": {…}}``), or of Mistral (``[TOOL_CALLS] [{"name": …, "arguments": {…}}]``). Their
results are messages of the role `tool`. A turn without a call is the answer, and ends the trajectory. A call that fails
is answered with the error, so that the policy can learn from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ratchet.rlhf import spans
from ratchet.rlhf.data.formats import Messages
from ratchet.rlhf.data.images import MARK
from ratchet.rlhf.environments.environment import Observation
from ratchet.rlhf.environments.tool_sources import Answer, CallFailed, Tool, ToolFailed, tools_of

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"
LONGEST_ERROR = 1000
"""Maximum length of an error that the policy reads, in characters."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: Mapping[str, JSON]


class MalformedCall(Exception):
    """The policy started a call that cannot be parsed."""


class Environment:
    """Answers the calls of a turn, in order. A crash repeats none whose result was stored."""

    stop = ()
    has_spans = True
    """Each call has a span."""

    def __init__(self, functions: Sequence[str] = (), mcp: Sequence[str] = ()) -> None:
        """Loads the tools, once per process."""
        self._tools = {tool.name: tool for tool in tools_of(tuple(functions), tuple(mcp))}

    @classmethod
    def identity(cls, functions: Sequence[str] = (), mcp: Sequence[str] = ()) -> str:
        """Returns the environment's dependencies beyond its own code: functions' code, other tools' schemas."""
        return json.dumps(sorted(tool.identity for tool in tools_of(tuple(functions), tuple(mcp))))

    @classmethod
    def schemas(cls, functions: Sequence[str] = (), mcp: Sequence[str] = ()) -> list[Mapping[str, Any]]:
        """Returns the schemas of the tools, for the chat template."""
        return [tool.schema for tool in tools_of(tuple(functions), tuple(mcp))]

    def reset(self, messages: Messages, ground_truth: Any, extra_info: Any) -> None:
        """Does nothing: the environment has no state."""

    def snapshot(self) -> str:
        """Returns nothing: the environment has no state."""
        return ""

    def restore(self, state: str) -> None:
        """Does nothing: the environment has no state."""

    def is_repeatable(self, turn: str) -> bool:
        """Returns False if a tool that the turn calls says so."""
        try:
            calls = tool_calls(turn, self._tools)
        except MalformedCall:
            return True
        return all(self._tools[call.name].is_repeatable for call in calls if call.name in self._tools)

    async def step(self, turn: str, key: str) -> Observation:
        """Makes the turn's calls, with the keys ``key/0``, ``key/1``, and so on."""
        try:
            calls = tool_calls(turn, self._tools)
        except MalformedCall as error:
            return Observation([{"role": "tool", "content": f"error: {error}"}])
        if not calls:
            return Observation(None)
        errors: list[str] = []
        results: list[dict[str, object]] = [
            {"role": "tool", "name": call.name, "content": await self._result(call, f"{key}/{number}", errors.append)}
            for number, call in enumerate(calls)
        ]
        return Observation(results, error=errors[0] if errors else None)

    async def _result(self, call: ToolCall, key: str, failed: Callable[[str], None]) -> Answer:
        """Returns what the policy reads; `failed` is called with the error of a tool that failed."""
        tool: Tool | None = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name}; there are {', '.join(self._tools)}"
        with spans.span(spans.TOOL, lambda: call.name, lambda: _asked(call, key)) as span:
            try:
                result = await tool.call(call.arguments, key)
            except CallFailed as error:
                span.failed(type(error).__name__)
                if isinstance(error, ToolFailed):
                    failed(str(error)[:LONGEST_ERROR])
                return f"error: {str(error)[:LONGEST_ERROR]}"
            span.set(lambda: {"gen_ai.tool.call.result": _told(result)} if spans.has_content() else {})
            return result


def _told(result: Answer) -> str:
    """Returns the text of a result, without its images."""
    if isinstance(result, str):
        return result
    return "".join(str(part["text"]) if part.get("type") == "text" else MARK for part in result)


def _asked(call: ToolCall, key: str) -> spans.Attributes:
    """Returns the attributes of a call's span."""
    known: spans.Attributes = {
        "gen_ai.tool.name": call.name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": key,
    }
    return {**known, "gen_ai.tool.call.arguments": json.dumps(call.arguments)} if spans.has_content() else known


def tool_calls(turn: str, names: Iterable[str]) -> list[ToolCall]:
    """Finds the calls in a turn, in any of the formats, in order.

    Args:
        names: names of the tools. JSON in Llama's format, which has no mark, is a call only if it names one.

    Raises:
        MalformedCall: a call is not JSON, or lacks the name or the arguments.
    """
    if "<tool_call>" in turn:
        texts = HERMES.findall(turn)
        if not texts or turn.rfind("<tool_call>") > turn.rfind("</tool_call>"):
            raise MalformedCall("a <tool_call> has no </tool_call>")
        return [_call(_decoded(text)) for text in texts]
    if MISTRAL in turn:
        decoded = _decoded(turn.partition(MISTRAL)[2])
        return [_call(item) for item in (decoded if isinstance(decoded, list) else [decoded])]
    start = turn.find("{")
    marked = LLAMA in turn
    if start < 0 or not (marked or not turn[:start].strip()):
        return []
    try:
        calls = [_call(value) for value in _several(turn[start:])]
    except MalformedCall:
        if marked:
            raise
        return []
    return calls if marked or calls[0].name in set(names) else []


def _several(text: str) -> Iterator[JSON]:
    """Yields the JSON values at the beginning of a text, separated by semicolons."""
    rest = ";" + text
    while rest.startswith(";"):
        value, end = _decoded_to(rest[1:].lstrip())
        rest = rest[1:].lstrip()[end:].lstrip()
        yield value


def _decoded(text: str) -> JSON:
    """Decodes the JSON value at the beginning of a text; a special token may follow it."""
    return _decoded_to(text.strip())[0]


def _decoded_to(text: str) -> tuple[JSON, int]:
    """Decodes the JSON value at the beginning of a text; returns it, and the position after it."""
    try:
        value: JSON
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"the call is not JSON: {error}") from None
    return value, end


def _call(value: JSON) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        raise MalformedCall('a call is a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write the arguments as a string
        arguments = _decoded(arguments)
    if not isinstance(arguments, dict):
        raise MalformedCall(f"the arguments of {name} are not a JSON object")
    return ToolCall(name, arguments)
