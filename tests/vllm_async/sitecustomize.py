"""Python runs this in every process that finds its folder on `PYTHONPATH`: vLLM's asynchronous scheduling on the CPU.

vLLM's platform for CPUs switches it off. Left on, the scheduler, the engine core's queue of batches, the model runner's
tokens of the step before and the outputs that arrive a step late are those of a GPU. What overlaps is not: a stream
and an event of the CPU have nothing to wait for.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any


class _Nothing:
    """A stream, or an event."""

    def __init__(self, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class _BeforeTheEngine:
    """Patches vLLM in a process that is about to import its engine core or its model runner."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name not in ("vllm.v1.engine.core", "vllm.v1.worker.cpu_model_runner"):
            return
        sys.meta_path.remove(self)
        import torch
        from vllm.platforms.cpu import CpuPlatform

        check = CpuPlatform.check_and_update_config

        def check_all_but_the_scheduler(config: Any) -> None:
            chosen = config.scheduler_config.async_scheduling
            check(config)
            config.scheduler_config.async_scheduling = chosen
            print(f"asynchronous scheduling: {chosen}", file=sys.stderr)

        CpuPlatform.check_and_update_config = staticmethod(check_all_but_the_scheduler)
        torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[misc, assignment]
        torch.cuda.current_stream = _Nothing  # type: ignore[assignment]
        torch.cuda.stream = nullcontext  # type: ignore[assignment]


sys.meta_path.insert(0, _BeforeTheEngine())
