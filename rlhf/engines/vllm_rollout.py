"""`rollout.engine: vllm`: generation by vLLM (arXiv 2309.06180), kept warm, in a process of its own.

vLLM has processes, threads and device memory that must not outlive whoever asked for them, and it may crash or hang: so
it lives in a child process that ends with its parent, is given up after `timeout_s`, and is started again with the
next call. New weights are loaded in place, from a folder in memory.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.engines.base import Generation, Request, Sampling, limit_of, seed_of
from rlhf.engines.weight_files import write_weights
from rlhf.errors import EngineLost

if TYPE_CHECKING:
    from torch import Tensor

START_S = 900.0


@dataclass(frozen=True)
class Child:
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path


class VLLMRollout:
    """After an `EngineLost` the next process begins with the model's first weights: load what is wanted."""

    def __init__(
        self,
        folder: str | Path,
        *,
        eos_token_ids: tuple[int, ...],
        dtype: str = "float32",
        max_model_len: int,
        logprobs_mode: str = "processed_logprobs",
        timeout_s: float = 600.0,
        on_gpu: bool = False,
        lora_rank: int | None = None,
        cpu_cache_gib: int = 1,
        **options: Any,
    ) -> None:
        """`options` go to vLLM's `LLM` as they are; a `lora_rank` makes room for an adapter."""
        self.eos, self.timeout_s = eos_token_ids, timeout_s
        self.on_gpu, self.cpu_cache_gib = on_gpu, cpu_cache_gib
        self.asleep = False
        self._child: Child | None = None
        self._adapter: tuple[int, Path] | None = None
        self._loads = 0
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.scratch = Path(tempfile.mkdtemp(prefix=f"ratchet-vllm-{os.getpid()}-", dir=memory))
        self.options = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "logprobs_mode": logprobs_mode,
            "trust_remote_code": False,
            "generation_config": "vllm",  # nothing is taken from the model's own defaults
            "disable_log_stats": True,
            # vLLM 0.32 takes a step of a seed back after a part of a prompt, which a CPU's generator cannot
            **({} if on_gpu else {"enable_chunked_prefill": False}),
            **options,
        }
        if lora_rank is not None:
            self.options |= {"enable_lora": True, "max_lora_rank": lora_rank, "max_loras": 1}
        atexit.register(self.close)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
        if not requests:
            return []
        prompts = [list(request.prompt_ids) for request in requests]
        parameters = [self._parameters(request, sampling) for request in requests]
        answers = self._ask("generate", prompts, parameters, self._adapter)
        return [Generation(tuple(ids), tuple(log_probs), reason) for ids, log_probs, reason in answers]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> None:
        """Take over the policy's weights, or its adapter's, in place; what was cached for the old ones is forgotten."""
        self._loads += 1
        folder = self.scratch / str(self._loads)
        folder.mkdir()
        adapted = adapter_config is not None
        write_weights(weights, folder, "adapter_model" if adapted else "model")
        if adapter_config is not None:
            (folder / "adapter_config.json").write_bytes(adapter_config)
            self._adapter, old = (self._loads, folder), self._adapter
            self._ask("forget", None if old is None else old[0])
            if old is not None:
                shutil.rmtree(old[1])
            return
        try:
            self._ask("reload", str(folder))
        finally:
            shutil.rmtree(folder)

    def place(self, *, model: bool, optimizer: bool) -> None:
        if not self.on_gpu:
            return  # there is but one memory
        if self._child is not None and model == self.asleep:
            self._ask("wake" if model else "sleep")
        self.asleep = self._child is not None and not model

    def close(self) -> None:
        self._end()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _parameters(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        seed = seed_of(request, sampling)
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.temperature else 1.0,
            "max_tokens": limit_of(request, sampling),
            "seed": seed,
            "logprobs": 0,  # of the sampled token
            "ignore_eos": True,  # ours are all of them
            "stop_token_ids": [] if sampling.ignore_eos else list(self.eos),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
        }

    def _ask(self, method: str, *arguments: Any) -> Any:
        child = self._child or self._start()
        try:
            child.pipe.send((method, arguments))
            if not child.pipe.poll(self.timeout_s):
                raise EngineLost(f"vLLM did not answer within {self.timeout_s:.0f} s (rollout.vllm.timeout_s)")
            good, answer = child.pipe.recv()
        except (EOFError, OSError):
            told = self._last_words(child)
            self._end()
            raise EngineLost(f"vLLM's process died during {method}: {told}") from None
        except EngineLost:
            self._end()
            raise
        if not good:
            self._end()
            raise EngineLost(f"vLLM failed during {method}: {answer}")
        return answer

    def _start(self) -> Child:
        here, there = Pipe()
        log = self.scratch / "log"
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the child is the process of its own
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **({} if self.on_gpu else {"VLLM_CPU_KVCACHE_SPACE": str(self.cpu_cache_gib)}),
        }
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlhf.engines.vllm_child", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
            )
        there.close()
        self._child = child = Child(process, here, log)
        try:
            here.send((os.getpid(), self.scratch, self.options))
            ready = here.poll(START_S)
            good, answer = here.recv() if ready else (False, f"it did not start within {START_S:.0f} s")
        except (EOFError, OSError):
            good, answer = False, self._last_words(child)
        if not good:
            self._end()
            raise EngineLost(f"vLLM did not start: {answer}")
        return child

    def _last_words(self, child: Child) -> str:
        child.process.wait(10)
        lines = [line for line in child.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"exit code {child.process.returncode}" + (f", {lines[-1].strip()[-300:]}" if lines else "")

    def _end(self) -> None:
        if self._child is not None:
            self._child.pipe.close()
            self._child.process.kill()
            self._child.process.wait()
            self._child = None
