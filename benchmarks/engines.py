r"""Measures an update (seconds, and peak memory of the largest process) with each train engine and several options, and
a call on Ray.

    OMP_NUM_THREADS=1 python benchmarks/engines.py [--repeats 5] [--ray] [--only PART] [--size tiny|20m|1b|4b]

A Llama with random weights; one mini-batch of 16 trajectories of 32 prompt and 96 response tokens, in micro-batches of
512 tokens, float32 (on a GPU: bfloat16, 512 prompt and 1 536 response tokens, micro-batches of 16 384). Each row is
measured in new processes, connected by gloo (NCCL on GPUs); the first update, which allocates memory, does not count.

With any of `--kernels`, `--checkpointing` and `--packing`, a table of their combinations instead, for `torch` in one
process: tokens/s, model FLOPs utilization (attention counted, recomputation not) and peak memory of an update.

    python benchmarks/engines.py --size 4b --kernels torch,compile,liger --checkpointing none,selective,full \
        --packing off,on --steps 3 [--json FILE]

It has 16 trajectories with different prompts and responses of a fifth to the whole of the longest: on a GPU 16 k tokens
in bfloat16, in micro-batches of 16 384; on a CPU 1 k tokens in float32. A first step, which compiles and allocates
memory, does not count. A combination that fails is a row with its error.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "heads": 4},
    "20m": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "heads": 6},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "heads": 32},
    "4b": {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 28, "heads": 24},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "heads": 28},
}
CHECKPOINTING: dict[str, bool | str] = {"none": False, "selective": "selective", "full": True}


@dataclass(frozen=True)
class Case:
    name: str
    trainer: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    shortest: float = 1.0
    """The shortest response, as a share of the longest; lengths are spread evenly."""
    vocabulary: int = 8192
    micro_batches: int = 4
    """Approximate number of micro-batches in a mini-batch."""
    logits_bytes: int = 0
    """Limit on the size of logits; 0: the engine's default."""


ENGINES = [
    Case("torch"),
    Case("fsdp", {"engine": "fsdp"}),
    *(Case(f"deepspeed, ZeRO-{stage}", {"engine": "deepspeed", "zero_stage": stage}) for stage in range(4)),
]
OPTIONS = [
    Case("plain"),
    Case("gradient checkpointing", {"gradient_checkpointing": True}),
    Case("LoRA, r = 16", lora=True),
    Case("lengths 1:8, padded", shortest=1 / 8),
    Case("lengths 1:8, packed (`sdpa`)", {"packing": True}, shortest=1 / 8),
    Case(
        "vocabulary 65 536, one micro-batch, all logits at once", vocabulary=65536, micro_batches=1, logits_bytes=2**40
    ),
    Case("vocabulary 65 536, one micro-batch, logits in pieces", vocabulary=65536, micro_batches=1),
]


def update(pipe: Any, rank: int, count: int, meeting: str, case: Case, size: str, repeats: int) -> None:
    """Runs updates on one rank, and sends the median seconds, peak MB, parameters and tokens through `pipe`."""
    import numpy as np
    import torch

    from ratchet.rlhf.algorithms import PPOClip
    from ratchet.rlhf.algorithms.objectives import ActorObjective
    from ratchet.rlhf.algorithms.optimizers import AdamW
    from ratchet.rlhf.batch import TrajectoryBatch
    from ratchet.rlhf.config import ActorConfig, LoRAConfig
    from ratchet.rlhf.distributed import accelerator, ranks
    from ratchet.rlhf.models import lora, token_outputs
    from ratchet.rlhf.train.build import train_engine
    from ratchet.rlhf.train.engine import OptimizerPlan

    os.environ["LOCAL_RANK"] = str(rank)
    on_gpu = accelerator.is_available()
    if on_gpu:
        torch.accelerator.set_device_index(rank)
    if count > 1:
        ranks.join(rank, count, f"file://{meeting}")
    if case.logits_bytes:
        token_outputs.LOGITS_BYTES = case.logits_bytes
    model = random_model(size, case.vocabulary)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if case.lora:
        lora.add(model, LoRAConfig(), seed=0)
    engine = train_engine(ActorConfig(**case.trainer), model, "policy", dtype="bfloat16" if on_gpu else "float32")
    rng = np.random.default_rng(0)
    rows, prompt, response = 16, *((512, 1536) if on_gpu else (32, 96))
    lengths = np.linspace(case.shortest * response, response, rows).astype(int)
    tokens = int(lengths.sum()) + rows * prompt
    batch = TrajectoryBatch.of(
        {
            "prompt_ids": rng.integers(3, case.vocabulary, (rows, prompt)).tolist(),
            "response_ids": [rng.integers(3, case.vocabulary, length).tolist() for length in lengths],
            "loss_mask": [[1] * length for length in lengths],
            "advantages": [rng.standard_normal(length).tolist() for length in lengths],
            "old_log_probs": [(rng.standard_normal(length) * 0.01 - 9).tolist() for length in lengths],
        }
    )
    objective = ActorObjective(PPOClip(), None, "k3", 0.0, on_policy=False)
    schedule = OptimizerPlan(
        lr=1e-6,
        optimizer=AdamW(),
        grad_clip=1.0,
        micro_batch_tokens=rows * (prompt + response) // case.micro_batches,
        mini_batches=(tuple(range(rows)),),
        temperature=1.0,
    )
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        engine.update(batch, objective, schedule)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if on_gpu:
        peak = accelerator.peaks()[0] / 2**20
    pipe.send((statistics.median(seconds[1:]), peak, parameters, tokens))


