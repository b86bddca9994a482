"""The program that plays tasks of verifiers with the policy: a chat with tools, in this process.

verifiers imports this module as one of its harnesses, by `__all__`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from contextvars import ContextVar
from functools import cache
from typing import Any

import httpx
from verifiers import v1
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

API_KEY: ContextVar[str] = ContextVar("API_KEY")
"""The key of the trajectory to the policy's endpoint."""
LIMITS = ("context_length_exceeded", "max_calls")
"""Errors of the endpoint after which a conversation is over and is scored as it is."""


class ChatHarnessConfig(v1.HarnessConfig):  # type: ignore[misc]
    """The settings of verifiers' harnesses, and no others."""


class ChatHarness(v1.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """Asks the policy until it calls no tool, and calls the tools that it asks for."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: v1.ModelContext,
        trace: v1.Trace,
        runtime: v1.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: v1.TaskData,
    ) -> v1.ProgramResult:
        """Plays one turn of the user: the policy's answers until one without calls of tools."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        # verifiers' server passes the second header on to the policy's endpoint
        headers = {"Authorization": f"Bearer {secret}", "x-api-key": API_KEY.get()}
        async with AsyncExitStack() as stack:
            tools, names, connected = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, **({"tools": tools} if tools else {})}
            while True:
                answer = await _client(asyncio.get_running_loop()).post(
                    f"{endpoint}/chat/completions", json={**body, "messages": messages}, headers=headers
                )
                if answer.status_code == 400 and any(limit in answer.text for limit in LIMITS):
                    return v1.ProgramResult(exit_code=0, stdout="", stderr="")
                if answer.is_error:
                    return v1.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return v1.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    asked = call["function"]
                    told = await _called(asked["name"], asked["arguments"], names, connected)
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "name": asked["name"], "content": told}
                    )


async def _called(name: str, arguments: str, names: dict[str, tuple[str, str]], servers: dict[str, Any]) -> Any:
    """Calls a tool; returns what it answers, or what is wrong with the call."""
    if name not in names:
        return f"error: there is no tool {name}; there are {', '.join(names)}"
    try:
        values = json.loads(arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(values, dict):
        return "error: the arguments are not a JSON object"
    return await call_mcp(servers, names, name, values)


@cache
def _client(loop: asyncio.AbstractEventLoop) -> httpx.AsyncClient:
    """Returns the client of an event loop: creating one takes longer than a call."""
    return httpx.AsyncClient(timeout=None)
