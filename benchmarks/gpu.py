"""Measures a machine with one GPU within ten minutes, without vLLM, Prefect or DeepSpeed: `make gpu`.

    python benchmarks/gpu.py                       # on a GPU; writes gpu.md and prints it
    python benchmarks/gpu.py --only sync twice     # some of its steps
    python benchmarks/gpu.py --device cpu          # the same steps, on tiny sizes; for tests

Each step is a process of its own with a time limit. A step that fails, is too slow or lacks a package is a row of the
report, and the others still run. Exit code: 0 if no step failed, 1 if one did, 2 if nothing could be run (no GPU, or a
package that every step needs is missing), so that a script never takes that for a measurement.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ratchet.rlhf.batch import TrajectoryBatch
    from ratchet.rlhf.train.torch_engine import TorchEngine
    from ratchet.rlhf.weights.buckets import DeviceMemory, Packed, SharedMemory

ROOT = Path(__file__).parents[1]
REQUIRED = ("torch", "transformers", "numpy", "pyarrow", "pydantic", "safetensors", "jaxtyping", "psutil")
"""Modules that every step needs."""
MINUTES = 10.0
Device = Literal["cuda", "cpu"]
GIB = 2**30


@dataclass(frozen=True)
class Step:
    """A part of the report."""

    name: str
    title: str
    limit_s: float
    command: tuple[str, ...]
    """Arguments of Python."""
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""
    is_markdown: bool = True
    """True if it prints Markdown, False for plain text."""


@dataclass(frozen=True)
class Result:
    step: Step
    outcome: str
    """`ok`, `failed`, `too slow` or `skipped`, and the reason."""
    seconds: float
    output: str
    is_good: bool


def steps(device: Device) -> tuple[Step, ...]:
    """Returns the steps in order; on a GPU, their limits add up to `MINUTES` at most."""

    def own(name: str, title: str, limit_s: float) -> Step:
        return Step(name, title, limit_s, (str(ROOT / "benchmarks/gpu.py"), "--step", name, "--device", device))

    def updates(name: str, limit_s: float, options: str) -> Step:
        return Step(name, f"updates: {options}", limit_s, (str(ROOT / "benchmarks/engines.py"), *options.split()))

    tests = f"-m pytest {ROOT}/tests/gpu --rootdir={ROOT} --confcutdir={ROOT}/tests/gpu -q -rs -p no:cacheprovider"
    if device == "cpu":
        measured = (
            updates("updates", 120, "--size tiny --kernels torch --checkpointing none --packing off --steps 1"),
        )
    else:
        kernels = "torch,compile,liger" if find_spec("liger_kernel") else "torch,compile"
        every = f"--kernels {kernels} --checkpointing selective --packing on --steps 3"
        measured = (
            updates("kernels-1b", 70, f"--size 1b {every}"),
            updates("kernels-4b", 90, f"--size 4b {every}"),
            updates("plain-1b", 45, "--size 1b --kernels torch --checkpointing none --packing off,on --steps 3"),
            updates("full-4b", 35, "--size 4b --kernels torch --checkpointing full --packing on --steps 3"),
        )
    in_order = (
        Step("tests", "tests/gpu", 150, tuple(tests.split()), needs=("pytest",), is_markdown=False),
        own("memory", "memory for another process", 50),
        own("digest", "digest by parts", 30),
        own("sync", "weight sync", 60),
        *measured,
        own("twice", "one update, twice", 50),
    )
    # a CPU is for tests, on machines that may be busy
    return in_order if device == "cuda" else tuple(replace(step, limit_s=1800.0) for step in in_order)


def run(step: Step, left_s: float) -> Result:
    """Runs a step in a process group of its own, which ends with it.

    Args:
        step: The step.
        left_s: Seconds that are left for all steps.
    """
    missing = [name for name in step.needs if find_spec(name) is None]
    if missing or left_s <= 0:
        reason = f"{', '.join(missing)} is missing" if missing else "no time is left"
        return Result(step, f"skipped: {reason}", 0.0, "", is_good=bool(missing))
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT, env=environment, stdout=output, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(min(step.limit_s, left_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(OSError):  # it has ended, and nothing that it started is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - started
        output.seek(0)
        errors.seek(0)
        text, complaints = output.read().strip(), errors.read().strip().splitlines()
    if code is None:
        return Result(step, f"too slow: ended after {seconds:.0f} s", seconds, text, is_good=False)
    if code:
        last = next((line.strip() for line in reversed(complaints) if line.strip()), f"exit code {code}")
        return Result(step, f"failed: {last[:200]}", seconds, text, is_good=False)
    return Result(step, "ok", seconds, text, is_good=True)


def machine(device: Device) -> str:
    import torch

    names = ("torch", "transformers", "triton", "liger-kernel", "flash-attn", "deepspeed", "vllm")
    packages = [f"{name} {number}" if (number := _version(name)) else f"no {name}" for name in names]
    if device == "cpu":
        return f"CPU ({platform.machine()}), Python {platform.python_version()}, {', '.join(packages)}"
    about = torch.cuda.get_device_properties(0)
    return (
        f"{about.name}, {about.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}, {', '.join(packages)}"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(about: str, results: Sequence[Result]) -> str:
    lines = [f"{about}.", "", "| step | seconds | outcome |", "|---|---|---|"]
    for result in results:
        outcome = result.outcome.replace("|", "\\|")
        lines.append(f"| {result.step.title} | {result.seconds:.0f} | {outcome} |")
    for result in results:
        if result.output:
            output = result.output if result.step.is_markdown else f"```\n{result.output}\n```"
            lines += ["", f"**{result.step.title}**", "", output]
    return "\n".join(lines) + "\n"


# Steps. Each prints Markdown.

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064},
}  # fmt: skip


def engine(size: str, device: Device) -> TorchEngine:
    """Returns a train engine whose random weights are always the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ratchet.rlhf.train.torch_engine import TorchEngine

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**SIZES[size], max_position_embeddings=4096))
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if device == "cuda" else "float32"
    return TorchEngine(model, "policy", dtype=dtype, gradient_checkpointing=device == "cuda")


