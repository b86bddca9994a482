"""`rollout.engine: vllm`: generation by vLLM (arXiv 2309.06180) in a separate process that is kept warm.

vLLM has processes, threads and device memory that must not outlive the process that uses them, and it may crash or
hang. It therefore runs in a child process, which ends with its parent, is killed if it does not answer within
`timeout_s`, and is restarted by the next call. New weights are loaded in place, from a folder in memory.
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
"""Time limit for starting vLLM, in seconds."""


@dataclass(frozen=True)
class Child:
    """The process that runs vLLM."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path


class VLLMRollout:
    """A rollout engine that uses vLLM.

    After an `EngineLost` the next process starts with the model's initial weights: load the current weights again.
    """

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
        """Prepare the options; the first call starts vLLM.

        Args:
            folder: the model's folder.
            eos_token_ids: tokens that end a response.
            dtype: type of the weights and the computation.
            max_model_len: maximum number of tokens of prompt and response.
            logprobs_mode: kind of log-probs: `processed_logprobs`, or `raw_logprobs` if `top_p` is below 1.
            timeout_s: time limit of a call, in seconds.
            on_gpu: whether vLLM runs on a GPU.
            lora_rank: maximum rank of an adapter; None: no adapters.
            cpu_cache_gib: size of the KV cache on the CPU, in GiB.
            options: further arguments of vLLM's `LLM`.
        """
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
            "generation_config": "vllm",  # ignore the model's own defaults
            "disable_log_stats": True,
            # after a chunk of a prompt, vLLM 0.32 rewinds the seeded generator, which CPU generators do not support
            **({} if on_gpu else {"enable_chunked_prefill": False}),
            **options,
        }
        if lora_rank is not None:
            self.options |= {"enable_lora": True, "max_lora_rank": lora_rank, "max_loras": 1}
        atexit.register(self.close)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
        """Generate responses; see `RolloutEngine.generate`."""
        if not requests:
            return []
        prompts = [list(request.prompt_ids) for request in requests]
        parameters = [self._parameters(request, sampling) for request in requests]
        answers = self._ask("generate", prompts, parameters, self._adapter)
        return [Generation(tuple(ids), tuple(log_probs), reason) for ids, log_probs, reason in answers]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> None:
        """Replace the weights in place and clear the prefix cache; see `RolloutEngine.load_weights`."""
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
        """Wake vLLM or put it to sleep; see `RolloutEngine.place`."""
        if not self.on_gpu:
            return  # host memory is the only memory
        if self._child is not None and model == self.asleep:
            self._ask("wake" if model else "sleep")
        self.asleep = self._child is not None and not model

    def close(self) -> None:
        """End the process and remove its files."""
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
            "ignore_eos": True,  # stop_token_ids has all end-of-sequence tokens
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
            reason = self._last_words(child)
            self._end()
            raise EngineLost(f"vLLM's process died during {method}: {reason}") from None
        except EngineLost:
            self._end()
            raise
        if not good:
            self._end()
            raise EngineLost(f"vLLM failed during {method}: {answer}")
        return answer

    def _start(self) -> Child:
        parent_end, child_end = Pipe()
        log = self.scratch / "log"
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the child is already a separate process
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **({} if self.on_gpu else {"VLLM_CPU_KVCACHE_SPACE": str(self.cpu_cache_gib)}),
        }
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlhf.engines.vllm_child", str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
            )
        child_end.close()
        self._child = child = Child(process, parent_end, log)
        try:
            parent_end.send((os.getpid(), self.scratch, self.options))
            ready = parent_end.poll(START_S)
            good, answer = parent_end.recv() if ready else (False, f"it did not start within {START_S:.0f} s")
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
