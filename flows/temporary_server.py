"""Starts the temporary Prefect server of a command, and ends servers whose driver was killed.

A killed process leaves its temporary server behind. So a driver marks the environment that its server inherits, and
the next command ends the servers whose driver no longer runs.
"""

import atexit
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from ratchet.infra.store.clock import born, is_same

MARK = "RATCHET_TEMPORARY_SERVER_OF"


class TemporaryServer:
    """A server that starts while this process imports packages and checks its inputs.

    Prefect would start the same one with its first client, but then everything would wait for it, and this process
    would have to import the server, too.
    """

    def __init__(self) -> None:
        """Starts the server. Must precede the import of Prefect, which reads the address from the environment."""
        end_orphans()
        mark()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
        command += ["--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--log-level", "error"]
        as_prefect_does = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        environment = {**os.environ, **as_prefect_does}
        if home := environment.get("PREFECT_HOME"):  # which Prefect forgets here: it warns if ~/.prefect is missing
            environment.setdefault("PREFECT_MEMO_STORE_PATH", str(Path(home) / "memo_store.toml"))
        self._process = subprocess.Popen(command, env=environment)
        atexit.register(self._stop)  # runs after Prefect has sent its last events, because it is registered earlier
        self._health = f"{address}/api/health"
        os.environ["PREFECT_API_URL"] = f"{address}/api"
        os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "false")  # nobody looks at it while it runs

    @property
    def is_ready(self) -> bool:
        """True if the server answers, or has ended."""
        if self._process.poll() is not None:
            return True
        try:
            with urllib.request.urlopen(self._health, timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait(self) -> None:
        """Waits until it is ready. After a time limit the run starts without it."""
        deadline = time.monotonic() + float(os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"])
        while not self.is_ready and time.monotonic() < deadline:
            time.sleep(0.1)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def is_used() -> bool:
    """True if this process or a parent has started a temporary server, which shows no pages."""
    return MARK in os.environ


def mark() -> None:
    """Marks the environment of this process, which its temporary server inherits."""
    process = psutil.Process()
    os.environ[MARK] = f"{process.pid}@{born(process)}"


def end_orphans() -> None:
    """Ends the temporary servers whose driver no longer runs."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            owner = environment.get(MARK)
            if owner is not None and environment.get("PREFECT__SERVER_EPHEMERAL") and not _is_alive(owner):
                process.terminate()
        except psutil.Error:
            continue  # a process of another user, or one that has just ended


def _is_alive(owner: str) -> bool:
    pid, _, born_at = owner.partition("@")
    try:
        return is_same(psutil.Process(int(pid)), float(born_at))
    except psutil.NoSuchProcess:
        return False
