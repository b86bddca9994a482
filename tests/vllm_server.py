"""A real `vllm serve` on loopback."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.ports import free_port
from tests.served import served


def serving(folder: Path, options: Mapping[str, object] | None = None, **environment: str) -> str:
    """Starts a server of a model; returns its URL, see `served`. `options` of its command line override those of a
    run; True is a flag."""
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
    arguments = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    log = folder.parent / f"serve-{port}.log"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={folder}",
        "--enforce-eager",
        "--no-enable-chunked-prefill",  # see VLLMRollout
        *arguments,
    ]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **environment}
    return served(command, port, log, environment)
