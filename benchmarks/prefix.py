"""Measures an update with and without prefix sharing, for several lengths of the prompt and responses per prompt.

    OMP_NUM_THREADS=1 python benchmarks/prefix.py [--repeats 3] [--size 5M|20M|1B|4B]

A Llama with random weights; four prompts, and responses of 32 to 224 tokens (128 on average), in micro-batches of
16,384 tokens. Both ways alternate in one process, which counts its CPU-seconds (on a GPU: seconds); the first update of
each does not count. "Arithmetic" is the ratio of the floating-point operations: 6 per weight of a linear layer and
token, and those of attention.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from benchmarks.parts import SIZES, VOCABULARY, model_folder
from ratchet.rlhf.algorithms import PPOClip
from ratchet.rlhf.algorithms.objectives import ActorObjective
from ratchet.rlhf.algorithms.optimizers import AdamW
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import ActorConfig, ModelConfig
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.train.build import train_engine
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.model_engine import ModelEngine

PROMPTS, SHORTEST, LONGEST, BUDGET = 4, 32, 224, 16384
OBJECTIVE = ActorObjective(PPOClip(), None, "k3", 0.0, on_policy=False)


def batch_of(prompt_tokens: int, n: int) -> TrajectoryBatch:
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, VOCABULARY, (PROMPTS, prompt_tokens)).repeat(n, axis=0)
    lengths = np.linspace(SHORTEST, LONGEST, PROMPTS * n).astype(int)
    return TrajectoryBatch.of(
        {
            "prompt_ids": prompts.tolist(),
            "response_ids": [rng.integers(3, VOCABULARY, length).tolist() for length in lengths],
            "loss_mask": [[1] * length for length in lengths],
            "advantages": [rng.standard_normal(length).tolist() for length in lengths],
            "old_log_probs": [(rng.standard_normal(length) * 0.01 - 8).tolist() for length in lengths],
        }
    )


def operations(engine: ModelEngine, batch: TrajectoryBatch, prompt_tokens: int, n: int, *, share: bool) -> float:
    """Returns the floating-point operations of an update, without padding: forward and backward."""
    config = engine.model.config
    head = config.vocab_size * config.hidden_size
    weights = sum(parameter.numel() for parameter in engine.model.parameters()) - 2 * head
    responses = batch.lengths("response_ids") - 1
    prompts = PROMPTS if share else PROMPTS * n
    tokens = prompts * prompt_tokens + responses.sum()
    pairs = prompts * prompt_tokens**2 / 2 + (responses * prompt_tokens + responses**2 / 2).sum()
    attention = 4 * pairs * config.hidden_size * config.num_hidden_layers
    return float(6 * weights * tokens + 3 * attention + 6 * head * batch.lengths("response_ids").sum())


def seconds_of(engine: ModelEngine, batch: TrajectoryBatch) -> tuple[float, float]:
    """Takes a step; returns its cost in seconds and the norm of its gradient."""
    plan = OptimizerPlan(
        lr=0.0,
        optimizer=AdamW(),
        grad_clip=1.0,
        micro_batch_tokens=BUDGET,
        mini_batches=(tuple(range(len(batch))),),
        temperature=1.0,
    )
    clock = time.perf_counter if accelerator.is_available() else time.process_time
    started = clock()
    metrics = engine.update(batch, OBJECTIVE, plan)
    accelerator.synchronize(engine.device)
    return clock() - started, metrics["actor/grad_norm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="5M", help="number of parameters of the model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = "bfloat16" if accelerator.is_available() else "float32"
    engines: dict[bool, ModelEngine] = {}
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder), options.size)
        for share in (False, True):
            model = load_actor(ModelConfig(path=folder))
            engines[share] = train_engine(ActorConfig(share_prompts=share), model, "policy", dtype=dtype)
    print(
        "| prompt tokens | n | whole sequences: s | shared prompts: s | ratio | arithmetic |\n|---|---|---|---|---|---|"
    )
    for prompt_tokens in (64, 512, 2048):
        for n in (4, 8, 16):
            batch = batch_of(prompt_tokens, n)
            seconds: dict[bool, list[float]] = {False: [], True: []}
            norms: dict[bool, float] = {}
            for repeat in range(options.repeats + 1):
                for share, engine in engines.items():
                    spent, norms[share] = seconds_of(engine, batch)
                    if repeat:
                        seconds[share].append(spent)
            assert abs(norms[True] / norms[False] - 1) < (1e-1 if dtype == "bfloat16" else 1e-3), (
                "not the same gradient"
            )
            whole, shared = (operations(engines[True], batch, prompt_tokens, n, share=share) for share in (False, True))
            before, after = median(seconds[False]), median(seconds[True])
            figures = f"{before:.2f} | {after:.2f} | **{after / before:.2f}** | {shared / whole:.2f}"
            print(f"| {prompt_tokens} | {n} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
