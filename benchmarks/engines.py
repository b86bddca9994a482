"""What an update costs by train engine: seconds, and peak memory of the largest process; and what a call on Ray costs.

    OMP_NUM_THREADS=1 python benchmarks/engines.py [--repeats 5] [--ray]

A Llama of 20 M parameters, random weights, float32; one mini-batch of 16 trajectories of 32 prompt and 96 response
tokens, in micro-batches of 512 tokens. Every row is a fresh set of processes that meet through gloo (NCCL where there
is a GPU); the first update, which allocates, is not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ENGINES: dict[str, dict[str, Any]] = {
    "torch": {"engine": "torch"},
    "fsdp": {"engine": "fsdp"},
    **{f"deepspeed, ZeRO-{stage}": {"engine": "deepspeed", "zero_stage": stage} for stage in range(4)},
}


def update(pipe: Any, rank: int, count: int, meeting: str, trainer: dict[str, Any], repeats: int) -> None:
    """One rank: updates, and the seconds of each."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf.algorithms import PPOClip
    from rlhf.algorithms.objectives import ActorObjective
    from rlhf.batch import TrajectoryBatch
    from rlhf.config import Actor
    from rlhf.engines import ranks
    from rlhf.engines.base import Schedule
    from rlhf.engines.build import train_engine

    os.environ["LOCAL_RANK"] = str(rank)
    if count > 1:
        ranks.join(rank, count, f"file://{meeting}")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=6,
        )
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = train_engine(Actor(**trainer), model, "policy", dtype="float32")
    rng = np.random.default_rng(0)
    rows = 16
    batch = TrajectoryBatch.of(
        {
            "prompt_ids": rng.integers(3, 8192, (rows, 32)).tolist(),
            "response_ids": rng.integers(3, 8192, (rows, 96)).tolist(),
            "loss_mask": [[1] * 96] * rows,
            "advantages": rng.standard_normal((rows, 96)).tolist(),
            "old_log_probs": (rng.standard_normal((rows, 96)) * 0.01 - 9).tolist(),
        }
    )
    objective = ActorObjective(PPOClip(), None, "k3", 0.0, on_policy=False)
    schedule = Schedule(
        lr=1e-6,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        grad_clip=1.0,
        micro_batch_tokens=512,
        mini_batches=(tuple(range(rows)),),
        temperature=1.0,
    )
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        engine.update(batch, objective, schedule)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    pipe.send((statistics.median(seconds[1:]), peak, parameters))


def measured(trainer: dict[str, Any], count: int, repeats: int) -> tuple[float, float, int]:
    """Seconds of an update, MB of the largest process, and the model's parameters."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=update, args=(there, rank, count, f"{folder}/meet", trainer, repeats))
            process.start()
            pipes.append(here)
            processes.append(process)
        told = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return max(one[0] for one in told), max(one[1] for one in told), told[0][2]


def ray_call(repeats: int = 200) -> float:
    """Milliseconds of a call of a group of one, which does nothing."""
    from infra.records import Weights
    from infra.workers.ray_group import RayGroup
    from rlhf.config import parse_config

    tree = {"model": {"path": "nowhere"}, "data": {"train": ["nowhere"]}, "pools": {"one": {}}}
    group = RayGroup(parse_config(tree, "benchmark"), "memory://benchmark", "one", threads=1, identity="")
    group.epoch = 1
    weights = Weights(version=0, digest="")
    group.call("holds", "actor", weights)
    started = time.perf_counter()
    for _ in range(repeats):
        group.call("holds", "actor", weights)
    return 1e3 * (time.perf_counter() - started) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ray", action="store_true", help="the cost of a call on Ray, too")
    options = parser.parse_args()
    print("| engine | 1 process: s | MB | 2 processes: s | MB each |\n|---|---|---|---|---|")
    for name, trainer in ENGINES.items():
        (one, one_mb, parameters), (two, two_mb, _) = (measured(trainer, count, options.repeats) for count in (1, 2))
        print(f"| {name} | {one:.2f} | {one_mb:,.0f} | {two:.2f} | {two_mb:,.0f} |", flush=True)
    print(f"{parameters / 1e6:.1f} M parameters")
    if options.ray:
        print(f"a call on Ray: {ray_call():.1f} ms")


if __name__ == "__main__":
    main()
