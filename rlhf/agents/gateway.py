"""Serves the endpoint to programs, in the dialects of OpenAI and Anthropic. A call's key identifies its trajectory."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ratchet.rlhf.agents.conversations import CannotRender
from ratchet.rlhf.agents.dialects import (
    DIALECTS,
    MESSAGES,
    MODEL,
    Dialect,
    Exchange,
    Unsupported,
    check_model,
    openai_error,
)
from ratchet.rlhf.agents.sessions import Asked, PolicyReply, Refused
from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    from ratchet.rlhf.agents.sessions import Policy

LARGEST_BODY = 64 * 2**20
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
                Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
                *(
                    Route(f"/v1/{dialect.path}", partial(self._answer, dialect=dialect), methods=["POST"])
                    for dialect in DIALECTS
                ),
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
            raise Refused(
                "there is no key: send Authorization: Bearer KEY, or x-api-key: KEY", status=401, code="invalid_api_key"
            )
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
        check_model(request.path_params["model"])
        return JSONResponse(model)

    async def _answer(self, request: Request, dialect: Dialect) -> Response:
        caller = self._caller(request)
        body = await _body(request)
        try:
            exchange = dialect.parse(body, caller.policy.sampling, caller.policy.tokenizer)
        except Unsupported as refused:
            raise _left_out(refused, caller) from None
        if exchange.streams:
            return await _Sender(caller, exchange).response()
        return JSONResponse(exchange.body(await _answers(request, caller, exchange.asked)))

    async def _count(self, request: Request) -> Response:
        caller = self._caller(request)
        body = await _body(request)
        try:
            conversation = MESSAGES.counted(body, caller.policy.sampling)
        except Unsupported as refused:
            raise _left_out(refused, caller) from None
        try:
            # in a thread: the engine does not wait for a long conversation
            ids = await asyncio.to_thread(conversation.ids, caller.policy.tokenizer)
        except CannotRender as error:
            raise Refused(str(error), param="messages") from None
        return JSONResponse({"input_tokens": len(ids)})


async def _body(request: Request) -> bytes:
    """Reads the body of a call."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST_BODY:
                raise Refused(f"the body has more than {LARGEST_BODY:,} bytes", status=413, code="request_too_large")
    except ClientDisconnect:
        raise Refused("the client is gone") from None
    return bytes(body)


def _left_out(refused: Unsupported, caller: Caller) -> Refused:
    """Returns the error for a call that does not fit the run; the trajectory is not trained on."""
    return caller.refuse(str(refused), code=refused.code, param=refused.param or "")


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


class _Sender:
    """Sends answers as server-sent events."""

    def __init__(self, caller: Caller, exchange: Exchange) -> None:
        """Starts to answer a call."""
        self._caller, self._stream = caller, exchange.stream()
        self._news: asyncio.Queue[tuple[int, str | asyncio.Task[PolicyReply]]] = asyncio.Queue()
        self._tasks = [self._begin(caller, choice, asked) for choice, asked in enumerate(exchange.asked)]

    def _begin(self, caller: Caller, choice: int, asked: Asked) -> asyncio.Task[PolicyReply]:
        task = caller.start(asked, lambda text: self._news.put_nowait((choice, text)))
        task.add_done_callback(lambda done: self._news.put_nowait((choice, done)))
        return task

    async def response(self) -> Response:
        """Waits for the first event, which may be a refusal, and sends the rest as they arrive."""
        events = self._events()
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
            try:
                async for event in events:
                    yield event
            except Exception as error:  # the status is sent already, so the error is an event
                reason = _reason(error, self._caller)
                assert isinstance(reason, Refused)
                for event in self._stream.error(reason):
                    yield event
        finally:
            self._forget()

    async def _events(self) -> AsyncIterator[str]:
        left = len(self._tasks)
        while left:
            choice, news = await self._news.get()
            if isinstance(news, str):
                events = self._stream.text(choice, news)
            else:
                if news.cancelled():
                    raise Refused("the trajectory has ended", status=403, code="trajectory_ended")
                left -= 1
                events = self._stream.answer(choice, news.result())
            for event in events:
                yield event
        for event in self._stream.end([task.result() for task in self._tasks]):
            yield event


def _dialect_of(request: Request) -> Dialect | None:
    """Returns the dialect of a call by its path."""
    path = request.url.path
    return next((dialect for dialect in DIALECTS if f"{path}/".startswith(f"/v1/{dialect.path}/")), None)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    dialect = _dialect_of(request)
    body = openai_error(error) if dialect is None else dialect.error(error)
    return JSONResponse(body, status_code=error.status)


async def _not_found(request: Request, _: Exception) -> Response:
    served = ", ".join(f"POST /v1/{path}" for path in (*(one.path for one in DIALECTS), "messages/count_tokens"))
    refused = Refused(
        f"{request.method} {request.url.path[:100]} is not served: there are {served} and GET /v1/models",
        status=404,
        code="not_found",
    )
    return await _refusal(request, refused)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
