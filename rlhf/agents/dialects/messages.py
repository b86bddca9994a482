"""Anthropic's messages: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ratchet.rlhf.agents.conversations import ChatConversation
from ratchet.rlhf.agents.dialects.dialect import (
    LONGEST_STOP,
    MODEL,
    Dialect,
    Exchange,
    ImagePart,
    JSONObject,
    Parameters,
    Stream,
    Strict,
    calls_of,
    cannot_force,
    check_data_url,
    event,
    function_schema,
    joined,
    read,
    unsupported,
)
from ratchet.rlhf.agents.dialects.thoughts import divided, sealed, unsealed, written
from ratchet.rlhf.agents.sessions import Asked, PolicyReply, Refused
from ratchet.rlhf.rollout.engine import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
"""Types of errors by status; others are api_error."""


class TextBlock(Strict):
    type: Literal["text"]
    text: str


class ImageSource(Strict):
    type: Literal["base64"]
    media_type: str
    data: str

    @model_validator(mode="after")
    def _decode(self) -> ImageSource:
        check_data_url(self.url)
        return self

    @property
    def url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.media_type};base64,{self.data}"


class ImageBlock(Strict):
    type: Literal["image"]
    source: ImageSource


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JSONObject


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None


Block = Annotated[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Strict):
    name: str
    description: str | None = None
    input_schema: JSONObject
    type: Literal["custom"] | None = None


class ToolChoice(Strict):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesParameters(Parameters):
    """A call of ``/v1/messages``, or of ``/v1/messages/count_tokens``."""

    # a request to think has no effect on the policy; a client shortens the context by sending less of it
    ignored: ClassVar = frozenset(
        ("cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier", "thinking")
    )
    neutral: ClassVar = {"speed": ("standard",), "container": (), "mcp_servers": ([],)}
    max_tokens: int | None = Field(None, ge=1)
    messages: list[Message] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: list[Annotated[str, Field(max_length=LONGEST_STOP)]] | None = Field(None, max_length=LONGEST_STOP)
    output_config: OutputConfig | None = None

    def conversation(self) -> ChatConversation:
        """Returns the messages as a chat."""
        messages: list[JSONObject] = []
        if self.system:
            messages.append({"role": "system", "content": _joined(self.system)})
        for number, message in enumerate(self.messages):
            messages += _assistant(message, number) if message.role == "assistant" else _others(message, number)
        tools = [function_schema(tool.name, tool.description, tool.input_schema) for tool in self.tools or []]
        return ChatConversation(messages, tools)

    def asked(self, call_id: str) -> Asked:
        """Returns the call. Raises Unsupported if `tool_choice` would force the policy's tokens."""
        if self.max_tokens is None:
            raise Refused("max_tokens: Field required", param="max_tokens")
        if self.output_config is not None and self.output_config.format is not None:
            raise unsupported("output_config", "output_config.format would change how tokens are drawn: leave it out")
        choice = self.tool_choice or ToolChoice(type="auto")
        if choice.type in ("any", "tool"):
            raise cannot_force(choice.name or choice.type)
        return Asked(
            self.conversation(),
            call_id,
            max_tokens=self.max_tokens,
            stop=tuple(text for text in self.stop_sequences or () if text),
            tools=() if choice.type == "none" else tuple(tool.name for tool in self.tools or []),
            one_call=bool(choice.disable_parallel_tool_use),
        )


class OutputConfig(Strict):
    """How to answer; the effort has no effect."""

    format: JSONObject | None = None


MessagesParameters.model_rebuild()


def _joined(content: str | Sequence[TextBlock | ImageBlock] | None) -> str | list[JSONObject]:
    """Returns what others say; Anthropic's texts are paragraphs."""
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content or ()
    parts = (block.text if isinstance(block, TextBlock) else ImagePart(block.source.url) for block in blocks)
    return joined(parts, "\n")