def trajectories(device: Device) -> TrajectoryBatch:
    """Returns random trajectories, each prompt twice."""
    import numpy as np

    from ratchet.rlhf.batch import TrajectoryBatch

    rng = np.random.default_rng(0)
    prompts, prompt, response = (4, 256, 768) if device == "cuda" else (2, 8, 12)
    lengths = rng.integers(response // 2, response, 2 * prompts)
    return TrajectoryBatch.of(
        {
            "prompt_ids": np.repeat(rng.integers(3, 500, (prompts, prompt)), 2, axis=0).tolist(),
            "response_ids": [rng.integers(3, 500, length).tolist() for length in lengths],
            "loss_mask": [[1] * length for length in lengths],
            "advantages": [rng.standard_normal(length).tolist() for length in lengths],
            "old_log_probs": [(rng.standard_normal(length) * 0.01 - 6).tolist() for length in lengths],
        }
    )


def update(trained: TorchEngine, batch: TrajectoryBatch) -> None:
    from ratchet.rlhf.algorithms import PPOClip
    from ratchet.rlhf.algorithms.objectives import ActorObjective
    from ratchet.rlhf.algorithms.optimizers import AdamW
    from ratchet.rlhf.train.engine import OptimizerPlan

    plan = OptimizerPlan(
        lr=1e-5,
        optimizer=AdamW(),
        grad_clip=1.0,
        micro_batch_tokens=4096,
        mini_batches=(tuple(range(len(batch))),),
        temperature=1.0,
    )
    trained.update(batch, ActorObjective(PPOClip(), None, "k3", 0.0, on_policy=False), plan)


def synchronize(device: Device) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def started(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Starts another process that uses the device; returns it and a connection to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def step_memory(device: Device) -> None:
    """Checks that another process can have the memory that `place` frees, and that the state comes back unchanged."""
    import torch

    size = "1b" if device == "cuda" else "tiny"
    torch.zeros(1, device=device)  # CUDA takes memory of its own in both processes
    process, other = started(_other_process, device)
    with closing(other):
        first = other.recv()
        trained, batch = engine(size, device), trajectories(device)
        update(trained, batch)
        digest = trained.digest()
        synchronize(device)
        resident = _asked(other, 0)
        trained.place(model=False, optimizer=False)
        # a CPU has no memory of a device: any amount shows that the other process answers
        wanted = int(first["free"] - 1.5 * GIB) if device == "cuda" else 2**24
        given = _asked(other, wanted)
        trained.place(model=True, optimizer=True)
        is_same = trained.digest() == digest
        update(trained, batch)
        other.send(None)
    process.join()
    print("| another process sees | GiB |\n|---|---|")
    for name, value in (
        ("free at first", first["free"]),
        ("free beside the model and its moments", resident["free"]),
        ("free after `place`", given["free"]),
        ("allocated and written after `place`", given["allocated"]),
    ):
        print(f"| {name} | {value / GIB:.2f} |")
    assert given["allocated"] == wanted, f"it could not have {wanted / GIB:.1f} GiB: {given['error']}"
    assert is_same, "the state is not the same after it was moved away and back"


def _asked(other: Connection, nbytes: int) -> dict[str, Any]:
    other.send(nbytes)
    answer: dict[str, Any] = other.recv()
    return answer


def _other_process(pipe: Connection, device: Device) -> None:
    """Reports how much memory is free, and allocates the requested bytes."""
    import psutil
    import torch

    def free() -> int:
        return torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available

    torch.zeros(1, device=device)
    pipe.send({"free": free(), "allocated": 0, "error": None})
    while (nbytes := pipe.recv()) is not None:
        available, error, allocated = free(), None, 0
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
            synchronize(device)
            allocated = len(memory)
            del memory
        except torch.OutOfMemoryError as full:
            error = str(full).splitlines()[0]
        if device == "cuda":
            torch.cuda.empty_cache()
        pipe.send({"free": available, "allocated": allocated, "error": error})


def step_digest(device: Device) -> None:
    """Checks that the digest equals the CPU's, however a tensor is cut, and that a flipped bit changes it; times it."""
    import torch

    from ratchet.rlhf.weights import state_digest
    from ratchet.rlhf.weights.tensor_shards import TensorShard

    rows, columns = (4096, 1024) if device == "cuda" else (64, 32)
    on_cpu = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    whole = on_cpu.to(device)

    def digest(parts: Iterator[TensorShard]) -> str:
        return state_digest.of_parts({"w": parts}, {"w": whole.shape}, "")

    def cut(down: int, across: int) -> Iterator[TensorShard]:
        for row in range(down):
            for column in range(across):
                block = whole.chunk(down, 0)[row].chunk(across, 1)[column].contiguous()
                yield TensorShard.block(block, whole.shape, (row * rows // down, column * columns // across))

    expected = digest(iter([TensorShard.flat(on_cpu)]))
    for layout in ((1, 1), (8, 1), (1, 4), (2, 4)):
        assert digest(cut(*layout)) == expected, f"cut {layout[0]} x {layout[1]}, the digest is another one"
    whole.view(torch.int32)[rows // 2, columns // 2] ^= 1
    assert digest(cut(2, 4)) != expected, "a flipped bit goes unnoticed"

    elements = 2**30 if device == "cuda" else 2**18
    large = TensorShard.flat(torch.randn(elements, device=device))
    state_digest.sums(large, 1)  # kernels are loaded
    began = time.perf_counter()
    state_digest.sums(large, 1)
    seconds = time.perf_counter() - began
    print(
        "Equal on the CPU and on the device, whole, by 8 rows, by 4 columns, and by 2 x 4 blocks; one bit changes it."
    )
    print(f"{elements / 1e6:,.1f} M elements in {seconds:.3f} s: {1e9 * seconds / elements:.3f} ns per element.")


def step_sync(device: Device) -> None:
    """Sends weights to another process on the same device, as to vLLM; checks the bytes and measures the speed."""
    import torch

    from ratchet.rlhf.weights.buckets import DeviceMemory, SharedMemory, send

    weights, left_out = _weights(device)
    size = sum(2 * tensor.numel() for _, tensor in weights)
    expected = {name: _checksum(tensor.to(torch.bfloat16)) for name, tensor in weights}
    print(f"{size / 1e9:.2f} GB in bfloat16, cast from float32{left_out}.\n")
    print("| through | first: s | again: s | GB/s | bytes sent / size of the model |\n|---|---|---|---|---|")
    for name in ("memory of the device", "host memory") if device == "cuda" else ("host memory",):
        process, other = started(_receiver, device)
        with closing(other):
            other.recv()
            seconds = []
            for _ in range(2):
                synchronize(device)
                began = time.perf_counter()
                if name == "host memory":
                    with closing(SharedMemory()) as one, closing(SharedMemory()) as another:
                        sent = send(iter(weights), torch.bfloat16, [one, another], _to_host(other))
                else:
                    with closing(DeviceMemory()) as memory:
                        sent = send(iter(weights), torch.bfloat16, [memory], _on_device(other))
                seconds.append(time.perf_counter() - began)
            other.send(None)
            received = other.recv()
        process.join()
        ratio = sent / size
        print(f"| {name} | {seconds[0]:.2f} | {seconds[1]:.2f} | {size / seconds[1] / 1e9:.1f} | {ratio:.3f} |")
        assert received == expected, "what has arrived is not what was sent"
        assert ratio <= 1.2


def _weights(device: Device) -> tuple[list[tuple[str, Tensor]], str]:
    """Returns random float32 weights of a 7 B model, or of as many of its layers as fit with a copy in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES["7b" if device == "cuda" else "tiny"]))
    named = list(model.named_parameters())
    budget = torch.cuda.mem_get_info()[0] - 4 * GIB if device == "cuda" else 2**40
    chosen: list[tuple[str, Tensor]] = []
    for name, parameter in named:
        budget -= 6 * parameter.numel()
        if budget < 0:
            break
        chosen.append((name, torch.randn(parameter.shape, device=device)))
    left_out = f"; {len(named) - len(chosen)} of {len(named)} tensors do not fit" if len(chosen) < len(named) else ""
    return chosen, left_out


def _checksum(tensor: Tensor) -> int:
    import torch

    return int(tensor.contiguous().view(torch.int16).sum(dtype=torch.int64))


def _to_host(other: Connection) -> Callable[[Packed, SharedMemory], None]:
    def deliver(packed: Packed, memory: SharedMemory) -> None:
        other.send((packed.as_json(), memory.path, None))
        other.recv()

    return deliver


def _on_device(other: Connection) -> Callable[[Packed, DeviceMemory], None]:
    import torch

    def deliver(packed: Packed, memory: DeviceMemory) -> None:
        torch.cuda.synchronize()
        [handle] = memory.handle.values()
        other.send((packed.as_json(), None, handle))
        other.recv()

    return deliver


def _receiver(pipe: Connection, device: Device) -> None:
    """Copies the buckets into a model of its own; answers with a checksum of each tensor at the end."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from ratchet.rlhf.weights.buckets import Packed, mapped

    model: dict[str, torch.Tensor] = {}
    torch.zeros(1, device=device)
    pipe.send("ready")
    handle, memory = None, torch.empty(0)
    while (message := pipe.recv()) is not None:
        fields, path, its_handle = message
        packed = Packed.from_json(fields)
        if path is not None:
            memory = mapped(path, packed.nbytes)
        elif its_handle != handle:
            del memory
            memory, handle = rebuild_cuda_tensor(*its_handle), its_handle
        for name, tensor in packed.tensors(memory):
            if name not in model:
                model[name] = torch.empty_like(tensor, device=device)
            model[name].copy_(tensor)
        synchronize(device)
        pipe.send("loaded")
    pipe.send({name: _checksum(tensor) for name, tensor in model.items()})


def step_twice(device: Device) -> None:
    """Checks that an update from the same weights gives the same bits twice, in deterministic mode."""
    from ratchet.rlhf.distributed import determinism

    determinism.enforce()
    digests, seconds = [], []
    for _ in range(2):
        trained, batch = engine("1b" if device == "cuda" else "tiny", device), trajectories(device)
        update(trained, batch)  # allocates
        began = time.perf_counter()
        update(trained, batch)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        digests.append(trained.digest())
        del trained
        gc.collect()
    print(f"An update takes {min(seconds):.2f} s; the digests are {'equal' if len(set(digests)) == 1 else digests}.")
    assert len(set(digests)) == 1, "two updates of the same weights differ"


STEPS: dict[str, Callable[[Device], None]] = {
    "memory": step_memory,
    "digest": step_digest,
    "sync": step_sync,
    "twice": step_twice,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, default=Path("gpu.md"), help="file of the report")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of all steps")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run these steps only, by name")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is not None:
        STEPS[options.step](options.device)
        return
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        print(f"make gpu needs {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        sys.exit(2)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("make gpu: PyTorch finds no GPU on this machine, so nothing was measured", file=sys.stderr)
        sys.exit(2)
    chosen = steps(options.device)
    names = [step.name for step in chosen]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"there is no step {unknown[0]}; steps are {', '.join(names)}")
    deadline = time.monotonic() + 60 * options.minutes
    results = []
    for step in chosen:
        if options.only and step.name not in options.only:
            continue
        results.append(run(step, deadline - time.monotonic()))
        print(f"{step.title}: {results[-1].outcome} ({results[-1].seconds:.0f} s)", file=sys.stderr, flush=True)
    text = report(machine(options.device), results)
    options.output.write_text(text)
    print(text)
    sys.exit(0 if all(result.is_good for result in results) else 1)


if __name__ == "__main__":
    main()
