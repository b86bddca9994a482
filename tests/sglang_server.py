"""A real SGLang server on loopback, on the CPU, from an environment of its own (`make sglang`)."""

from __future__ import annotations

from pathlib import Path

from tests.ports import free_port
from tests.served import served

PROJECT = Path(__file__).parent.parent
PYTHON = PROJECT / "build/sglang/bin/python"
STAND_INS = Path(__file__).parent / "sglang_stand_ins"
"""Modules that SGLang imports and that do not exist without a GPU."""


def serving(folder: Path, *, seeded: bool = True) -> str:
    """Starts a server of a model; returns its URL, see `served`. Unless `seeded`, it ignores the seeds of requests."""
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
    command: list[str | Path] = [
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
    ]
    environment = {
        "PYTHONPATH": str(STAND_INS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than the tests
        "HF_HUB_OFFLINE": "1",
    }
    return served(command, port, log, environment)
