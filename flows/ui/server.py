"""Serves `ratchet ui`: the page, and JSON about the runs of one store, which it only reads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cached_property

import psutil
import uvicorn
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.flows.alerts import Metrics
from ratchet.flows.ui import browsing
from ratchet.flows.ui.documents import (
    Decode,
    Filter,
    ImageView,
    RunView,
    TrajectoryDocument,
    decoder,
    image_view,
    run_view,
    scales_of,
    trajectory,
)
from ratchet.flows.ui.page import STATIC, live_page, live_policy
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.listing import RunSummary, is_driven, runs_of
from ratchet.infra.runs.pictures import Picture, described, shown
from ratchet.infra.runs.query import tables_of
from ratchet.infra.runs.run import Run, open_run, run_names
from ratchet.infra.runs.sql import Tables
from ratchet.infra.runs.statements import SQLLimits, SQLProcess, Statements
from ratchet.infra.store.images import Images
from ratchet.infra.store.log import Corrupt, slot_key
from ratchet.infra.store.records import sha256_of
from ratchet.rlhf.errors import RatchetError, UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANYWHERE = ("0.0.0.0", "::")
NO_STORE = {"Cache-Control": "no-store"}
SUMMARIES = TypeAdapter(list[RunSummary])
LIMITS = SQLLimits(seconds=30.0, memory_bytes=2**31, threads=2)
"""Limits of the statements of a request."""
AT_ONCE = 4
"""Number of requests that may run statements at the same time."""
RETRY_S = 1
"""Seconds after which a refused request may be repeated."""
KEPT_SCALES = 64
"""Number of iterations of a run whose scales are kept."""
KEPT_PICTURES = 4096
"""Number of images of a run whose descriptions are kept."""
THUMBNAIL_SIDE = 96
"""Longest side of an image in a list, in pixels."""
IMAGE_HEADERS = {
    "Cache-Control": "private, max-age=31536000, immutable",  # its address is that of its content
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'; sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of an image, which came from a dataset or an environment that is not trusted."""


class Busy(RatchetError):
    """Too many statements are running."""


class Opened:
    """A run that the page shows. It stays open, so that each look reads only new commits."""

    def __init__(self, url: str) -> None:
        """Opens the run at `url`. Raises `UserError` if there is none, `Corrupt` if its log is damaged."""
        self.run: Run = open_run(url)
        self.lock = threading.Lock()
        """Held while the log, indexes and manifests are read, since reading the log changes the state; never while a
        statement runs."""
        self.images = Images(self.run.store.objects)
        self._pictures: dict[str, Picture] = {}
        self._scales: dict[tuple[int, str], dict[str, tuple[float, float]]] = {}
        self._metrics: list[Metrics] = []
        self._damages: dict[str, None] = {}
        self._read = 0
        """Number of closed iterations whose metrics were read."""

    def look(self) -> str:
        """Reads the log on to its end; returns a version of the page, which changes only with the page.

        Raises `UserError` if the run is gone, or another one is in its place; `Corrupt` if the log is damaged.
        """
        objects, before = self.run.store.objects, self.run.state
        last = objects.get_if_there(slot_key(before.slot))
        if last is None or sha256_of(last) != before.sha256:
            raise UserError(f"{self.run.store.url} was deleted or replaced: reload the page")
        return f"{self.run.store.log.read().sha256}-{is_driven(objects)}"

    def _damaged(self, damage: Corrupt) -> None:
        self._damages[str(damage)] = None

    def view(self, name: str) -> RunView:
        closed = self.run.state.iteration
        self._metrics += self.run.metric_rows(closed - self._read, self._damaged)
        self._read = closed
        return run_view(self.run, name, self._metrics, self._damages)

    def tables(self, iteration: int | None) -> tuple[Tables, list[str]]:
        """Returns the tables that statements about an iteration (None: all) can read, and the damages left out."""
        damages: dict[str, None] = {}

        def damaged(damage: Corrupt) -> None:
            damages[str(damage)] = None

        with self.lock:
            last = self.run.state.iteration
            if iteration is not None and not 0 <= iteration <= last:
                raise UserError(f"there is no iteration {iteration}: choose one from 0 to {last}")
            chosen = range(last + 1) if iteration is None else [iteration]
            return tables_of(self.run, chosen, damaged), list(damages)

    def trajectory(self, child: SQLProcess, iteration: int, trajectory_id: str) -> TrajectoryDocument:
        version = self.run.state.sha256  # before the tables: an open iteration may change
        tables, damages = self.tables(iteration)
        frame, unreadable = browsing.full_rows(child, tables, iteration, trajectory_id)
        rows = frame.to_dict("records")
        row = next((row for row in rows if row["trajectory_id"] == trajectory_id), None)
        if row is None:
            missing = f"iteration {iteration} of {self.run.store.url} has no trajectory {trajectory_id}"
            raise UserError("; ".join([missing, *damages, *unreadable]))
        if (iteration, version) not in self._scales:
            sample, _ = browsing.full_rows(child, tables, iteration)
            newest = list(self._scales.items())[1 - KEPT_SCALES :]
            self._scales = dict([*newest, ((iteration, version), scales_of(sample))])
        decode = None if row["response_ids"] is None else self._decode
        return trajectory(row, decode, self._scales[iteration, version], rows, self._look)

    def _look(self, digest: str) -> ImageView:
        """Describes an image, which is read once."""
        seen = self._pictures.get(digest) or described(self.images, digest)
        if isinstance(seen, Picture):
            self._pictures = dict([*list(self._pictures.items())[1 - KEPT_PICTURES :], (digest, seen)])
        return image_view(digest, seen)

    @cached_property
    def _decode(self) -> Decode | None:
        return decoder(self.run)


