"""OpenAI's chat and completion calls: their supported parameters, and answers and errors in OpenAI's shape.

See https://platform.openai.com/docs/api-reference/chat. Parameters that would draw from another distribution than the
run's are refused, because the run would train on tokens that its policy did not draw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet.rlhf.agents.conversations import ChatConversation, Completion, Conversation
from ratchet.rlhf.agents.sessions import Asked, PolicyReply, Refused
from ratchet.rlhf.rollout.engine import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"
"""Name of the model that the endpoint serves."""
LARGEST_N = 64
LONGEST_STOP = 256
"""Maximum length of a stop text in characters, and maximum number of stop texts."""
StopText = Annotated[str, Field(max_length=LONGEST_STOP)]
IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options", "model")
)
"""Parameters without an effect on the answer."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
}
"""Parameters that would change how tokens are drawn, with the values that do not."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Function(_Strict):
    name: str
    arguments: str


class MessageCall(_Strict):
    id: str
    function: Function


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ToolFunction(_Strict):
    name: str


class ToolSchema(_Strict):
    type: Literal["function"]
    function: ToolFunction


class NamedTool(_Strict):
    type: Literal["function"]
    function: ToolFunction


class Parameters(_Strict):
    """Parameters of both kinds of calls; the others are in `model_extra`."""

    model: str
    n: int | None = Field(None, ge=1, le=LARGEST_N)
    stop: StopText | Annotated[list[StopText], Field(max_length=LONGEST_STOP)] | None = None
    stream: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    stream_options: dict[str, Any] | None = None

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the numbers of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def _stop(self) -> tuple[str, ...]:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    def check(self, sampling: Sampling) -> str | None:
        """Returns the name of a parameter that does not fit the run; None if all fit."""
        given = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name, value in given.items():
            if name in IGNORED or (name in NEUTRAL and value in NEUTRAL[name]):
                continue
            if name in SAMPLING and value == getattr(sampling, name):
                continue
            return name
        return None


class ChatParameters(Parameters):
    """A call of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[ToolSchema] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None

    def asked(self, call_id: str) -> Asked:
        """Returns the call. A `tool_choice` of `required`, or of a function, does not force the policy's tokens."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []]
        conversation = ChatConversation([message.model_dump(exclude_none=True) for message in self.messages], tools)
        names = tuple(tool.function.name for tool in self.tools or [])
        if isinstance(self.tool_choice, NamedTool):
            names = (self.tool_choice.function.name,)
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return Asked(
            conversation,
            call_id,
            max_tokens=min(limits, default=None),
            stop=self._stop,
            tools=() if self.tool_choice == "none" else names,
        )


class CompletionParameters(Parameters):
    """A call of ``/v1/completions``."""

    prompt: str | list[int] | list[str]
    logprobs: int | None = None

    def asked(self, call_id: str) -> Asked:
        """Returns the call."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) > 1:
                raise Refused("prompt has several texts: make a call for each", param="prompt")
            [prompt] = prompt
        if not prompt:
            raise Refused("prompt is empty", param="prompt")
        conversation: Conversation = Completion(prompt)
        # OpenAI's default for completions
        limit = 16 if self.max_tokens is None else self.max_tokens
        return Asked(conversation, call_id, max_tokens=limit, stop=self._stop)


def explained(error: ValidationError) -> Refused:
    """Returns the error for malformed parameters."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "function-")))
    return Refused(f"{param or 'the body'}: {first['msg']}", param=param or None)


def error_body(refused: Refused) -> dict[str, Any]:
    """Returns an error in OpenAI's shape."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def usage(answers: Sequence[PolicyReply]) -> dict[str, int]:
    """Returns the numbers of tokens."""
    prompt, completion = answers[0].prompt_tokens, sum(len(answer.ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def head(identity: str, created: int, kind: str) -> dict[str, Any]:
    """Returns the fields that all answers share."""
    return {"id": identity, "object": kind, "created": created, "model": MODEL}


def finish_reason(answer: PolicyReply) -> str:
    """Returns the finish reason in OpenAI's terms."""
    return "tool_calls" if answer.calls else answer.finish_reason


def chat_choice(index: int, answer: PolicyReply, wanted: bool, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Builds one choice of an answer to ``/v1/chat/completions``."""
    return {
        "index": index,
        "message": dict(answer.message),
        "finish_reason": finish_reason(answer),
        "logprobs": chat_log_probs(answer, tokenizer) if wanted else None,
    }


def chat_log_probs(answer: PolicyReply, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the log-prob of each token, at the run's temperature."""
    content = []
    for token, log_prob in zip(answer.ids, answer.log_probs, strict=True):
        text = str(tokenizer.decode([token]))
        content.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def completion_choice(
    index: int, answer: PolicyReply, wanted: bool, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Builds one choice of an answer to ``/v1/completions``."""
    log_probs = None
    if wanted:
        texts = [str(tokenizer.decode([token])) for token in answer.ids]
        offsets = [sum(map(len, texts[:number])) for number in range(len(texts))]
        log_probs = {"tokens": texts, "token_logprobs": list(answer.log_probs), "top_logprobs": None}
        log_probs["text_offset"] = offsets
    return {"index": index, "text": answer.text, "finish_reason": answer.finish_reason, "logprobs": log_probs}


def chat_deltas(answer: PolicyReply, wanted: bool, tokenizer: PreTrainedTokenizerBase, told: bool) -> Iterator[Any]:
    """Yields the last deltas of a stream: the content, unless it was `told`, the tool calls, and the finish reason."""
    if answer.text and not told:
        yield {"delta": {"content": answer.text}, "finish_reason": None}
    for number, call in enumerate(answer.message.get("tool_calls", ())):
        yield {"delta": {"tool_calls": [{"index": number, **call}]}, "finish_reason": None}
    log_probs = chat_log_probs(answer, tokenizer) if wanted else None
    yield {"delta": {}, "finish_reason": finish_reason(answer), "logprobs": log_probs}


def event(data: Any) -> str:
    """Formats a server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"
