"""OpenAI's responses: https://platform.openai.com/docs/api-reference/responses.

No response is kept for a later call, which has the whole conversation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ratchet.rlhf.agents.conversations import ChatConversation
from ratchet.rlhf.agents.dialects.dialect import (
    MODEL,
    DataUrl,
    Dialect,
    Exchange,
    ImagePart,
    JSONObject,
    Parameters,
    Stream,
    Strict,
    calls_of,
    cannot_force,
    event,
    function_schema,
    images_in_answer,
    joined,
    read,
    unsupported,
)
from ratchet.rlhf.agents.dialects.thoughts import divided, sealed, unsealed, written
from ratchet.rlhf.agents.sessions import Asked, PolicyReply, Refused
from ratchet.rlhf.rollout.engine import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextPart(Strict):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: DataUrl


Contents = str | list[Annotated[TextPart | InputImage, Field(discriminator="type")]]


class MessageItem(Strict):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Contents


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    summary: list[TextPart] | None = None
    content: list[TextPart] | None = None
    encrypted_content: str | None = None


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Contents


def _kind(item: object) -> str:
    """Returns the type of an item, which messages may leave out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class Tool(Strict):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: JSONObject | None = None


class TextFormat(Strict):
    type: str


class TextConfig(Strict):
    format: TextFormat | None = None