def random_model(size: str, vocabulary: int, device: Any = None) -> Any:
    """Returns a Llama with random weights, in float32, on a device: the GPU if there is one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ratchet.rlhf.distributed import accelerator

    torch.manual_seed(0)
    shape = dict(SIZES[size])
    heads = shape.pop("heads")
    config = LlamaConfig(
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        **shape,
    )
    with device or accelerator.device():
        return LlamaForCausalLM(config)


def options_table(
    size: str, kernels: list[str], checkpointing: list[str], packing: list[str], steps: int, file: Path | None
) -> bool:
    """Measures and prints all combinations, each with its own engine, and appends them to a file as lines of JSON;
    returns True if none failed."""
    from ratchet.rlhf.distributed import accelerator

    device = accelerator.name() or "CPU"
    print(f"{device}, {size}:\n")
    print("| kernels | checkpointing | packing | s | tokens/s | MFU | peak MB |\n|---|---|---|---|---|---|---|")
    is_good = True
    for chosen in itertools.product(kernels, checkpointing, packing):
        row: dict[str, Any] = dict(zip(("kernels", "checkpointing", "packing"), chosen, strict=True))
        row |= {"size": size, "device": device}
        try:
            row |= measured_options(size, *chosen, steps)
        except Exception as error:  # the other combinations still count
            row["error"] = (str(error).splitlines() or [type(error).__name__])[0]
        gc.collect()
        accelerator.empty_cache(accelerator.device())
        if file is not None:
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
        is_good = is_good and "error" not in row
        figures = (
            row["error"] + " | | | |"
            if "error" in row
            else f"{row['seconds']:.3f} | {row['tokens_per_s']:,.0f} | "
            + ("" if row["mfu"] is None else f"{row['mfu']:.1%}")
            + f" | {row['peak_mb']:,.0f} |"
        )
        print(f"| {' | '.join(chosen)} | {figures}", flush=True)
    return is_good


def measured_options(size: str, kernels: str, checkpointing: str, packing: str, steps: int) -> dict[str, Any]:
    """Measures updates of one combination; returns the figures by name."""
    import numpy as np

    from ratchet.rlhf.algorithms import PPOClip
    from ratchet.rlhf.algorithms.objectives import ActorObjective
    from ratchet.rlhf.algorithms.optimizers import AdamW
    from ratchet.rlhf.batch import TrajectoryBatch
    from ratchet.rlhf.config import ActorConfig
    from ratchet.rlhf.distributed import accelerator
    from ratchet.rlhf.train import performance
    from ratchet.rlhf.train.build import train_engine
    from ratchet.rlhf.train.engine import OptimizerPlan

    on_gpu, is_short = accelerator.is_available(), size == "tiny" or not accelerator.is_available()
    vocabulary = 512 if is_short else 32768
    trainer = ActorConfig(
        gradient_checkpointing=CHECKPOINTING[checkpointing], packing=packing == "on", share_prompts=packing == "on"
    )
    dtype: Any = "bfloat16" if on_gpu else "float32"
    model = random_model(size, vocabulary)
    engine = train_engine(trainer, model, "policy", dtype=dtype, kernels=kernels)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    rows, prompt, response = (16, 16, 80) if is_short else (16, 256, 1280)
    lengths = np.linspace(response / 5, response, rows).astype(int)
    batch = TrajectoryBatch.of(
        {
            "prompt_ids": rng.integers(3, vocabulary, (rows, prompt)).tolist(),
            "response_ids": [rng.integers(3, vocabulary, length).tolist() for length in lengths],
            "loss_mask": [[1] * length for length in lengths],
            "advantages": [rng.standard_normal(length).tolist() for length in lengths],
            "old_log_probs": [(rng.standard_normal(length) * 0.01 - 10).tolist() for length in lengths],
        }
    )
    objective = ActorObjective(PPOClip(), None, "k3", 0.0, on_policy=False)
    plan = OptimizerPlan(
        lr=1e-6,
        optimizer=AdamW(),
        grad_clip=1.0,
        micro_batch_tokens=1024 if is_short else 16384,
        mini_batches=(tuple(range(rows)),),
        temperature=1.0,
    )
    engine.update(batch, objective, plan)  # returns numbers, so the device has computed them
    if on_gpu:
        accelerator.reset_peaks()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.update(batch, objective, plan)
        seconds.append(time.perf_counter() - started)
    peak = accelerator.peaks()[0] if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    median = statistics.median(seconds)
    flops = engine.update_flops(batch, plan)
    return {
        "seconds": median,
        "tokens_per_s": (rows * prompt + int(lengths.sum())) / median,
        "tflops": flops / median / 1e12,
        "mfu": performance.utilization(flops, median),
        "peak_mb": peak / 2**20,
    }


def measured(case: Case, count: int, size: str, repeats: int) -> tuple[float, float, int, int]:
    """Measures a case; returns seconds per update, MB of the largest process, parameters, and tokens per update."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(count):
            receiver, sender = context.Pipe()
            arguments = (sender, rank, count, f"{folder}/meet", case, size, repeats)
            process = context.Process(target=update, args=arguments)
            process.start()
            pipes.append(receiver)
            processes.append(process)
        results = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    seconds, peaks, parameters, tokens = zip(*results, strict=True)
    return max(seconds), max(peaks), parameters[0], tokens[0]


