"""The server of `ratchet ui`: the page, and JSON about the runs of one store, which it only reads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cached_property, lru_cache

import psutil
import uvicorn
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from flows.ui import browsing
from flows.ui.documents import Decode, Filter, Metrics, RunView, Trajectory, decoder, run_view, scales_of, trajectory
from flows.ui.page import STATIC, live_page, live_policy
from infra.execution.claims import run_url
from infra.listing import RunSummary, is_driven, runs_of
from infra.runs import Run, open_run, run_names
from infra.store.log import Corrupt, slot_key
from infra.store.records import sha256_of
from rlhf.errors import RatchetError, UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANYWHERE = ("0.0.0.0", "::")
NO_STORE = {"Cache-Control": "no-store"}
SUMMARIES = TypeAdapter(list[RunSummary])


class Opened:
    """A run that the page shows. It stays open, so that a look at it reads only what was committed since the last."""

    def __init__(self, url: str) -> None:
        """Open the run.

        Args:
            url: its folder.

        Raises:
            UserError: there is no run.
            Corrupt: the log is damaged.
        """
        self.run: Run = open_run(url)
        self.lock = threading.Lock()
        """Held while the run is read: the state changes when the log is read on."""
        self._metrics: list[Metrics] = []
        self._damages: dict[str, None] = {}
        self._read = 0
        """Number of closed iterations whose metrics were read."""

    def look(self) -> str:
        """Read the log on to its end.

        Returns:
            A version of what the page shows of the run: the same, as long as that is the same.

        Raises:
            UserError: the run is gone, or another one is in its place.
            Corrupt: the log is damaged.
        """
        objects, before = self.run.store.objects, self.run.state
        last = objects.get_if_there(slot_key(before.slot))
        if last is None or sha256_of(last) != before.sha256:
            raise UserError(f"{self.run.store.url} was deleted or replaced: reload the page")
        return f"{self.run.store.log.read().sha256}-{is_driven(objects)}"

    def _damaged(self, damage: Corrupt) -> None:
        self._damages[str(damage)] = None

    def view(self, name: str) -> RunView:
        """Describe the run.

        Args:
            name: what the page calls it.

        Returns:
            The description.
        """
        closed = self.run.state.iteration
        self._metrics += self.run.metric_rows(closed - self._read, self._damaged)
        self._read = closed
        return run_view(self.run, name, self._metrics, self._damages)

    def trajectory(self, iteration: int, trajectory_id: str) -> Trajectory:
        """Describe a trajectory.

        Args:
            iteration: its iteration.
            trajectory_id: its id.

        Returns:
            The description.

        Raises:
            UserError: the run has no such trajectory, or it cannot be read.
        """
        frame, damages = browsing.full_rows(self.run, iteration, trajectory_id)
        rows = frame.to_dict("records")
        if not rows:
            missing = f"iteration {iteration} of {self.run.store.url} has no trajectory {trajectory_id}"
            raise UserError("; ".join([missing, *damages]))
        return trajectory(rows[0], self._decode, self._scales(iteration, self.run.state.sha256))

    @cached_property
    def _decode(self) -> Decode | None:
        return decoder(self.run.config)

    @lru_cache(maxsize=64)  # noqa: B019  (runs stay open as long as the server)
    def _scales(self, iteration: int, version: str) -> dict[str, tuple[float, float]]:
        """The scales of an iteration, which may change while it is open."""
        frame, _ = browsing.full_rows(self.run, iteration)
        return scales_of(frame)


class Pages:
    """The endpoints: what the page asks about the runs of a store."""

    def __init__(self, store_url: str) -> None:
        """Serve a store.

        Args:
            store_url: the folder of runs.
        """
        self.store_url = store_url
        self._opened: dict[str, Opened] = {}
        self._lock = threading.Lock()
        self._html, self._policy = live_page(), live_policy()

    def page(self, request: Request) -> Response:
        """The page itself."""
        return HTMLResponse(self._html, headers={"Content-Security-Policy": self._policy})

    def runs(self, request: Request) -> Response:
        """The runs of the store."""
        summaries = runs_of(self.store_url)
        with self._lock:  # a run that was deleted is opened again if it comes back
            names = {summary.name for summary in summaries}
            self._opened = {name: opened for name, opened in self._opened.items() if name in names}
        return Response(SUMMARIES.dump_json(summaries), media_type="application/json", headers=NO_STORE)

    def run(self, request: Request) -> Response:
        """One run. The answer is empty (304) if the browser has the newest version."""
        name = request.query_params.get("run", "")
        opened = self._open(name)
        with opened.lock:
            tag = f'"{self._look(name, opened)}"'
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers={"ETag": tag})
            return _document(opened.view(name), {"ETag": tag, "Cache-Control": "no-cache"})

    def trajectories(self, request: Request) -> Response:
        """Trajectories of a run that match a filter."""
        values = dict(request.query_params)
        opened = self._open(values.pop("run", ""))
        try:
            wanted = Filter.model_validate({name: value for name, value in values.items() if value})
        except ValidationError as error:
            [first, *_] = error.errors()
            raise UserError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        with opened.lock:
            return _document(browsing.matching(opened.run, wanted))

    def trajectory(self, request: Request) -> Response:
        """One trajectory of a run."""
        opened = self._open(request.query_params.get("run", ""))
        iteration = request.query_params.get("iteration", "")
        if not iteration.isdecimal():
            raise UserError(f"iteration: {iteration!r} is no number")
        with opened.lock:
            return _document(opened.trajectory(int(iteration), request.query_params.get("id", "")))

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


def app(store_url: str, host: str = "127.0.0.1") -> Starlette:
    """The web application.

    Args:
        store_url: the folder of runs.
        host: the address that it will listen on.

    Returns:
        The application.
    """
    pages = Pages(store_url)
    return Starlette(
        routes=[
            Route("/", pages.page),
            Route("/api/runs", pages.runs),
            Route("/api/run", pages.run),
            Route("/api/trajectories", pages.trajectories),
            Route("/api/trajectory", pages.trajectory),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=_names_of(host), www_redirect=False),
            Middleware(BaseHTTPMiddleware, dispatch=_guard),
        ],
        exception_handlers={RatchetError: _refused},
    )


def serve(store_url: str, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        store_url: the folder of runs.
        host: the address to listen on.
        port: the port; 0: any free one.
        ready: called with the page's URL once it can be opened.

    Raises:
        UserError: the address cannot be used.
    """
    from tasks import pipeline  # noqa: F401  (imports torch, which the first visitor would have to wait for)

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
    """The names in Host headers that are answered; a page of another name may have been rebound to this address."""
    names = [*LOOPBACK, "[::1]", host]
    if host in ANYWHERE:
        names += [socket.gethostname(), socket.getfqdn()]
        names += [address.address for all_of_one in psutil.net_if_addrs().values() for address in all_of_one]
    return list(dict.fromkeys(names))


async def _guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse other sites' requests for data, and keep the browser from guessing types or telling where it was."""
    foreign = request.headers.get("sec-fetch-site") not in (None, "same-origin", "none")
    if foreign and request.url.path.startswith("/api/"):
        return JSONResponse({"error": "only the page itself may ask for this"}, status_code=403)
    response = await call_next(request)
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    return response


def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=400 if isinstance(error, UserError) else 502)


def _document(document: BaseModel, headers: dict[str, str] | None = None) -> Response:
    return Response(document.model_dump_json(), media_type="application/json", headers=headers or NO_STORE)
