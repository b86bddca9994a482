"""Serves an OpenAI-compatible endpoint to programs. The key of a call identifies its trajectory."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ratchet.rlhf.agents import protocol
from ratchet.rlhf.agents.protocol import MODEL, ChatParameters, CompletionParameters, error_body, event
from ratchet.rlhf.agents.sessions import Asked, PolicyReply, Refused
from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    from ratchet.rlhf.agents.sessions import Policy

LARGEST_BODY = 8 * 2**20
"""Maximum size of a call in bytes; a body is read only if its key is valid."""
ENDED = 10_000
"""Number of ended trajectories whose keys are remembered, to explain why a call is too late."""
ANYWHERE = ("0.0.0.0", "::")


class Caller(Protocol):
    """The holder of a key: the program of a trajectory, or the clients of a served policy."""

    @property
    def policy(self) -> Policy:
        """The policy that answers."""

    @property
    def is_over(self) -> bool:
        """True if further calls are refused."""

    def refuse(self, message: str, *, code: str, param: str) -> Refused:
        """Returns the error for an unsupported call."""

    def start(self, asked: Asked, on_text: Callable[[str], None] | None = None) -> asyncio.Task[PolicyReply]:
        """Starts to answer a call; see `Session.start`."""


class Gateway:
    """The endpoint of one process. The first caller starts it, on the generation's event loop."""

    def __init__(self, host: str, port: int = 0) -> None:
        """Starts nothing; port 0 chooses a free one."""
        self._host, self._port = host, port
        self._callers: dict[str, Caller] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._base_url = ""
        self._starting = asyncio.Lock()

    async def open(self, caller: Caller, key: str | None = None) -> tuple[str, str]:
        """Answers calls with a key, or a new one; returns the base URL of the endpoint, and the key."""
        async with self._starting:
            if self._server is None:
                await self._start()
        key = key or f"sk-{secrets.token_urlsafe(24)}"
        self._callers[key] = caller
        return self._base_url, key

    def close(self, key: str) -> None:
        """Refuses further calls with a key."""
        if self._callers.pop(key, None) is not None:
            self._ended[key] = None
            while len(self._ended) > ENDED:
                self._ended.popitem(last=False)

    async def stop(self) -> None:
        """Stops the endpoint; the next trajectory restarts it."""
        async with self._starting:
            if self._server is not None and self._serving is not None:
                self._server.should_exit = self._server.force_exit = True
                await self._serving
                self._server = self._serving = None

    async def _start(self) -> None:
        app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{model}", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
            ],
            exception_handlers={Refused: _refusal, 404: _not_found, 405: _not_found},
        )
        try:
            listening = socket.create_server((self._host, self._port), backlog=1024, family=_family(self._host))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise UserError(
                f"the endpoint cannot listen on {self._host}:{self._port}: {reason}: choose another port or address"
            ) from None
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off"))
        self._server, self._serving = server, asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            if self._serving.done():
                self._serving.result()  # raises its error
            await asyncio.sleep(0.001)
        host = socket.gethostbyname(socket.gethostname()) if self._host in ANYWHERE else self._host
        self._base_url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1"

    def _caller(self, request: Request) -> Caller:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (key if scheme.lower() == "bearer" else "")
        if not key:
            raise Refused("there is no key: send Authorization: Bearer KEY", status=401, code="invalid_api_key")
        if key in self._ended:
            raise Refused("the trajectory of this key has ended", status=403, code="trajectory_ended")
        if key not in self._callers:
            raise Refused("the key is not valid, or its trajectory has ended", status=401, code="invalid_api_key")
        return self._callers[key]

    async def _models(self, request: Request) -> Response:
        self._caller(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "ratchet"}
        if "model" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]})
        _check_model(request.path_params["model"])
        return JSONResponse(model)

    async def _chat(self, request: Request) -> Response:
        caller = self._caller(request)
        parameters = await _read(request, ChatParameters, caller)
        wants_log_probs = bool(parameters.logprobs)
        head = protocol.head(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), "chat.completion")

        def whole(answers: Sequence[PolicyReply]) -> dict[str, Any]:
            choices = [
                protocol.chat_choice(index, answer, wants_log_probs, caller.policy.tokenizer)
                for index, answer in enumerate(answers)
            ]
            return {**head, "choices": choices, "usage": protocol.usage(answers)}

        asked = _choices(parameters.asked(head["id"]), parameters.n or 1)
        if not parameters.stream:
            answers = await _answers(request, caller, asked)
            return JSONResponse(whole(answers))
        head = {**head, "object": "chat.completion.chunk"}

        def text(index: int, content: str) -> dict[str, Any]:
            return {**head, "choices": [{"index": index, "delta": {"content": content}, "finish_reason": None}]}

        def last(index: int, answer: PolicyReply, told: bool) -> list[dict[str, Any]]:
            deltas = protocol.chat_deltas(answer, wants_log_probs, caller.policy.tokenizer, told)
            return [{**head, "choices": [{"index": index, **delta}]} for delta in deltas]

        def first(index: int) -> dict[str, Any]:
            delta = {"role": "assistant", "content": ""}
            return {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}

        tells = not asked[0].tools  # calls and content can only be told apart at the end
        stream = _Stream(caller, asked, tells, first, text, last)
        usage = {**head, "choices": []} if parameters.includes_usage else None
        return await stream.response(usage)

    async def _completions(self, request: Request) -> Response:
        caller = self._caller(request)
        parameters = await _read(request, CompletionParameters, caller)
        wants_log_probs = parameters.logprobs is not None
        head = protocol.head(f"cmpl-{secrets.token_hex(12)}", int(time.time()), "text_completion")
        asked = _choices(parameters.asked(head["id"]), parameters.n or 1)

        def choice(index: int, answer: PolicyReply) -> dict[str, Any]:
            return protocol.completion_choice(index, answer, wants_log_probs, caller.policy.tokenizer)

        if not parameters.stream:
            answers = await _answers(request, caller, asked)
            choices = [choice(index, answer) for index, answer in enumerate(answers)]
            return JSONResponse({**head, "choices": choices, "usage": protocol.usage(answers)})

        def text(index: int, content: str) -> dict[str, Any]:
            return {**head, "choices": [{"index": index, "text": content, "finish_reason": None, "logprobs": None}]}

        def last(index: int, answer: PolicyReply, told: bool) -> list[dict[str, Any]]:
            return [{**head, "choices": [{**choice(index, answer), "text": "" if told else answer.text}]}]

        stream = _Stream(caller, asked, True, None, text, last)
        return await stream.response({**head, "choices": []} if parameters.includes_usage else None)


