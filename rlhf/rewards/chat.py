"""Questions to an OpenAI-compatible server. Answers are kept: no question is asked twice."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Protocol, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from ratchet.rlhf.rewards.functions import RewardFailed

T = TypeVar("T")
Message = dict[str, str]
"""`{role, content}`"""

KEY = "reward.judge"
LONGEST_PAUSE_S = 60.0
"""Maximum pause before a question is repeated, whatever the server asks for."""
BUSY = (408, 409, 425, 429)
"""Statuses of a busy server, in addition to those from 500 on."""
_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


class AnswerCache(Protocol):
    """Stored answers, by the digest of the question."""

    async def get(self, digest: str) -> str | None:
        """Returns the answer to a question; None if it was not answered yet."""

    async def keep(self, digest: str, answer: str) -> str:
        """Keeps the answer to a question unless there is one; returns the one that is kept."""


class _AskAgain(RewardFailed):
    """The server gave no usable answer, but may give one later."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s
        """Seconds to wait first; None: longer each time."""


class ChatClient:
    """A model on a server that speaks OpenAI's protocol. Used on one event loop."""

    def __init__(
        self,
        url: str,
        model: str,
        retries: int,
        api_key_env: str,
        *,
        timeout_s: float,
        concurrency: int,
        answers: AnswerCache,
    ) -> None:
        """Prepares the client, which connects with the first question.

        Args:
            url: base URL of the server, such as ``http://127.0.0.1:8000/v1``.
            retries: number of retries if the server is busy, fails, or gives no usable answer.
            api_key_env: name of the environment variable that holds the key; without that variable none is sent.
            timeout_s: time limit of a request, in seconds.
            concurrency: maximum number of concurrent questions.
        """
        self._url, self._model, self._retries = f"{url.rstrip('/')}/chat/completions", model, retries
        self._key_env, self._key = api_key_env, os.environ.get(api_key_env)
        self._timeout_s, self._answers = timeout_s, answers
        self._slots = asyncio.Semaphore(concurrency)
        self._client: httpx.AsyncClient | None = None
        self._asked: dict[str, asyncio.Task[str]] = {}
        """Questions in progress, by digest."""
        self._takes_json_mode = True

    async def ask(self, messages: Sequence[Message], read: Callable[[object], T]) -> T:
        """Asks for a JSON value at temperature 0, unless the same question was asked before. Raises RewardFailed.

        Args:
            read: converts the JSON value; raises ValueError if it is not what was asked for.
        """
        question = {"model": self._model, "messages": list(messages), "temperature": 0.0}
        digest = sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        if digest not in self._asked:
            asking = self._asked[digest] = asyncio.create_task(self._answer(digest, question, read))
            asking.add_done_callback(lambda _: self._asked.pop(digest))
        # shielded: one caller's cancellation must not cancel the question for the others
        return read(_parsed(await asyncio.shield(self._asked[digest])))

    async def _answer(self, digest: str, question: Mapping[str, object], read: Callable[[object], object]) -> str:
        """Returns the kept answer, or asks for one and keeps it. `read` accepts it."""
        if (kept := await self._answers.get(digest)) is not None:
            return kept
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(_AskAgain),
            stop=stop_after_attempt(self._retries + 1),
            wait=_pause_s,
            reraise=True,
        )
        async with self._slots:  # held until the answer is kept, so that few answers can be lost
            answer: str = await attempts(self._usable_answer, question, read)
            return await self._answers.keep(digest, answer)

    async def _usable_answer(self, question: Mapping[str, object], read: Callable[[object], object]) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._post(question)
        except TimeoutError:
            raise _AskAgain(f"{KEY}: {self._url} took longer than reward.timeout_s {self._timeout_s:g} s") from None
        try:
            read(_parsed(answer))
        except (ValueError, RecursionError) as error:
            raise _AskAgain(f"{KEY}: the model answered {answer[-200:]!r}, which is not usable: {error}", 0.0) from None
        return answer

    async def _post(self, question: Mapping[str, object]) -> str:
        """Returns the text of the model's answer. Servers without JSON mode are asked for plain text."""
        if not self._takes_json_mode:
            return self._text_of(await self._request(question))
        response = await self._request({**question, "response_format": {"type": "json_object"}})
        # perhaps because it has no JSON mode
        if response.status_code in (400, 422):
            plain = await self._request(question)
            self._takes_json_mode = not plain.is_success  # otherwise it refuses something else
            response = plain
        return self._text_of(response)

    async def _request(self, body: Mapping[str, object]) -> httpx.Response:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            return await self._client.post(self._url, content=json.dumps(body), headers=headers)
        except httpx.HTTPError as error:
            raise _AskAgain(f"{KEY}: {self._url} cannot be reached: {type(error).__name__} {error}") from None

    def _text_of(self, response: httpx.Response) -> str:
        status = response.status_code
        if not response.is_success:
            excerpt = " ".join(response.text[:300].split())
            if self._key:
                excerpt = excerpt.replace(self._key, "***")
            reason = f"{KEY}: {self._url} answered {status} {response.reason_phrase}: {excerpt}"
            if status in BUSY or status >= 500:
                raise _AskAgain(reason, _seconds(response.headers.get("retry-after")))
            raise RewardFailed(reason + self._remedy(status))
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise _AskAgain(f"{KEY}: {self._url} answered {response.text[:200]!r}, which is no chat completion", 0.0)
        return text

    def _remedy(self, status: int) -> str:
        if status in (401, 403):
            state = "set, but not accepted" if self._key else "not set"
            return f" (the environment variable {self._key_env}, {KEY}.api_key_env, is {state})"
        if status == 404:
            return f" (check {KEY}.url, which usually ends in /v1, and {KEY}.model)"
        return ""


def _pause_s(state: RetryCallState) -> float:
    """Returns the seconds before a question is repeated."""
    assert state.outcome is not None, "an attempt has ended"
    error = state.outcome.exception()
    if isinstance(error, _AskAgain) and error.after_s is not None:
        return min(error.after_s, LONGEST_PAUSE_S)
    return wait_random_exponential(multiplier=1, max=LONGEST_PAUSE_S)(state)


def _seconds(retry_after: str | None) -> float | None:
    try:
        return max(float(retry_after), 0.0) if retry_after is not None else None
    except ValueError:  # a date
        return None


def _parsed(answer: str) -> object:
    """Returns the JSON value of an answer: all of it, after a model's thoughts, or in a fence. Raises ValueError."""
    text = answer.rpartition("</think>")[2].strip()
    fenced = _FENCE.fullmatch(text)
    value: object = json.loads(text if fenced is None else fenced[1], parse_constant=_refuse)
    return value


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
