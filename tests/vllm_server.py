"""A real `vllm serve` on loopback."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.ports import free_port

_running: list[subprocess.Popen[bytes]] = []


def serving(folder: Path, options: Mapping[str, object] | None = None, **environment: str) -> str:
    """The URL of a server of a model, which ends with `end_servers` or with this process; started in a session of its
    own, so that all its processes end. `options` are of its command line, over those that a run asks for."""
    port = free_port()
    options = {
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 256,
        "gpu-memory-utilization": 0.1,
        **(options or {}),
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    log = folder.parent / f"serve-{port}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vllm.entrypoints.openai.api_server",
                f"--model={folder}",
                "--enforce-eager",
                "--no-enable-chunked-prefill",  # see VLLMRollout
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **environment},
        )
    _running.append(process)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 900
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return url
        except httpx.TransportError:
            time.sleep(0.5)


@atexit.register
def end_servers() -> None:
    """End all servers; each takes gigabytes."""
    while _running:
        process = _running.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
