"""A Prefect server for the tests of one process; two processes on one SQLite would make it answer 503, and wait."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from ratchet.tasks.prefect_defaults import TEMPORARY_SERVER
from tests.ports import free_port

START_S = 600.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def used(url: str, folder: Path) -> Iterator[None]:
    """This process and its children use the server at a URL, with a `PREFECT_HOME` in `folder`."""
    # Prefect read the environment when it was imported: only children see what is put there
    with temporary_settings({PREFECT_API_URL: url}), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_URL", url)
        patch.setenv("PREFECT_HOME", str(folder / "clients"))
        yield


@contextmanager
def prefect_api(folder: Path, port: int | None = None, python: str = sys.executable) -> Iterator[str]:
    """Yields the URL of a server's API, on a free port unless one is given; its database is in `folder`.

    `python` is that of the environment with the server.

    It ends with the block, and with Ctrl-C or a time-out of the whole test run, since it is in the same process group.
    """
    port = port or free_port()
    environment = os.environ | {
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
    }
    for name in ("PREFECT_API_URL", *TEMPORARY_SERVER):  # as in a shell that never ran Ratchet
        environment.pop(name, None)
    command = [python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/api"
        _wait_until_it_answers(url, process, folder / "server.log")
        yield url
    finally:
        process.kill()
        process.wait()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the Prefect server did not start: {log.read_text()[-2000:]}")
