"""A gate before a server that streams its answers: a test decides how far they come, at any pace of the machine."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

EVENT = b"data: {"
EVENT_STARTS = re.compile(b"(?=data: {)")
PARTIAL = re.compile(b"(d|da|dat|data|data:|data: )$")
"""A possible first half of an event's start, whose other half has not arrived yet."""


class Gate:
    """Passes everything to and from a server on loopback, but only as many of its streamed events as `let`."""

    def __init__(self, upstream: str) -> None:
        self.passed = 0
        """Number of events that have passed."""
        self.connections = 0
        """Number of connections of clients; a dead client's would still take events."""
        self.url = ""
        self._port, self._allowed = urlsplit(upstream).port, 0
        self._more, self._closed = asyncio.Event(), asyncio.Event()
        self._listening = threading.Event()

    def let(self, events: int) -> None:
        """Lets so many events pass in addition to those that already have."""
        self._loop.call_soon_threadsafe(self._let, events)

    def _let(self, events: int) -> None:
        self._allowed = self.passed + events
        self._more.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with await asyncio.start_server(self._connection, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._listening.set()
            await self._closed.wait()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        pumps = {
            asyncio.create_task(self._pump(reader, to_server, gated=False)),
            asyncio.create_task(self._pump(from_server, writer, gated=True)),
        }
        try:  # whoever hangs up first: the server stops generating for a client that has died
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            to_server.close()
            writer.close()
            self.connections -= 1

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gated: bool) -> None:
        rest = b""
        while data := await reader.read(1 << 16):
            *whole, rest = EVENT_STARTS.split(rest + data) if gated else (data, b"")
            for part in whole:
                await self._pass(part, writer)
            if not PARTIAL.search(rest):
                await self._pass(rest, writer)
                rest = b""
        await self._pass(rest, writer)

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if data.startswith(EVENT):
            while self.passed >= self._allowed:
                self._more.clear()
                await self._more.wait()
            self.passed += 1
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0)  # the other connections' turn


@contextmanager
def gate(upstream: str) -> Iterator[Gate]:
    """Yields a gate before the server at a URL, which first lets no event pass."""
    gate = Gate(upstream)
    thread = threading.Thread(target=lambda: asyncio.run(gate._serve()), daemon=True)
    thread.start()
    gate._listening.wait()
    try:
        yield gate
    finally:
        gate._loop.call_soon_threadsafe(gate._closed.set)
        thread.join()
