"""`rollout.engine: vllm`: generation by vLLM (arXiv 2309.06180) in a separate, long-lived process.

vLLM has processes, threads and device memory that must not outlive the process that uses them, and it may crash or
hang. It therefore runs in a child process, which ends with its parent, is killed if it makes no progress for
`timeout_s`, and is restarted by the next request. Requests join its running batch at any time. New weights are loaded
in place, through buckets of memory that both processes map.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import psutil
import torch

from ratchet.rlhf import child_processes, event_loop
from ratchet.rlhf.distributed import accelerator, determinism
from ratchet.rlhf.errors import EngineLost, UserError, in_one_line
from ratchet.rlhf.rollout import device_memory
from ratchet.rlhf.rollout.engine import (
    Chunk,
    Request,
    RolloutEngine,
    Sampling,
    Scored,
    canary_requests,
    limit_of,
    scored_of,
    seed_of,
    with_answers,
)
from ratchet.rlhf.rollout.sent_prompts import SentPrompt, stop_tokens
from ratchet.rlhf.rollout.vllm_process import VLLM, NewTokens, Submission
from ratchet.rlhf.weights.buckets import DeviceMemory, Packed, SharedMemory, send
from ratchet.rlhf.weights.weight_files import write_weights

if TYPE_CHECKING:
    from torch import Tensor

    from ratchet.rlhf.models.image_processor import ImageProcessor

P = ParamSpec("P")
R = TypeVar("R")
HOST_MEMORY = "ratchet_host_memory"
"""Name of the backend in `vllm_weights`."""
START_S = 900.0
"""Time limit for starting vLLM, in seconds."""
MEMORY = ("weights", "kv_cache")
"""vLLM's tags of the memory that it frees when it sleeps."""
_lingering: list[psutil.Process] = []
"""Killed vLLM processes that did not end in time; they may hold the memory that the next vLLM asks for."""
_shares: set[float] = set()
"""Shares of the GPU that were there for a vLLM of this process."""


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Removes PyTorch's setting `expandable_segments` from environment variables, keeping its other settings."""
    # vLLM frees and maps its memory itself when it sleeps and wakes, which PyTorch refuses with such segments
    kept = dict(environment)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in kept:
            settings = [setting for setting in kept.pop(name).split(",") if "expandable_segments" not in setting]
            kept |= {name: ",".join(settings)} if any(setting.strip() for setting in settings) else {}
    return kept


