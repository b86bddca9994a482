"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ratchet.rlhf.agents.conversations import ChatConversation
from ratchet.rlhf.agents.dialects.dialect import (
    MODEL,
    DataUrl,
    Dialect,
    JSONObject,
    Strict,
    cannot_force,
    images_in_answer,
    read,
)
from ratchet.rlhf.agents.dialects.openai_choices import ChoiceExchange, ChoiceParameters
from ratchet.rlhf.agents.sessions import Asked, PolicyReply
from ratchet.rlhf.rollout.engine import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: DataUrl


class ImageUrlPart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class Function(Strict):
    name: str
    arguments: str


class MessageCall(Strict):
    id: str
    function: Function


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | ImageUrlPart, Field(discriminator="type")]] | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    def as_written(self) -> JSONObject:
        """Returns the message; LiteLLM takes the thought out of an answer's content, and gives both back.

        Raises Refused if an answer has images.
        """
        message = self.model_dump(exclude_none=True, exclude={"reasoning_content"})
        if self.role != "assistant":
            return message
        parts = self.content if isinstance(self.content, list) else []
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        if len(texts) < len(parts):
            raise images_in_answer("messages")
        if self.reasoning_content is not None:
            content = self.content if isinstance(self.content, str) else "".join(texts)
            # others give back the whole content, too
            if "</think>" not in content:
                message["content"] = f"<think>{self.reasoning_content}</think>{content}"
        return message


class ToolFunction(Strict):
    name: str


class ToolSchema(Strict):
    type: Literal["function"]
    function: ToolFunction


class NamedTool(Strict):
    type: Literal["function"]
    function: ToolFunction


class ChatParameters(ChoiceParameters):
    """A call of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[ToolSchema] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None

    def asked(self, call_id: str) -> Asked:
        """Returns the call. Raises Unsupported if `tool_choice` would force the policy's tokens."""
        if self.tool_choice not in (None, "none", "auto"):
            choice = self.tool_choice
            raise cannot_force(choice.function.name if isinstance(choice, NamedTool) else choice)
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []]
        conversation = ChatConversation([message.as_written() for message in self.messages], tools)
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return Asked(
            conversation,
            call_id,
            max_tokens=min(limits, default=None),
            stop=self.stop_texts,
            tools=() if self.tool_choice == "none" else tuple(tool.function.name for tool in self.tools or []),
            one_call=self.parallel_tool_calls is False,
        )


class ChatDialect(Dialect):
    """``/v1/chat/completions``."""

    path = "chat/completions"

    def parse(self, body: bytes, sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> ChoiceExchange:
        return _Chat(read(ChatParameters, body, sampling), tokenizer)


class _Chat(ChoiceExchange):
    def __init__(self, parameters: ChatParameters, tokenizer: PreTrainedTokenizerBase) -> None:
        identity = f"chatcmpl-{secrets.token_hex(12)}"
        head = {"id": identity, "object": "chat.completion", "created": int(time.time()), "model": MODEL}
        super().__init__(parameters, parameters.asked(identity), head, "chat.completion.chunk")
        self._wants_log_probs, self._tokenizer = bool(parameters.logprobs), tokenizer

    def choice(self, index: int, answer: PolicyReply) -> JSONObject:
        return {
            "index": index,
            "message": dict(answer.message),
            "finish_reason": finish_reason(answer),
            "logprobs": self._log_probs(answer),
        }

    def first(self) -> Iterator[JSONObject]:
        yield {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def more(self, text: str) -> JSONObject:
        return {"delta": {"content": text}, "finish_reason": None}

    def last(self, answer: PolicyReply) -> Iterator[JSONObject]:
        for number, call in enumerate(answer.message.get("tool_calls", ())):
            yield {"delta": {"tool_calls": [{"index": number, **call}]}, "finish_reason": None}
        yield {"delta": {}, "finish_reason": finish_reason(answer), "logprobs": self._log_probs(answer)}

    def _log_probs(self, answer: PolicyReply) -> JSONObject | None:
        """Returns the log-prob of each token, at the run's temperature."""
        if not self._wants_log_probs:
            return None
        content = []
        for token, log_prob in zip(answer.ids, answer.log_probs, strict=True):
            text = str(self._tokenizer.decode([token]))
            content.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}


def finish_reason(answer: PolicyReply) -> str:
    """Returns the finish reason in OpenAI's terms."""
    return "tool_calls" if answer.calls else answer.finish_reason
