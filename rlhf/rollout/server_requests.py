"""Requests to servers over HTTP, answered at once or by a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from ratchet.rlhf import event_loop
from ratchet.rlhf.errors import EngineLost, UserError

T = TypeVar("T")
AT_ONCE = 256
"""Maximum number of concurrent requests per server."""
TRIES = 5


class Away(Exception):
    """A server did not answer, or reported that it is unavailable."""


@dataclass
class Ask:
    """A server that answers HTTP requests."""

    client: httpx.AsyncClient
    url: str
    timeout_s: float
    progress: float = 0.0
    """Time at which the server last sent something."""
    running: int = 0
    """Number of requests running there."""
    failures: int = 0
    """Failures since the server last answered."""

    async def __call__(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends a request and returns the answer's JSON; None if the answer is not JSON.

        Args:
            body: JSON to POST; None: GET.

        Raises:
            Away: the server does not answer, or answers 429 or 5xx.
            UserError: the server answers another 4xx.
        """
        method, content = ("GET", None) if body is None else ("POST", body)
        try:
            answer = await self.client.request(method, self.url + path, json=content, timeout=self.timeout_s)
        except httpx.TransportError as error:
            raise self._away(error) from None
        await self._check(path, answer)
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """POSTs a request and yields the JSON of the server-sent events that answer it. Raises as `__call__` does."""
        try:
            async with self.client.stream("POST", self.url + path, json=body) as answer:
                await self._check(path, answer)
                lines = answer.aiter_lines()
                while (line := await self._progressing(anext(lines, None))) is not None:
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield json.loads(line.removeprefix("data: "))
        except httpx.TransportError as error:
            raise self._away(error) from None

    async def _progressing(self, waiting: Awaitable[str | None]) -> str | None:
        """Waits as long as the server makes progress, with this request or another one."""
        task, since = asyncio.ensure_future(waiting), time.monotonic()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=max(since + self.timeout_s - time.monotonic(), 0.01))
                # progress of other requests counts, because this one may wait behind them
                if not task.done() and time.monotonic() - max(since, self.progress) >= self.timeout_s:
                    raise Away(f"{self.url} made no progress for {self.timeout_s:.0f} s (rollout.engine.timeout_s)")
                since = max(since, self.progress)
            self.progress = time.monotonic()
            return await task
        finally:
            task.cancel()

    def _away(self, error: httpx.TransportError) -> Away:
        return Away(f"{self.url} does not answer: {type(error).__name__} {error}")

    async def _check(self, path: str, answer: httpx.Response) -> None:
        if answer.status_code < 400:
            return
        text = (await answer.aread()).decode(errors="replace")
        if answer.status_code >= 500 or answer.status_code == 429:
            raise Away(f"{self.url}{path} answered {answer.status_code}: {text[:200]}")
        raise UserError(f"{self.url}{path} answered {answer.status_code}: {text[:300]}")


class Servers:
    """Servers with the same model, over which requests are distributed."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        """Takes base URLs, and the seconds without progress after which a server counts as unavailable; sends
        nothing."""
        # `one` bounds the number of requests
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE * len(urls))
        timeout = httpx.Timeout(timeout_s, read=None)  # `Ask.events` watches the progress
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits)
        self.all = [Ask(self._client, url.rstrip("/"), timeout_s) for url in urls]
        self._room = asyncio.Condition()

    @asynccontextmanager
    async def one(self, preferred: Callable[[], Ask | None] = lambda: None) -> AsyncIterator[Ask]:
        """Waits for a server with room: the one with the fewest requests, or the one that `preferred` returns then, if
        it is as healthy."""
        async with self._room:
            await self._room.wait_for(lambda: any(server.running < AT_ONCE for server in self.all))
            # servers that failed come last until they answer again
            server = min(self.all, key=lambda server: (server.failures, server.running))
            chosen = preferred()
            if chosen is not None and chosen.failures <= server.failures and chosen.running < AT_ONCE:
                server = chosen
            server.running += 1
        try:
            yield server
        finally:
            async with self._room:
                server.running -= 1
                self._room.notify_all()

    async def any(self, ask: Callable[[Ask], Awaitable[T]]) -> T:
        """Asks one of the servers, and others if it is away; returns the answer. Raises EngineLost after `TRIES`
        attempts."""

        async def attempt() -> T:
            async with self.one() as server:
                try:
                    answer = await ask(server)
                except Away:
                    server.failures += 1
                    raise
                server.failures = 0
                return answer

        return await patiently(attempt)

    def each(self, ask: Callable[[Ask], Awaitable[T]]) -> dict[str, T]:
        """Asks every server; returns the answers by URL. Raises EngineLost."""

        async def all_answers() -> list[T]:
            return await event_loop.gather([patiently(partial(ask, server)) for server in self.all])

        return {server.url: answer for server, answer in zip(self.all, event_loop.run(all_answers()), strict=True)}

    def close(self) -> None:
        """Closes the connections; the servers keep running."""
        event_loop.run(self._client.aclose())


async def patiently(attempt: Callable[[], Awaitable[T]]) -> T:
    """Retries while a server is away. Raises EngineLost after `TRIES` attempts."""
    try:
        async for retry in AsyncRetrying(
            retry=retry_if_exception_type(Away),
            stop=stop_after_attempt(TRIES),
            wait=wait_random_exponential(multiplier=0.2, max=10),
        ):
            with retry:
                return await attempt()
    except RetryError as error:
        raise EngineLost(str(error.last_attempt.exception())) from None
    raise AssertionError("unreachable")
