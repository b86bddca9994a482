"""Requests to a server over HTTP, answered at once or by a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass
from typing import Any

import httpx

from ratchet.rlhf.errors import UserError


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
