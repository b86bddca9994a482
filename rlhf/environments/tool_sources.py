"""Loads tools: Python functions, and tools of MCP servers."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ratchet.rlhf.data.formats import IMAGE_PARTS
from ratchet.rlhf.data.images import is_picture
from ratchet.rlhf.errors import UserError, raised
from ratchet.rlhf.named import load_named, source_of

if TYPE_CHECKING:
    from mcp.types import RequestParamsMeta
    from mcp.types import Tool as ListedTool

T = TypeVar("T")
Answer = str | list[dict[str, Any]]
"""What the policy reads: a text, or OpenAI's content parts."""
FUNCTIONS_KEY, MCP_KEY = "rollout.tools", "rollout.mcp"
KEY_ARGUMENT, MCP_META = "idempotency_key", "ratchet/idempotency-key"
"""Where functions and MCP servers find the key of a call."""
CONNECT_S = 60.0
"""Seconds in which an MCP server must start and list its tools."""


class CallFailed(Exception):
    """A tool refused its arguments, or failed; the policy reads the message."""


class ToolFailed(CallFailed):
    """A tool accepted its arguments, but failed: perhaps not the policy's fault, which still reads the message."""


class ServerLost(Exception):
    """An MCP server no longer answers: not the policy's fault, which does not read the message."""


class Tool(ABC):
    """A tool, as the policy sees it."""

    name: str
    schema: Mapping[str, Any]
    """Its JSON schema, in the layout that chat templates take: {type: function, function: {name, …}}."""
    identity: str
    """Differs between tools that answer differently."""
    is_repeatable: bool = True
    """False if a call whose result a crash has lost must not be made again."""

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], key: str) -> Answer:
        """Calls the tool with JSON values by name; returns its result: texts and images as they are, others as JSON.

        Args:
            key: names the call; one that is made again after a crash has the same key.

        Raises:
            CallFailed: it failed.
            ServerLost: its server is gone.
        """


class FunctionTool(Tool):
    """A Python function, `async` or not, with type hints and a docstring that describes its arguments."""

    def __init__(self, named: str) -> None:
        """Loads the function.

        Raises:
            UserError: there is no such function, or it has no schema.
        """
        from transformers.utils import get_json_schema

        if ":" not in named:
            raise UserError(f"{FUNCTIONS_KEY} {named}: name it as package.module:function or file.py:function")
        self._function: Callable[..., Any] = load_named(named, FUNCTIONS_KEY, "", (), ())
        try:
            self.schema = get_json_schema(self._function)
        except Exception as error:  # transformers has several, and they name the function and the argument
            raise UserError(
                f"{FUNCTIONS_KEY} {named}: {error}; a tool needs type hints, and a docstring with a line for each "
                "argument in a section Args:"
            ) from None
        self.name = self.schema["function"]["name"]
        self.identity = hashlib.sha256(source_of(self._function, FUNCTIONS_KEY, named).encode()).hexdigest()
        self.is_repeatable = getattr(self._function, "repeatable", True)
        self._signature = inspect.signature(self._function)
        self._takes_key = KEY_ARGUMENT in self._signature.parameters
        if self._takes_key:  # which the policy does not see
            parameters = self.schema["function"]["parameters"]
            del parameters["properties"][KEY_ARGUMENT]
            parameters["required"] = [name for name in parameters.get("required", ()) if name != KEY_ARGUMENT]

    async def call(self, arguments: Mapping[str, Any], key: str) -> Answer:
        """Calls it, in a thread if it is not `async`; see `Tool.call`."""
        try:
            if self._takes_key and KEY_ARGUMENT in arguments:
                raise TypeError(f"got an unexpected keyword argument '{KEY_ARGUMENT}'")
            bound = self._signature.bind(**arguments, **({KEY_ARGUMENT: key} if self._takes_key else {}))
        except TypeError as error:
            raise CallFailed(f"{self.name}: {error}") from None
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(*bound.args, **bound.kwargs)
            else:
                result = await asyncio.to_thread(self._function, *bound.args, **bound.kwargs)
        except Exception as error:
            raise ToolFailed(f"{self.name} raised {raised(error)}") from None
        if is_picture(result):
            return [{"type": "image", "image": result}]
        if isinstance(result, list) and any(
            isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in result
        ):
            return result
        try:
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ToolFailed(f"{self.name} returned something that is not JSON: {error}") from None