async def _read(request: Request, kind: type[ChatParameters] | type[CompletionParameters], caller: Caller) -> Any:
    """Reads and checks the parameters of a call."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST_BODY:
                raise Refused(f"the body has more than {LARGEST_BODY:,} bytes", status=413, code="request_too_large")
    except ClientDisconnect:
        raise Refused("the client is gone") from None
    try:
        parameters = kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise protocol.explained(error) from None
    _check_model(parameters.model)
    if (name := parameters.check(caller.policy.sampling)) is not None:
        value = (parameters.model_extra or {})[name]
        known = name in (*protocol.SAMPLING, *protocol.NEUTRAL)
        reason = (
            "is not the run's, so the run would learn from tokens that its policy did not draw: leave it out, or set "
            f"rollout.{name}"
            if name in protocol.SAMPLING
            else "would change how tokens are drawn: leave it out"
        )
        raise caller.refuse(
            f"{name} {str(value)[:100]} {reason}" if known else f"unrecognized parameter {name[:100]}: leave it out",
            param=name[:100],
            code="unsupported_value" if known else "unknown_parameter",
        )
    return parameters


def _choices(asked: Asked, count: int) -> list[Asked]:
    """Splits a call with several choices into one per choice."""
    others = (replace(asked, call_id=f"{asked.call_id}-{number}") for number in range(1, count))
    return [asked, *others]


def _check_model(model: str) -> None:
    if model != MODEL:
        raise Refused(
            f"there is no model {model[:100]!r}: use model={MODEL!r}",
            status=404,
            code="model_not_found",
            param="model",
        )


async def _answers(request: Request, caller: Caller, asked: Sequence[Any]) -> list[PolicyReply]:
    """Answers calls; if the client disconnects first, cancels them."""
    tasks = [caller.start(call) for call in asked]
    leaves = asyncio.create_task(_until_gone(request))
    try:
        pending: set[asyncio.Future[Any]] = {*tasks}
        while pending and not leaves.done():
            done, pending = await asyncio.wait({*pending, leaves}, return_when=asyncio.FIRST_COMPLETED)
            pending.discard(leaves)
            # raises the first error immediately
            for task in done - {leaves}:
                task.result()
        if leaves.done():
            raise Refused("the client is gone")
        return [task.result() for task in tasks]
    except BaseException as error:
        raise _reason(error, caller) from None
    finally:
        leaves.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reason(error: BaseException, caller: Caller) -> BaseException:
    """Returns the error that the client receives."""
    if isinstance(error, asyncio.CancelledError) and caller.is_over:
        return Refused("the trajectory has ended", status=403, code="trajectory_ended")
    if isinstance(error, Exception) and not isinstance(error, Refused):
        return Refused("the policy cannot answer now", status=500, code="server_error")
    return error


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream:
    """Answers as server-sent events."""

    def __init__(
        self,
        caller: Caller,
        asked: Sequence[Any],
        tells: bool,
        first: Callable[[int], dict[str, Any]] | None,
        text: Callable[[int, str], dict[str, Any]],
        last: Callable[[int, PolicyReply, bool], list[dict[str, Any]]],
    ) -> None:
        """Starts to answer the calls `asked`, one per choice.

        Args:
            tells: send the text while it grows.
            first: the event that starts a choice, by its index.
            text: the event for a text.
            last: the events that end a choice; the last argument is True if the text was sent.
        """
        self._caller, self._first, self._text, self._last, self._tells = caller, first, text, last, tells
        self._events: asyncio.Queue[tuple[int, str | asyncio.Task[PolicyReply]]] = asyncio.Queue()
        self._tasks = [self._begin(caller, index, call) for index, call in enumerate(asked)]

    def _begin(self, caller: Caller, index: int, asked: Any) -> asyncio.Task[PolicyReply]:
        on_text = (lambda text: self._events.put_nowait((index, text))) if self._tells else None
        task = caller.start(asked, on_text)
        task.add_done_callback(lambda done: self._events.put_nowait((index, done)))
        return task

    async def response(self, usage: dict[str, Any] | None) -> Response:
        """Waits for the first event, which may be a refusal, and sends the rest as they arrive.

        Args:
            usage: the event that reports the numbers of tokens, still without them; None: no such event.
        """
        events = self._sent(usage)
        try:
            first = await anext(events)
        except BaseException as error:
            self._forget()
            raise _reason(error, self._caller) from None
        return StreamingResponse(self._all(first, events), media_type="text/event-stream")

    def _forget(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _all(self, first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            yield first
            with suppress(asyncio.CancelledError, Exception):  # the trajectory has ended, so the stream ends early
                async for sent in events:
                    yield sent
        finally:
            self._forget()

    async def _sent(self, usage: dict[str, Any] | None) -> AsyncIterator[str]:
        begun: set[int] = set()
        told: dict[int, str] = {}
        left = len(self._tasks)
        while left:
            index, news = await self._events.get()
            ended = news.result() if isinstance(news, asyncio.Task) else None
            if index not in begun and self._first is not None:
                yield event(self._first(index))
            begun.add(index)
            if isinstance(news, str):
                told[index] = told.get(index, "") + news
                yield event(self._text(index, news))
            else:
                assert ended is not None
                left -= 1
                # the end of the text was held back, because it might have become a stop text
                if index in told and len(ended.text) > len(told[index]):
                    yield event(self._text(index, ended.text[len(told[index]) :]))
                for last in self._last(index, ended, index in told):
                    yield event(last)
        if usage is not None:
            yield event({**usage, "usage": protocol.usage([task.result() for task in self._tasks])})
        yield event("[DONE]")


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error_body(error), status_code=error.status)


async def _not_found(request: Request, _: Exception) -> Response:
    refused = Refused(
        f"{request.method} {request.url.path[:100]} is not served: there are POST /v1/chat/completions, POST "
        "/v1/completions and GET /v1/models",
        status=404,
        code="not_found",
    )
    return JSONResponse(error_body(refused), status_code=404)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
