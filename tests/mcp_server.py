"""An MCP server with three tools: `python -m tests.mcp_server [PORT]`, on stdio without a port."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("tests", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


@server.tool(annotations=ToolAnnotations(idempotent_hint=False))
def order(item: str, context: Context) -> str:
    """Order an item."""
    return f"{item} as {dict(context.request_context.meta or {})['ratchet/idempotency-key']}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