class VLLMProcess:
    """The process that runs vLLM, and its running requests."""

    def __init__(self, scratch: Path, options: dict[str, Any], environment: dict[str, str], timeout_s: float) -> None:
        """Starts the process and waits until it is ready.

        Args:
            scratch: folder for its log; the process removes it if its parent dies.
            options: arguments of vLLM's `LLM`.
            environment: environment variables, in addition to this process's.
            timeout_s: the process is lost if it sends nothing for this many seconds while it has work.

        Raises:
            UserError: vLLM refuses the options.
            EngineLost: it did not start.
        """
        self.lost: EngineLost | None = None
        self.lost_at_work = False
        """True if it was lost while a caller waited for it, who was then told."""
        self.requests: dict[int, asyncio.Queue[Chunk | EngineLost | UserError]] = {}
        """The chunks of each running request, by number. Only the event loop's thread uses it."""
        self._timeout_s = timeout_s
        self._answers = SimpleQueue[tuple[bool, Any]]()
        self._calling = threading.Lock()
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._waits = False  # a call waits for its answer
        self._has_ended = False
        self._last = time.monotonic()
        """Time at which the process last sent something, or got work after it had none."""
        self._log = scratch / "log"
        self._pipe, child_end = Pipe()
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ratchet.rlhf.rollout.vllm_process", str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=without_expandable_segments(os.environ) | environment,
            )
        child_end.close()
        try:
            self._pipe.send((os.getpid(), scratch, options))
            ready = self._pipe.poll(START_S)
            late = (None, False, f"it did not start within {START_S:.0f} s")
            kind, good, answer = self._pipe.recv() if ready else late
        except (EOFError, OSError):
            kind, good, answer = None, False, self._last_words()
        if not good:
            self.end()
            reason = answer if kind == "refused" else error_of_worker(self._log.read_text(errors="replace")) or answer
            if kind == "refused" or cannot_pass(reason):
                fix = "change model, or the keys in rollout and rollout.engine"
                raise UserError(f"vLLM refuses to start: {in_one_line(reason)}: {fix}")
            raise EngineLost(f"vLLM did not start: {reason}")
        threading.Thread(target=self._read, name="vllm", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Sends a message; if the process is lost, its requests receive the error."""
        # time without work does not count towards the time limit
        if not self.requests and not self._waits:
            self._last = time.monotonic()
        # the thread that reads notices a lost process
        with self._sending, suppress(OSError):
            self._pipe.send(message)

    def call(self, method: Callable[Concatenate[VLLM, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """Calls a method in the process and returns its result. Raises `EngineLost`."""
        assert not named, "arguments are sent by position"
        with self._calling:
            if not self.requests:
                self._last = time.monotonic()
            self._waits = True  # before the message is sent: whoever notices a lost process then tells this call
            self.send("call", method, arguments)
            answer: Any
            if self.lost is None:
                good, answer = self._answers.get()
            else:
                good, answer = False, self.lost
                self.lost_at_work = True  # this call tells of it
                self.end()  # its own thread may be doing so at this moment
            self._waits = False
        if not good:
            raise answer
        result: R = answer
        return result

    def end(self) -> None:
        """Kills the process and vLLM's worker processes, and waits until their memory is free."""
        with self._ending:
            if not self._has_ended:
                self._has_ended = True
                self._pipe.close()
                _lingering.extend(child_processes.end(self._process))

    def _read(self) -> None:
        """Receives messages until the process is lost or ended."""
        try:
            while True:
                if not self._pipe.poll(min(1.0, self._timeout_s)):
                    if (self.requests or self._waits) and time.monotonic() - self._last > self._timeout_s:
                        raise EngineLost(
                            f"vLLM made no progress for {self._timeout_s:.0f} s (rollout.engine.timeout_s)"
                        )
                    continue
                kind, *content = self._pipe.recv()
                self._last = time.monotonic()
                if kind == "tokens":
                    event_loop.loop().call_soon_threadsafe(self._deliver, content[0])
                elif kind == "mistake":
                    event_loop.loop().call_soon_threadsafe(self._refuse, *content)
                elif content[0]:
                    self._answers.put((True, content[1]))
                else:
                    raise EngineLost(f"vLLM failed: {content[1]}")
        except (EOFError, OSError):
            if not self._has_ended:
                self._lose(EngineLost(f"vLLM's process died: {self._last_words()}"))
        except EngineLost as error:
            self._lose(error)

    def _lose(self, error: EngineLost) -> None:
        self.lost_at_work = bool(self.requests) or self._waits
        self.lost = error
        try:
            self.end()
        finally:  # even if that raises, no caller may wait forever
            # wakes a caller that waits for an answer
            self._answers.put((False, error))
            event_loop.loop().call_soon_threadsafe(self._fail, error)

    def _deliver(self, new_tokens: list[NewTokens]) -> None:
        for number, ids, log_probs, reason, routes in new_tokens:
            chunks = self.requests.get(number) if reason is None else self.requests.pop(number, None)
            if chunks is not None:  # else it was cancelled
                chunks.put_nowait(Chunk(tuple(ids), tuple(log_probs), reason, routes))

    def _refuse(self, number: int, reason: str) -> None:
        if (chunks := self.requests.pop(number, None)) is not None:
            chunks.put_nowait(UserError(reason))

    def _fail(self, error: EngineLost) -> None:
        for chunks in self.requests.values():
            chunks.put_nowait(error)
        self.requests = {}

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        lines = self._log.read_text(errors="replace").splitlines()
        lines = [line for line in lines if line.strip() and "WARNING" not in line]
        return f"exit code {self._process.returncode}" + (f", {lines[-1].strip()[-300:]}" if lines else "")


def error_of_worker(log: str) -> str | None:
    """Finds the error of one of vLLM's worker processes in the log: vLLM itself only says that there was one."""
    error = re.search(r"^\(Worker.*?\) ERROR .*?\] ([\w.]+(?:Error|Exception): .*)$", log, re.MULTILINE)
    return None if error is None else error[1]


def cannot_pass(error: str) -> bool:
    """Returns True if vLLM would fail again with this error, which begins with its type (`ValueError: ...`)."""
    kinds = r"(\w+\.)*(ValueError|TypeError|NotImplementedError|ImportError|ModuleNotFoundError): "
    refuses = re.match(kinds, error) or re.search(r"unsupported|not supported|not implemented", error, re.IGNORECASE)
    # other processes may free their memory
    return refuses is not None and "memory" not in error.lower()


class VLLMRollout(RolloutEngine):
    """Generates with vLLM.

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
        deterministic: bool = False,
        lora_rank: int | None = None,
        cpu_cache_gib: int = 1,
        tensor_parallel: int = 1,
        devices: tuple[str, ...] = (),
        records_routes: bool = False,
        images: ImageProcessor | None = None,
        **options: Any,
    ) -> None:
        """Prepares the options; the first call starts vLLM.

        Args:
            logprobs_mode: `processed_logprobs`, or `raw_logprobs` if the sampling truncates.
            timeout_s: vLLM is restarted if it makes no progress for this many seconds.
            deterministic: make a response independent of the requests in its batch; only on a GPU.
            devices: the GPUs that vLLM uses, by number or UUID; empty: those that this process sees.
            records_routes: chunks have the experts that a mixture of experts chose.
            images: processor of the model's images; None: it reads text only.
            options: more arguments of vLLM's `EngineArgs`.
        """
        self.eos, self.timeout_s = eos_token_ids, timeout_s
        self.on_gpu, self.cpu_cache_gib, self.deterministic = on_gpu, cpu_cache_gib, deterministic
        self.tensor_parallel, self.devices = tensor_parallel, devices
        self.records_routes = records_routes
        self.images = images
        self.dtype: torch.dtype = getattr(torch, dtype)
        # vLLM's `ipc` works within one GPU
        self.transfers_on_device = on_gpu and tensor_parallel == 1
        self._asleep: set[str] = set()
        """vLLM's tags of the memory that is not on the device."""
        self._child: VLLMProcess | None = None
        self._starting = threading.Lock()
        self._numbers = itertools.count()
        self._submitted: list[Submission] = []
        self._adapter: tuple[int, Path] | None = None
        self._loads = 0
        # adapters and the log are written to the scratch folder, which is in memory if possible
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
            "tensor_parallel_size": tensor_parallel,
            # otherwise vLLM may choose Ray if it is installed, or refuse GPUs of which it sees too few
            **({} if tensor_parallel == 1 else {"distributed_executor_backend": "mp"}),
            # after a chunk of a prompt, vLLM 0.32 rewinds the seeded generator, which CPU generators do not support
            **({} if on_gpu else {"enable_chunked_prefill": False}),
            "weight_transfer_config": {"backend": "ipc" if self.transfers_on_device else HOST_MEMORY},
            "worker_extension_cls": "ratchet.rlhf.rollout.vllm_weights.Extension",
            # no policy is shown videos: their processor may be missing, and their size is measured at the start
            **({} if images is None else {"limit_mm_per_prompt": {"video": 0}}),
            # only the newest adapter is ever used
            **({} if lora_rank is None else {"enable_lora": True, "max_lora_rank": lora_rank, "max_loras": 1}),
            **({"enable_return_routed_experts": True} if records_routes else {}),
            **options,
        }
        # files in /dev/shm would hold memory after this process
        atexit.register(self.close)

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        prompt = SentPrompt.of(request, self.images)
        # starting vLLM takes long, and must not block the event loop
        is_there = self._child is not None and self._child.lost is None
        child = self._running() if is_there else await asyncio.to_thread(self._running)
        number, chunks = next(self._numbers), asyncio.Queue[Chunk | EngineLost | UserError]()
        child.requests[number] = chunks
        if not self._submitted:  # sent together with all requests of this turn of the event loop
            asyncio.get_running_loop().call_soon(self._submit)
        self._submitted.append((number, prompt, self._parameters(request, sampling), self._adapter))
        try:
            while True:
                chunk = await chunks.get()
                if not isinstance(chunk, Chunk):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            if child.requests.pop(number, None) is not None:
                child.send("cancel", [number])

    def _submit(self) -> None:
        submitted, self._submitted = self._submitted, []
        self._running().send("submit", submitted)

    def score(self, texts: Sequence[Sequence[int]], drawn: int) -> dict[str, list[Scored]]:
        answers = self.generate(*canary_requests(texts, drawn))
        log_probs = self._running().call(VLLM.log_probs_of, with_answers(texts, answers), self._adapter)
        return {"": scored_of(texts, answers, log_probs)}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None) -> int:
        """Replaces the weights in place and clears the prefix cache; see `RolloutEngine.load_weights`."""
        child = self._running()
        self._wake("weights")  # the cache wakes when it is needed: the buckets of weights take memory, too
        if adapter_config is not None:
            return self._load_adapter(child, weights, adapter_config)
        child.call(VLLM.begin_update)
        if self.transfers_on_device:
            with closing(DeviceMemory()) as memory:
                sent = send(weights, self.dtype, [memory], partial(_deliver_on_device, child))
                child.call(VLLM.finish_update)  # vLLM releases the bucket, which can then be freed
        else:
            with closing(SharedMemory()) as first, closing(SharedMemory()) as second:
                sent = send(weights, self.dtype, [first, second], partial(_deliver, child))
            child.call(VLLM.finish_update)
        return sent

    def _load_adapter(self, child: VLLMProcess, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes) -> int:
        self._loads += 1
        folder = self.scratch / str(self._loads)
        folder.mkdir()
        sent = write_weights(weights, folder, "adapter_model")
        (folder / "adapter_config.json").write_bytes(adapter_config)
        # vLLM knows adapters by number, so new weights need a new one
        self._adapter, old = (self._loads, folder), self._adapter
        child.call(VLLM.forget_adapter, None if old is None else old[0])
        if old is not None:
            shutil.rmtree(old[1])
        return sent

    def place(self, *, model: bool, optimizer: bool) -> None:
        if model:
            self._wake(*MEMORY)
        else:
            self._sleep(level=1)

    def discard(self) -> bool:
        """Puts vLLM to sleep without its weights; see `RolloutEngine.discard`."""
        assert "enable_lora" not in self.options, "new adapters do not bring the base back"
        self._sleep(level=2)
        return bool(self._asleep)

    def _sleep(self, level: int) -> None:
        """Puts the process to sleep if its weights are awake; level 1 keeps them in host memory, level 2 loses them."""
        if self._child is not None and self._child.lost is None and "weights" not in self._asleep:
            self._child.call(VLLM.sleep, level)
            self._asleep = set(MEMORY)

    def _wake(self, *tags: str) -> None:
        """Wakes the sleeping memory with these tags."""
        asleep = [tag for tag in tags if tag in self._asleep]
        if self._child is not None and self._child.lost is None and asleep:
            self._child.call(VLLM.wake, asleep)
            self._asleep -= set(asleep)

    def close(self) -> None:
        """Ends the process and removes its files."""
        self._end()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _parameters(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        seed = seed_of(request, sampling)
        return {
            **sampling.parameters,
            "max_tokens": limit_of(request, sampling),
            "seed": seed,
            "logprobs": 0,  # only the sampled token's
            "ignore_eos": True,  # stop_token_ids has all end-of-sequence tokens
            "stop_token_ids": stop_tokens(self.images, sampling, self.eos),
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
        }

    def _running(self) -> VLLMProcess:
        """Returns the process, starting it if there is none. Raises EngineLost if the last one was lost unnoticed."""
        with self._starting:
            if self._child is not None and self._child.lost is not None:
                lost, self._child = self._child, None
                lost.end()  # its own thread may be doing so at this moment
                if not lost.lost_at_work:
                    assert lost.lost is not None
                    raise lost.lost
            if self._child is None:
                _lingering[:] = child_processes.remaining(_lingering)
                if _lingering:
                    raise EngineLost(
                        f"the last vLLM was killed, but holds its memory: {child_processes.described(_lingering)}"
                    )
                if self.on_gpu:
                    self._await_room()
                self._asleep = set()
                # seeds requests that have no seed; the same noise after a restart would repeat earlier draws
                options = {**self.options, "seed": secrets.randbits(32)}
                self._child = VLLMProcess(self.scratch, options, self.environment(), self.timeout_s)
            return self._child

    def _await_room(self) -> None:
        """Waits until vLLM fits on the GPU, which may still count the memory of processes that have ended."""
        share = self.options["gpu_memory_utilization"]
        try:
            device_memory.await_room(share)
        except UserError as error:
            if share in _shares:  # there may be nothing for the user to change
                raise EngineLost(f"vLLM cannot start again: {error}") from None
            raise
        _shares.add(share)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that vLLM's process gets in addition to this process's."""
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the child is already a separate process
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        if self.records_routes:  # vLLM 0.32's older runner cannot return them
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if not self.on_gpu:
            variables["VLLM_CPU_KVCACHE_SPACE"] = str(self.cpu_cache_gib)
        elif self.deterministic:
            variables |= determinism.VLLM_ENVIRONMENT
        if self.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        if self.tensor_parallel > 1:
            # the child has threads, which a fork does not survive, and a fork would inherit its end of the pipe
            variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
            if not self.on_gpu:  # by default each worker wants a NUMA node
                variables["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return variables

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def _deliver(child: VLLMProcess, packed: Packed, memory: SharedMemory) -> None:
    bucket = {"path": memory.path, "nbytes": packed.nbytes, "packed": packed.as_json()}
    child.call(VLLM.update, bucket)


def _deliver_on_device(child: VLLMProcess, packed: Packed, memory: DeviceMemory) -> None:
    """Delivers a bucket to vLLM's backend `ipc`."""
    accelerator.synchronize(memory.device)
    bucket = {
        "names": list(packed.names),
        "dtype_names": [packed.dtype] * len(packed.names),
        "shapes": [list(shape) for shape in packed.shapes],
        "tensor_sizes": list(packed.sizes),
        "ipc_handles": memory.handle,
    }
    child.call(VLLM.update, bucket)
