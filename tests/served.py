"""Servers of models that tests start; each takes gigabytes."""

from __future__ import annotations

import atexit
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from ratchet.rlhf import child_processes

_running: list[subprocess.Popen[bytes]] = []


def served(command: Sequence[str | Path], port: int, log: Path, environment: Mapping[str, str]) -> str:
    """Starts a server on loopback; returns its URL as soon as it answers.

    It ends with `end_servers` or with this process; it is in a session of its own, so that all its processes end.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | environment,
        )
    _running.append(process)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 900
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return url
        time.sleep(0.5)


@atexit.register
def end_servers() -> None:
    while _running:
        child_processes.end(_running.pop())