class Pages:
    """The endpoints of the page's requests about the runs of a store."""

    def __init__(self, store_url: str, limits: SQLLimits) -> None:
        self.store_url = store_url
        self.statements = Statements(limits)
        self._asking = 0
        """Number of requests that run statements. Used on the event loop only."""
        self._opened: dict[str, Opened] = {}
        self._lock = threading.Lock()
        self._html, self._policy = live_page(), live_policy()

    def page(self, request: Request) -> Response:
        return HTMLResponse(self._html, headers={"Content-Security-Policy": self._policy})

    def runs(self, request: Request) -> Response:
        summaries = runs_of(self.store_url)
        with self._lock:  # a run that was deleted is opened again if it comes back
            names = {summary.name for summary in summaries}
            self._opened = {name: opened for name, opened in self._opened.items() if name in names}
        return Response(SUMMARIES.dump_json(summaries), media_type="application/json", headers=NO_STORE)

    def run(self, request: Request) -> Response:
        """Answers with 304 and no content if the browser has the newest version."""
        name = request.query_params.get("run", "")
        opened = self._open(name)
        with opened.lock:
            tag = f'"{self._look(name, opened)}"'
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers={"ETag": tag})
            return _document(opened.view(name), {"ETag": tag, "Cache-Control": "no-cache"})

    async def trajectories(self, request: Request) -> Response:
        values = dict(request.query_params)
        name = values.pop("run", "")
        try:
            wanted = Filter.model_validate({name: value for name, value in values.items() if value})
        except ValidationError as error:
            [first, *_] = error.errors()
            raise UserError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

        def matching(child: SQLProcess) -> Response:
            tables, damages = self._open(name).tables(wanted.iteration)
            listed = browsing.matching(child, tables, wanted)
            return _document(listed.model_copy(update={"damages": [*damages, *listed.damages]}))

        return await self._with_child(request, matching)

    async def trajectory(self, request: Request) -> Response:
        name, iteration = request.query_params.get("run", ""), request.query_params.get("iteration", "")
        if not iteration.isdecimal():
            raise UserError(f"iteration: {iteration!r} is no number")

        def single(child: SQLProcess) -> Response:
            return _document(self._open(name).trajectory(child, int(iteration), request.query_params.get("id", "")))

        return await self._with_child(request, single)

    def image(self, request: Request) -> Response:
        """Answers with the bytes of an image of a run, or of a smaller copy."""
        images = self._open(request.query_params.get("run", "")).images
        side = THUMBNAIL_SIDE if request.query_params.get("size") == "thumbnail" else None
        image = shown(images.get(request.path_params["digest"]), side)
        return Response(image.data, media_type=image.media_type, headers=IMAGE_HEADERS)

    async def _with_child(self, request: Request, answer: Callable[[SQLProcess], Response]) -> Response:
        """Answers with a process that runs statements, which ends if the client leaves. Raises `Busy`."""
        if self._asking == AT_ONCE:
            raise Busy(f"{AT_ONCE} filters are running: try again in a moment")
        self._asking += 1
        try:
            return await _while_there(request, self.statements, answer)
        finally:
            self._asking -= 1

    def _open(self, name: str) -> Opened:
        with self._lock:
            if name not in self._opened:
                if name not in run_names(self.store_url):  # so that nothing outside the store is opened
                    raise UserError(f"there is no run {name!r} in {self.store_url}")
                self._opened[name] = Opened(run_url(self.store_url, name))
            return self._opened[name]

    def _look(self, name: str, opened: Opened) -> str:
        try:
            return opened.look()
        except UserError:
            with self._lock:
                self._opened.pop(name, None)
            raise