class MCPServer:
    """A connection to an MCP server, on its own event loop."""

    def __init__(self, where: str) -> None:
        """Connects.

        Args:
            where: the URL of a server (streamable HTTP), or a command that starts one (stdio).

        Raises:
            UserError: it does not start, does not answer, or offers no tools.
        """
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client import Transport
            from mcp.client.stdio import stdio_client
        except ImportError:
            raise UserError(f'{MCP_KEY} needs the package mcp: pip install "ratchet-rlhf[mcp]"') from None

        self.where = where
        server: str | Transport = where
        if not where.startswith(("http://", "https://")):
            try:
                command, *arguments = shlex.split(where)
            except ValueError as error:
                raise UserError(f"{MCP_KEY} {where!r} is neither a URL nor a command: {error}") from None
            server = stdio_client(StdioServerParameters(command=command, args=arguments, env=dict(os.environ)))
        self._client = Client(server)
        self._loop = asyncio.new_event_loop()
        ready: Future[None] = Future()
        threading.Thread(target=self._serve, args=(ready,), name="mcp", daemon=True).start()
        try:
            ready.result(CONNECT_S)
            self.tools = self._run(self._list()).result(CONNECT_S)
        except Exception as error:
            raise UserError(f"{MCP_KEY} {where}: {_reason(error)}: start the server, or correct the address") from None
        if not self.tools:
            raise UserError(f"{MCP_KEY} {where} offers no tools")

    def _serve(self, ready: Future[None]) -> None:
        async def connected() -> None:
            try:
                async with self._client:
                    ready.set_result(None)
                    await asyncio.Event().wait()  # until the process ends
            except Exception as error:
                if not ready.done():
                    ready.set_exception(error)

        self._loop.run_until_complete(connected())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _list(self) -> list[MCPTool]:
        tools: list[MCPTool] = []
        cursor: str | None = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += [MCPTool(self, tool) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def call(self, name: str, arguments: Mapping[str, Any], key: str) -> str:
        """Calls a tool; see `Tool.call`."""
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        try:
            result = await asyncio.wrap_future(
                self._run(self._client.call_tool(name, dict(arguments), meta=_meta(key)))
            )
        except Exception as error:
            # the policy's mistake, not the server's
            if isinstance(error, MCPError) and error.error.code == INVALID_PARAMS:
                raise CallFailed(f"{name}: {_reason(error)}") from None
            raise ServerLost(f"{MCP_KEY} {self.where}: {_reason(error)}: start it again, and resume") from None
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolFailed(f"{name}: {text}")
        return text


class MCPTool(Tool):
    """A tool of an MCP server."""

    def __init__(self, server: MCPServer, tool: ListedTool) -> None:
        self._server, self.name = server, tool.name
        function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
        self.schema = {"type": "function", "function": function}
        self.identity = json.dumps([tool.name, self.schema], sort_keys=True)
        hints = tool.annotations
        self.is_repeatable = hints is None or hints.idempotent_hint is not False or hints.read_only_hint is True

    async def call(self, arguments: Mapping[str, Any], key: str) -> str:
        """See `Tool.call`."""
        return await self._server.call(self.name, arguments, key)


@cache
def tools_of(functions: tuple[str, ...], mcp: tuple[str, ...]) -> tuple[Tool, ...]:
    """Loads `rollout.tools` and `rollout.mcp`; MCP servers start, and live as long as the process.

    Raises:
        UserError: one cannot be loaded, or two have the same name.
    """
    tools: list[Tool] = [FunctionTool(named) for named in functions]
    for where in mcp:
        tools += MCPServer(where).tools
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{FUNCTIONS_KEY} and {MCP_KEY} have several tools named {min(twice)}: rename one")
    return tuple(tools)


def _meta(key: str) -> RequestParamsMeta:
    meta: RequestParamsMeta = {}
    meta[MCP_META] = key  # type: ignore[literal-required]  # of any name, by MCP's specification
    return meta


def _reason(error: BaseException) -> str:
    """Returns the first error of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    return raised(error)
