"""A real SGLang server on loopback, on the CPU, from an environment of its own (`make sglang`)."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx

from tests.ports import free_port

PROJECT = Path(__file__).parent.parent
PYTHON = PROJECT / "build/sglang/bin/python"
STAND_INS = Path(__file__).parent / "sglang_stand_ins"
"""Modules that SGLang imports and that do not exist without a GPU."""
NEEDS = "it asks an SGLang server: `make test-sglang`"
_running: list[subprocess.Popen[bytes]] = []


def installed() -> bool:
    """Whether tests use SGLang: `make test-sglang` says so."""
    return bool(os.environ.get("RATCHET_SGLANG"))


def serving(folder: Path, *, seeded: bool = True) -> str:
    """The URL of a server of a model, which ends with `end_servers` or with this process; started in a session of its
    own, so that all its processes end. Unless it is `seeded`, it ignores the seeds of requests."""
    port = free_port()
    options: dict[str, object] = {
        "host": "127.0.0.1",
        "port": port,
        "device": "cpu",
        "dtype": "float32",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "context-length": 258,  # of which it leaves two free
        "mem-fraction-static": 0.1,
        "max-total-tokens": 16384,
        "max-running-requests": 64,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    log = folder.parent / f"serve-{port}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                PYTHON,
                "-W",
                "ignore",
                STAND_INS / "serve.py",
                f"--model-path={folder}",
                *(["--enable-deterministic-inference"] if seeded else []),
                "--cuda-graph-backend-decode=disabled",
                "--cuda-graph-backend-prefill=disabled",
                "--disable-overlap-schedule",
                "--skip-server-warmup",
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ
            | {
                "PYTHONPATH": str(STAND_INS),
                "SGLANG_USE_CPU_ENGINE": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than the tests
                "HF_HUB_OFFLINE": "1",
            },
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
            pass
        time.sleep(0.5)


@atexit.register
def end_servers() -> None:
    """End all servers; each takes gigabytes."""
    while _running:
        process = _running.pop()
        with suppress(ProcessLookupError):  # the others of its session may run though it has died
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
