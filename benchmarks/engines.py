"""The cost of an update (seconds, and peak memory of the largest process) for each train engine and several options,
and the cost of a call on Ray.

    OMP_NUM_THREADS=1 python benchmarks/engines.py [--repeats 5] [--ray] [--only PART] [--size 20M|1B|4B]

A Llama with random weights; one mini-batch of 16 trajectories of 32 prompt and 96 response tokens, in micro-batches of
512 tokens, float32 (on a GPU: bfloat16, 512 prompt and 1 536 response tokens, micro-batches of 16 384). Each row is
measured in new processes, connected by gloo (NCCL on GPUs); the first update, which allocates memory, does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES: dict[str, dict[str, int]] = {
    "20M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "heads": 6},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "heads": 32},
    "4B": {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 28, "heads": 24},
}
H200_BF16_FLOPS = 989e12


@dataclass(frozen=True)
class Case:
    """One row of a table."""

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
    """Run updates on one rank, and send the median seconds, peak MB, parameters and tokens through `pipe`."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf.algorithms import PPOClip
    from rlhf.algorithms.objectives import ActorObjective
    from rlhf.batch import TrajectoryBatch
    from rlhf.config import ActorConfig, LoRAConfig
    from rlhf.engines import ranks, token_outputs
    from rlhf.engines.base import OptimizerPlan
    from rlhf.engines.build import train_engine
    from rlhf.engines.optimizers import AdamW
    from rlhf.models import lora

    os.environ["LOCAL_RANK"] = str(rank)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    if count > 1:
        ranks.join(rank, count, f"file://{meeting}")
    if case.logits_bytes:
        token_outputs.LOGITS_BYTES = case.logits_bytes
    torch.manual_seed(0)
    shape = dict(SIZES[size])
    heads = shape.pop("heads")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.vocabulary,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=4096,
            **shape,
        )
    )
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
        peak = torch.cuda.max_memory_allocated() / 2**20
    pipe.send((statistics.median(seconds[1:]), peak, parameters, tokens))


def measured(case: Case, count: int, size: str, repeats: int) -> tuple[float, float, int, int]:
    """Measure a case; returns seconds per update, MB of the largest process, parameters, and tokens per update."""
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
    """Milliseconds per call to a worker group with one worker; the call does nothing."""
    from infra.store.records import Weights
    from infra.workers.ray_group import RayGroup
    from infra.workers.worker import Worker
    from rlhf.config import parse_config

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
    parser.add_argument("--size", choices=SIZES, default="20M", help="number of parameters of the model")
    options = parser.parse_args()
    if options.only != "options":
        counts = [1, 2] if gpus() != 1 else [1]
        titles = {1: " 1 process: s | MB | tokens/s |", 2: " 2 processes: s | MB each | tokens/s |"}
        print("| engine |" + "".join(titles[count] for count in counts))
        print("|---|" + "---|" * 3 * len(counts))
        for case in ENGINES:
            row = ""
            for count in counts:
                seconds, mb, parameters, tokens = measured(case, count, options.size, options.repeats)
                row += f" {seconds:.2f} | {mb:,.0f} | {tokens / seconds:,.0f} |"
                if gpus():
                    row += f" MFU {6 * parameters * tokens / seconds / count / H200_BF16_FLOPS:.1%} |"
            print(f"| {case.name} |{row}", flush=True)
        print(f"{parameters / 1e6:.1f} M parameters")
    if options.only != "engines":
        print("| torch, 1 process | s | MB | tokens/s |\n|---|---|---|---|")
        for case in OPTIONS:
            seconds, mb, _, tokens = measured(case, 1, options.size, options.repeats)
            print(f"| {case.name} | {seconds:.2f} | {mb:,.0f} | {tokens / seconds:,.0f} |", flush=True)
    if options.ray:
        print(f"a call on Ray: {ray_call():.1f} ms")


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