def app(store_url: str, host: str = "127.0.0.1", limits: SQLLimits = LIMITS) -> Starlette:
    """Returns the web application, which will listen on `host`."""
    pages = Pages(store_url, limits)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        pages.statements.start()
        yield
        pages.statements.close()

    return Starlette(
        routes=[
            Route("/", pages.page),
            Route("/api/runs", pages.runs),
            Route("/api/run", pages.run),
            Route("/api/trajectories", pages.trajectories),
            Route("/api/trajectory", pages.trajectory),
            Route("/images/{digest}", pages.image),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            Middleware(GZipMiddleware),  # a thousand iterations have a megabyte of metrics
            Middleware(TrustedHostMiddleware, allowed_hosts=_names_of(host), www_redirect=False),
            Middleware(_Guard),
        ],
        exception_handlers={RatchetError: _refused},
        lifespan=lifespan,
    )


def serve(store_url: str, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serves until interrupted. `ready` is called with the page's URL once it can be opened. Port 0 is any free one.

    Raises `UserError` if the address cannot be used.
    """
    from ratchet.tasks import pipeline  # noqa: F401  (imports torch, which the first visitor would have to wait for)

    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}; choose another port with --port, or another "
            "address with --host"
        ) from None
    shown_host = f"[{host}]" if ":" in host else host
    server = uvicorn.Server(uvicorn.Config(app(store_url, host), log_level="warning"))
    ready(f"http://{shown_host}:{listener.getsockname()[1]}/")
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def _names_of(host: str) -> list[str]:
    """Returns the names in Host headers that are answered."""
    # other names are refused: a page of another site may have rebound its name to this address
    names = [*LOOPBACK, "[::1]", host]
    if host in ANYWHERE:
        names += [socket.gethostname(), socket.getfqdn()]
        names += [address.address for all_of_one in psutil.net_if_addrs().values() for address in all_of_one]
    return list(dict.fromkeys(names))


async def _while_there(request: Request, statements: Statements, answer: Callable[[SQLProcess], Response]) -> Response:
    """Answers in another thread. If the client leaves, the process is killed, and the answer ends."""
    at_work: list[SQLProcess] = []
    has_left = False
    changing = threading.Lock()
    """Held while either changes, so that no process is killed that already works for another request."""

    def in_thread() -> Response:
        with statements.child() as child:
            with changing:
                at_work.append(child)
                if has_left:
                    child.kill()
            try:
                return answer(child)
            finally:
                with changing:
                    at_work.clear()

    async def leave() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        with changing:
            has_left = True
            for child in at_work:
                child.kill()

    leaving = asyncio.create_task(leave())
    try:
        return await run_in_threadpool(in_thread)
    finally:
        leaving.cancel()


class _Guard:
    """Refuses requests for data from other sites, and keeps browsers from guessing types or sending referrers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        app = self._app
        if scope["type"] == "http":
            request = Request(scope)
            foreign = request.headers.get("sec-fetch-site") not in (None, "same-origin", "none")
            if foreign and request.url.path.startswith(("/api/", "/images/")):
                app = JSONResponse({"error": "only the page itself may ask for this"}, status_code=403)
        await app(scope, receive, send_safely)


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, Busy):
        return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": str(RETRY_S)})
    return JSONResponse({"error": str(error)}, status_code=400 if isinstance(error, UserError) else 502)


def _document(document: BaseModel, headers: dict[str, str] | None = None) -> Response:
    return Response(document.model_dump_json(), media_type="application/json", headers=headers or NO_STORE)
