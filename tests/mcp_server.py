"""An MCP server with two tools: `python -m tests.mcp_server [PORT]`, on stdio without a port."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
