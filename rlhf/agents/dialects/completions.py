"""OpenAI's completions of texts and tokens: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from ratchet.rlhf.agents.conversations import Completion
from ratchet.rlhf.agents.dialects.dialect import MODEL, Dialect, JSONObject, read
from ratchet.rlhf.agents.dialects.openai_choices import ChoiceExchange, ChoiceParameters
from ratchet.rlhf.agents.sessions import Asked, PolicyReply, Refused
from ratchet.rlhf.rollout.engine import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CompletionParameters(ChoiceParameters):
    """A call of ``/v1/completions``."""

    prompt: str | list[int] | list[str]
    logprobs: int | None = None

    def asked(self, call_id: str) -> Asked:
        """Returns the call."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) > 1:
                raise Refused("prompt has several texts: make a call for each", param="prompt")
            prompt = prompt[0]
        if not prompt:
            raise Refused("prompt is empty", param="prompt")
        # OpenAI's default for completions
        limit = 16 if self.max_tokens is None else self.max_tokens
        conversation = Completion(cast("str | list[int]", prompt))
        return Asked(conversation, call_id, max_tokens=limit, stop=self.stop_texts)


class CompletionsDialect(Dialect):
    """``/v1/completions``."""

    path = "completions"

    def parse(self, body: bytes, sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> ChoiceExchange:
        return _Completions(read(CompletionParameters, body, sampling), tokenizer)


class _Completions(ChoiceExchange):
    def __init__(self, parameters: CompletionParameters, tokenizer: PreTrainedTokenizerBase) -> None:
        identity = f"cmpl-{secrets.token_hex(12)}"
        head = {"id": identity, "object": "text_completion", "created": int(time.time()), "model": MODEL}
        super().__init__(parameters, parameters.asked(identity), head, "text_completion")
        self._wants_log_probs, self._tokenizer = parameters.logprobs is not None, tokenizer

    def choice(self, index: int, answer: PolicyReply) -> JSONObject:
        return {
            "index": index,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "logprobs": self._log_probs(answer),
        }

    def first(self) -> Iterator[JSONObject]:
        yield from ()

    def more(self, text: str) -> JSONObject:
        return {"text": text, "finish_reason": None, "logprobs": None}

    def last(self, answer: PolicyReply) -> Iterator[JSONObject]:
        yield {"text": "", "finish_reason": answer.finish_reason, "logprobs": self._log_probs(answer)}

    def _log_probs(self, answer: PolicyReply) -> JSONObject | None:
        if not self._wants_log_probs:
            return None
        texts = [str(self._tokenizer.decode([token])) for token in answer.ids]
        return {
            "tokens": texts,
            "token_logprobs": list(answer.log_probs),
            "top_logprobs": None,
            "text_offset": [sum(map(len, texts[:number])) for number in range(len(texts))],
        }
