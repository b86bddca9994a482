"""Stands in for vLLM in a process that finds this folder on `PYTHONPATH`: only its start, and a worker process that
holds memory and ends slowly."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

WORKER = """
import mmap, sys, time
memory = mmap.mmap(-1, 2**29)
for page in range(0, len(memory), mmap.PAGESIZE):
    memory[page] = 1
print("ready", flush=True)
time.sleep(3600)
"""
"""Freeing half a gigabyte takes longer than the end of the process that started it."""


class LLMEngine:
    def has_unfinished_requests(self) -> bool:
        return False


class LLM:
    llm_engine = LLMEngine()

    def __init__(self, **options: Any) -> None:
        worker = subprocess.Popen([sys.executable, "-c", WORKER, "VLLM::Worker"], stdout=subprocess.PIPE)
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"

    def generate(self, *arguments: Any, **named: Any) -> None: ...

    def collective_rpc(self, *arguments: Any, **named: Any) -> None: ...

    def reset_prefix_cache(self) -> bool:
        return True


class SamplingParams:
    def __init__(self, **options: Any) -> None: ...


class TokensPrompt(SamplingParams): ...
