"""A real Chromium for tests, driven by Playwright. `make browser` installs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from ratchet.flows.ui.server import LIMITS, app
from ratchet.infra.runs.statements import SQLLimits
from tests import extras
from tests.ports import free_port

TIMEOUT_MS = 300_000
"""A busy machine is slow; no test asserts times."""
REFUSED = "status of 400"
"""Chromium's report of a request that the server refused, such as a mistake in a filter."""
FLAGS = (
    "--no-sandbox",  # Chromium does not start for root otherwise; the pages are our own
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts Chromium, for tests that need `chromium`.

    While it runs, this thread is in an event loop of Playwright's: flows run before it starts, or in other processes.
    """
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=extras.chromium(), args=FLAGS)


@contextmanager
def opened(
    browser: Browser, *, width: int = 1280, height: int = 900, scheme: str = "light", refused: str = REFUSED
) -> Iterator[Page]:
    """Opens a page, and asserts on leaving that it had no trouble: errors, or requests to other places than its own.

    Answers with the status `refused` are no trouble: the page shows why.
    """
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.set_default_timeout(TIMEOUT_MS)
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "console",
        lambda message: trouble.append(message.text) if _is_trouble(message.text, message.type, refused) else None,
    )
    page.on("request", lambda request: trouble.append(request.url) if _is_foreign(page.url, request.url) else None)
    try:
        yield page
        assert page.evaluate("typeof hacked") == "undefined"
        assert not trouble, trouble
    finally:
        page.close()


@contextmanager
def served(store: str, limits: SQLLimits = LIMITS) -> Iterator[str]:
    """Serves the page over a store, with limits of a request; yields its URL."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app(store, limits=limits), port=port, log_level="warning"))
    started = threading.Event()
    serve_until_stopped = server.startup

    async def startup(sockets: object = None) -> None:
        await serve_until_stopped()
        started.set()

    server.startup = startup
    thread = threading.Thread(target=server.run)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def live(page: Page, store: str) -> Iterator[str]:
    """Serves the page over a store for one page, which polls and leaves before the server does; yields its URL."""
    with served(store) as url:
        yield url
        page.goto("about:blank")


def visit(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("body[data-ready]")


def wait_until(page: Page, condition: str, argument: object = None) -> None:
    """Waits until a condition in JavaScript holds.

    `Page.wait_for_function` needs `eval` in the page, which its Content-Security-Policy forbids.
    """
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not page.evaluate(condition, argument):
        assert time.monotonic() < deadline, f"this did not come about: {condition}, {argument}"
        page.wait_for_timeout(50)


def _is_trouble(text: str, kind: str, refused: str) -> bool:
    return kind in ("error", "assert") and refused not in text


def _is_foreign(page: str, request: str) -> bool:
    return not request.startswith(("data:", "file:", "http://127.0.0.1:")) or (
        page.startswith("file:") and not request.startswith(("data:", page.partition("#")[0]))
    )
