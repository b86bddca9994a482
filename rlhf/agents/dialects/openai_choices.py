"""What OpenAI's chat and completions share: parameters, choices and usage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from ratchet.rlhf.agents.dialects.dialect import (
    LONGEST_STOP,
    Exchange,
    JSONObject,
    Parameters,
    Stream,
    event,
    openai_error,
)
from ratchet.rlhf.agents.sessions import Asked, PolicyReply, Refused

LARGEST_N = 64
StopText = Annotated[str, Field(max_length=LONGEST_STOP)]


class ChoiceParameters(Parameters):
    """Parameters of both kinds of calls."""

    ignored: ClassVar = frozenset(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options")
    )
    neutral: ClassVar = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "top_logprobs": (0,),
        "echo": (False,),
        "suffix": ("",),
        "best_of": (1,),
        "modalities": (["text"],),
    }
    n: int | None = Field(None, ge=1, le=LARGEST_N)
    stop: StopText | Annotated[list[StopText], Field(max_length=LONGEST_STOP)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    stream_options: JSONObject | None = None

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the numbers of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)


class ChoiceExchange(Exchange):
    """A call whose answers are choices."""

    def __init__(self, parameters: ChoiceParameters, asked: Asked, head: JSONObject, chunk: str) -> None:
        """Takes a call.

        Args:
            head: the fields that all answers share.
            chunk: `object` of events.
        """
        self.streams = bool(parameters.stream)
        self.includes_usage = parameters.includes_usage
        others = (replace(asked, call_id=f"{asked.call_id}-{number}") for number in range(1, parameters.n or 1))
        self.asked = [asked, *others]
        self.head = head
        self._chunk = chunk

    @abstractmethod
    def choice(self, index: int, answer: PolicyReply) -> JSONObject:
        """Returns a choice of a body."""

    @abstractmethod
    def first(self) -> Iterable[JSONObject]:
        """Returns the chunks that begin a choice, without their index."""

    @abstractmethod
    def more(self, text: str) -> JSONObject:
        """Returns the chunk for a text."""

    @abstractmethod
    def last(self, answer: PolicyReply) -> Iterable[JSONObject]:
        """Returns the chunks that end a choice after its text."""

    @property
    def tells(self) -> bool:
        """True if the text is sent while it grows; calls and content can only be told apart at the end."""
        return not self.asked[0].tools

    def body(self, answers: Sequence[PolicyReply]) -> JSONObject:
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        return {**self.head, "choices": choices, "usage": usage(answers)}

    def stream(self) -> Stream:
        return _Chunks(self, {**self.head, "object": self._chunk})


class _Chunks(Stream):
    """Chunks of choices; the last event is [DONE]."""

    def __init__(self, exchange: ChoiceExchange, head: JSONObject) -> None:
        self._exchange, self._head = exchange, head
        self._told: dict[int, str] = {}

    def _begun(self, choice: int) -> Iterator[str]:
        if choice not in self._told:
            self._told[choice] = ""
            yield from (self._event(choice, chunk) for chunk in self._exchange.first())

    def _event(self, choice: int, chunk: JSONObject) -> str:
        return event({**self._head, "choices": [{"index": choice, **chunk}]})

    def text(self, choice: int, text: str) -> Iterator[str]:
        if self._exchange.tells:
            yield from self._begun(choice)
            self._told[choice] += text
            yield self._event(choice, self._exchange.more(text))

    def answer(self, choice: int, answer: PolicyReply) -> Iterator[str]:
        yield from self._begun(choice)
        # the end of the text was held back, because it might have become a stop text
        if rest := answer.text[len(self._told[choice]) :]:
            yield self._event(choice, self._exchange.more(rest))
        yield from (self._event(choice, chunk) for chunk in self._exchange.last(answer))

    def end(self, answers: Sequence[PolicyReply]) -> Iterator[str]:
        if self._exchange.includes_usage:
            yield event({**self._head, "choices": [], "usage": usage(answers)})
        yield event("[DONE]")

    def error(self, refused: Refused) -> Iterator[str]:
        yield event(openai_error(refused))


def usage(answers: Sequence[PolicyReply]) -> JSONObject:
    """Returns the numbers of tokens."""
    prompt, completion = answers[0].prompt_tokens, sum(len(answer.ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