def ray_call(repeats: int = 200) -> float:
    """Returns milliseconds per call to a worker group with one worker; the call does nothing."""
    from ratchet.infra.store.records import Weights
    from ratchet.infra.workers.ray_group import RayGroup
    from ratchet.infra.workers.worker import Worker
    from ratchet.rlhf.config import parse_config

    tree = {"model": {"path": "nowhere"}, "data": {"train": ["nowhere"]}, "pools": {"pool": {}}}
    group = RayGroup(parse_config(tree, "benchmark"), "memory://benchmark", "pool", threads=1, identity="")
    group.term = 1
    weights = Weights(version=0, digest="")
    group.call(Worker.has_weights, "actor", weights)
    started = time.perf_counter()
    for _ in range(repeats):
        group.call(Worker.has_weights, "actor", weights)
    return 1e3 * (time.perf_counter() - started) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ray", action="store_true", help="also measure a call on Ray")
    parser.add_argument("--only", choices=["engines", "options"], help="print only one of the two tables")
    parser.add_argument("--size", choices=SIZES, default="20m", help="number of parameters of the model")
    for name, values in (("kernels", "torch"), ("checkpointing", "none"), ("packing", "on")):
        parser.add_argument(f"--{name}", help=f"values to combine, with commas between them; default {values}")
    parser.add_argument("--steps", type=int, default=3, help="measured updates of each combination")
    parser.add_argument("--json", type=Path, help="file to which the combinations are appended, a line each")
    options = parser.parse_args()
    if options.kernels or options.checkpointing or options.packing:
        lists = (options.kernels or "torch", options.checkpointing or "none", options.packing or "on")
        kernels, checkpointing, packing = (values.split(",") for values in lists)
        sys.exit(not options_table(options.size, kernels, checkpointing, packing, options.steps, options.json))
    from ratchet.rlhf.distributed import accelerator

    if options.only != "options":
        counts = [1, 2] if accelerator.count() != 1 else [1]
        titles = {1: " 1 process: s | MB | tokens/s |", 2: " 2 processes: s | MB each | tokens/s |"}
        print("| engine |" + "".join(titles[count] for count in counts))
        print("|---|" + "---|" * 3 * len(counts))
        for case in ENGINES:
            row = ""
            for count in counts:
                seconds, mb, parameters, tokens = measured(case, count, options.size, options.repeats)
                row += f" {seconds:.2f} | {mb:,.0f} | {tokens / seconds:,.0f} |"
            print(f"| {case.name} |{row}", flush=True)
        print(f"{parameters / 1e6:.1f} M parameters")
    if options.only != "engines":
        print("| torch, 1 process | s | MB | tokens/s |\n|---|---|---|---|")
        for case in OPTIONS:
            seconds, mb, _, tokens = measured(case, 1, options.size, options.repeats)
            print(f"| {case.name} | {seconds:.2f} | {mb:,.0f} | {tokens / seconds:,.0f} |", flush=True)
    if options.ray:
        print(f"a call on Ray: {ray_call():.1f} ms")


if __name__ == "__main__":
    main()
