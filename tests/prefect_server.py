"""One Prefect server for all tests of a session, shared by the workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 120.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is inside, for this folder."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def shared_server(folder: Path) -> Iterator[str]:
    """The API's URL; the first to come starts the server, the last to leave ends it."""
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "server.json"
    with locked(folder):
        server = json.loads(state.read_text()) if state.exists() else _start(folder)
        state.write_text(json.dumps(server | {"users": server["users"] + 1}))
    try:
        yield server["url"]
    finally:
        with locked(folder):
            server = json.loads(state.read_text())
            if server["users"] > 1:
                state.write_text(json.dumps(server | {"users": server["users"] - 1}))
            else:
                state.unlink()
                os.killpg(server["pid"], 9)


def _start(folder: Path) -> dict[str, object]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
    }
    environment.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}/api"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return {"url": url, "pid": process.pid, "users": 0}
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise RuntimeError(f"the Prefect server did not start: {(folder / 'server.log').read_text()[-2000:]}")