def _assistant(message: Message, number: int) -> Iterator[JSONObject]:
    """Yields a message of the policy, with the text that it wrote, to the character."""
    if isinstance(message.content, str):
        yield {"role": "assistant", "content": message.content}
        return
    text, calls = "", list[JSONObject]()
    for block in message.content:
        if isinstance(block, TextBlock):
            text += block.text
        elif isinstance(block, ThinkingBlock):
            marks = unsealed(block.signature, 2)
            text += marks[0] + block.thinking + marks[1] if marks else written(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append({"id": block.id, "function": {"name": block.name, "arguments": block.input}})
        else:
            raise _misplaced(block.type, "assistant", number)
    # calls come back in the place of what the policy wrote from its first mark on
    yield {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def _others(message: Message, number: int) -> Iterator[JSONObject]:
    """Yields what a message of the program says: the results of tools, and texts."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[TextBlock | ImageBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock | ImageBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": _joined(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content)}
        else:
            raise _misplaced(block.type, message.role, number)
    if texts:
        yield {"role": message.role, "content": _joined(texts)}


def _misplaced(kind: str, role: str, number: int) -> Refused:
    return Refused(f"messages.{number}: a message of the {role} has no {kind} block", param="messages")


class MessagesDialect(Dialect):
    """``/v1/messages``."""

    path = "messages"

    def parse(self, body: bytes, sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> Exchange:
        return _Messages(read(MessagesParameters, body, sampling))

    def counted(self, body: bytes, sampling: Sampling) -> ChatConversation:
        """Reads a call of ``/v1/messages/count_tokens``. Raises Refused and Unsupported."""
        return read(MessagesParameters, body, sampling).conversation()

    def error(self, refused: Refused) -> JSONObject:
        kind = ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}}


class _Messages(Exchange):
    def __init__(self, parameters: MessagesParameters) -> None:
        self.identity = f"msg_{secrets.token_hex(12)}"
        self.asked = [parameters.asked(self.identity)]
        self.streams = bool(parameters.stream)

    def body(self, answers: Sequence[PolicyReply]) -> JSONObject:
        [answer] = answers
        reason, stop = stop_reason(answer)
        used = {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.ids)}
        return self.message(list(blocks(answer)), reason, stop, used)

    def message(
        self, content: list[JSONObject], reason: str | None, stop: str | None, used: dict[str, int]
    ) -> JSONObject:
        """Returns a message of the policy."""
        return {
            "id": self.identity,
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": used,
        }

    def stream(self) -> Stream:
        return _Events(self)


class _Events(Stream):
    """Blocks can only be told apart at the end, so until then there are only signs of life."""

    def __init__(self, exchange: _Messages) -> None:
        self._exchange, self._is_begun = exchange, False

    def _begun(self, input_tokens: int) -> Iterator[str]:
        if not self._is_begun:
            self._is_begun = True
            used = {"input_tokens": input_tokens, "output_tokens": 0}
            yield _event("message_start", message=self._exchange.message([], None, None, used))

    def text(self, choice: int, text: str) -> Iterator[str]:
        yield from self._begun(0)
        yield _event("ping")

    def answer(self, choice: int, answer: PolicyReply) -> Iterator[str]:
        yield from self._begun(answer.prompt_tokens)
        for index, block in enumerate(blocks(answer)):
            yield from _block_events(index, block)
        reason, stop = stop_reason(answer)
        used = {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.ids)}
        yield _event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=used)

    def end(self, answers: Sequence[PolicyReply]) -> Iterator[str]:
        yield _event("message_stop")

    def error(self, refused: Refused) -> Iterator[str]:
        yield event(MessagesDialect().error(refused), "error")


def _event(kind: str, **data: object) -> str:
    return event({"type": kind, **data}, kind)


def _block_events(index: int, block: JSONObject) -> Iterator[str]:
    """Yields the events of a block: the start of an empty one, and what it holds."""
    empty: JSONObject = {"thinking": "", "signature": "", "text": "", "input": {}}
    yield _event(
        "content_block_start",
        index=index,
        content_block={name: empty.get(name, value) for name, value in block.items()},
    )
    for name in ("thinking", "signature", "text"):
        if name in block:
            yield _event("content_block_delta", index=index, delta={"type": f"{name}_delta", name: block[name]})
    if "input" in block:
        written = json.dumps(block["input"], ensure_ascii=False)
        yield _event("content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": written})
    yield _event("content_block_stop", index=index)


def blocks(answer: PolicyReply) -> Iterator[JSONObject]:
    """Yields the blocks of an answer: what the policy thought, what it said, and its calls."""
    text = answer.message["content"] or ""
    if (thought := divided(text)) is not None:
        signature = sealed(thought.opening, thought.closing)
        yield {"type": "thinking", "thinking": thought.thinking, "signature": signature}
        text = thought.text
    if text:
        yield {"type": "text", "text": text}
    for identity, name, arguments in calls_of(answer):
        yield {"type": "tool_use", "id": identity, "name": name, "input": json.loads(arguments)}


def stop_reason(answer: PolicyReply) -> tuple[str, str | None]:
    """Returns why an answer ended, and the stop sequence that ended it."""
    if answer.calls:
        return "tool_use", None
    if answer.finish_reason == "length":
        return "max_tokens", None
    return ("end_turn", None) if answer.stop is None else ("stop_sequence", answer.stop)