class ResponsesParameters(Parameters):
    """A call of ``/v1/responses``."""

    ignored: ClassVar = frozenset(
        (
            "client_metadata",
            "include",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "reasoning",
            "safety_identifier",
            "service_tier",
            "store",
            "stream_options",
            "user",
        )
    )
    neutral: ClassVar = {
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = None
    tool_choice: str | JSONObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None

    def asked(self, call_id: str) -> Asked:
        """Returns the call. Raises Unsupported if it would force the policy's tokens."""
        if self.text is not None and self.text.format is not None and self.text.format.type != "text":
            raise unsupported("text", f"text.format {self.text.format.type[:100]} would change how tokens are drawn")
        if self.tool_choice not in (None, "none", "auto"):
            raise cannot_force(str(self.tool_choice))
        for number, tool in enumerate(self.tools or ()):
            if tool.type != "function" or tool.name is None:
                raise unsupported(
                    f"tools.{number}",
                    f"tools.{number}: the policy calls functions with a name, and no {tool.type[:100]}",
                )
        tools = [
            function_schema(tool.name, tool.description, tool.parameters) for tool in self.tools or () if tool.name
        ]
        names = tuple(tool.name for tool in self.tools or () if tool.name)
        return Asked(
            ChatConversation(self._messages(), tools),
            call_id,
            max_tokens=self.max_output_tokens,
            tools=() if self.tool_choice == "none" else names,
            one_call=self.parallel_tool_calls is False,
        )

    def _messages(self) -> list[JSONObject]:
        messages: list[JSONObject] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise Refused("input is empty", param="input")
        answer: JSONObject | None = None
        """The message of the policy that the items before make up."""
        for number, item in enumerate(self.input):
            is_policys = isinstance(item, ReasoningItem | CallItem) or (
                isinstance(item, MessageItem) and item.role == "assistant"
            )
            # what comes between two messages of others is one answer, unless a second thought begins another
            if is_policys and (answer is None or isinstance(item, ReasoningItem)):
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            if isinstance(item, ReasoningItem):
                assert answer is not None
                answer["content"] = _thought(item, number)
            elif isinstance(item, CallItem):
                assert answer is not None
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                answer.setdefault("tool_calls", []).append(call)
            elif is_policys and isinstance(item, MessageItem):
                assert answer is not None
                if isinstance(item.content, str):
                    answer["content"] += item.content
                else:
                    texts = [part for part in item.content if isinstance(part, TextPart)]
                    if len(texts) < len(item.content):
                        raise images_in_answer(f"input.{number}")
                    answer["content"] += _texts(texts, "")
            else:
                answer = None
                if isinstance(item, ResultItem):
                    result = _joined(item.output)
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": result})
                elif isinstance(item, MessageItem):
                    messages.append({"role": item.role, "content": _joined(item.content)})
        return messages


def _joined(content: Contents) -> str | list[JSONObject]:
    if isinstance(content, str):
        return content
    return joined((part.text if isinstance(part, TextPart) else ImagePart(part.image_url) for part in content), "\n")


def _texts(parts: Iterable[TextPart], between: str) -> str:
    return between.join(part.text for part in parts)


def _thought(item: ReasoningItem, number: int) -> str:
    """Returns what the policy wrote of a thought."""
    if item.encrypted_content is not None and (parts := unsealed(item.encrypted_content, 3)) is not None:
        return "".join(parts)
    texts = item.content or item.summary or []
    if not texts:
        raise Refused(
            f"input.{number}: the reasoning has no text, and its encrypted_content is from elsewhere", param="input"
        )
    return written(_texts(texts, "\n"))


class ResponsesDialect(Dialect):
    """``/v1/responses``."""

    path = "responses"

    def parse(self, body: bytes, sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> Exchange:
        return _Responses(read(ResponsesParameters, body, sampling), sampling)


class _Responses(Exchange):
    def __init__(self, parameters: ResponsesParameters, sampling: Sampling) -> None:
        identity = f"resp_{secrets.token_hex(12)}"
        self.asked = [parameters.asked(identity)]
        self.streams = bool(parameters.stream)
        self._head: JSONObject = {
            "id": identity,
            "object": "response",
            "created_at": int(time.time()),
            "model": MODEL,
            "instructions": parameters.instructions,
            "max_output_tokens": parameters.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": parameters.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": parameters.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in parameters.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }

    def response(self, status: str, output: Sequence[JSONObject] = (), **more: object) -> JSONObject:
        """Returns a response with a status."""
        fields = {"error": None, "incomplete_details": None, "usage": None} | more
        return {**self._head, "status": status, "output": list(output), **fields}

    def body(self, answers: Sequence[PolicyReply]) -> JSONObject:
        [answer] = answers
        details = {"reason": "max_output_tokens"} if status_of(answer) == "incomplete" else None
        return self.response(status_of(answer), list(items(answer)), incomplete_details=details, usage=usage(answer))

    def stream(self) -> Stream:
        return _Events(self)


class _Events(Stream):
    """Items can only be told apart at the end, so until then there are only signs of life."""

    def __init__(self, exchange: _Responses) -> None:
        self._exchange, self._number = exchange, 0

    def _event(self, kind: str, **data: object) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **data}, kind)

    def _begun(self) -> Iterator[str]:
        if not self._number:
            yield self._event("response.created", response=self._exchange.response("in_progress"))
            yield self._event("response.in_progress", response=self._exchange.response("in_progress"))

    def text(self, choice: int, text: str) -> Iterator[str]:
        # a comment, which clients skip
        yield from self._begun() if not self._number else (": the policy is writing\n\n",)

    def answer(self, choice: int, answer: PolicyReply) -> Iterator[str]:
        yield from self._begun()
        for index, item in enumerate(items(answer)):
            yield from self._item(index, item)

    def _item(self, index: int, item: JSONObject) -> Iterator[str]:
        """Yields the events of an item: an empty one, and what it holds."""
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            empty = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=empty)
            yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield self._event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        else:
            empty = {**item, "content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=empty)
            [part] = item["content"]
            logprobs: JSONObject = {"logprobs": []} if part["type"] == "output_text" else {}
            yield self._event("response.content_part.added", **place, content_index=0, part={**part, "text": ""})
            yield self._event(
                f"response.{part['type']}.delta", **place, content_index=0, delta=part["text"], **logprobs
            )
            yield self._event(f"response.{part['type']}.done", **place, content_index=0, text=part["text"], **logprobs)
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def end(self, answers: Sequence[PolicyReply]) -> Iterator[str]:
        yield self._event(f"response.{status_of(answers[0])}", response=self._exchange.body(answers))

    def error(self, refused: Refused) -> Iterator[str]:
        error = {"code": refused.code, "message": str(refused)}
        yield self._event("response.failed", response=self._exchange.response("failed", error=error))


def items(answer: PolicyReply) -> Iterator[JSONObject]:
    """Yields the items of an answer: what the policy thought, what it said, and its calls."""
    text, status = answer.message["content"] or "", status_of(answer)
    if (thought := divided(text)) is not None:
        yield {
            "id": f"rs_{answer.digest[:24]}",
            "type": "reasoning",
            "status": "completed" if thought.closing else status,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": thought.thinking}],
            "encrypted_content": sealed(thought.opening, thought.thinking, thought.closing),
        }
        text = thought.text
    if text or not answer.calls:
        part: JSONObject = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        yield {
            "id": f"msg_{answer.digest[:24]}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
    for identity, name, arguments in calls_of(answer):
        yield {
            "id": f"fc_{identity}",
            "type": "function_call",
            "status": "completed",
            "call_id": identity,
            "name": name,
            "arguments": arguments,
        }


def status_of(answer: PolicyReply) -> str:
    """Returns completed, or incomplete if the answer was cut off."""
    return "incomplete" if answer.finish_reason == "length" else "completed"


def usage(answer: PolicyReply) -> JSONObject:
    """Returns the numbers of tokens. The tokens of thoughts are not counted apart."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(answer.ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + len(answer.ids),
    }
