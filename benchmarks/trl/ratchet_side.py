"""Ratchet's side of `compare.py`: one training run; prints the cost of each iteration as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")

import psutil
import torch

from ratchet.flows.train import train
from ratchet.infra.progress import Event, IterationClosed, listening
from ratchet.rlhf.config import RunConfig, parse_config

MARKS: list[tuple[float, float, float]] = []
"""After each iteration: CPU-seconds of this process and its reward workers, the clock, CPU-seconds of the server."""


def on_event(event: Event) -> None:
    if not isinstance(event, IterationClosed):
        return
    own, server = time.process_time(), 0.0
    for child in psutil.Process().children(recursive=True):
        used = child.cpu_times().user + child.cpu_times().system
        if any("prefect" in part for part in child.cmdline()):
            server += used
        else:
            own += used
    MARKS.append((own, time.perf_counter(), server))


def config(arguments: argparse.Namespace) -> RunConfig:
    root, ppo = arguments.root, arguments.algorithm == "ppo"
    trainer = {
        "mini_batch_trajectories": arguments.trajectories,
        "micro_batch_tokens": 2**20,  # everything at once, as on the other side
        "lr": 1e-6,
    }
    reward = {"model": {"path": str(root / "reward_model"), "dtype": arguments.dtype}}
    return parse_config(
        {
            "run": {"name": f"{arguments.algorithm}-{os.getpid()}", "store": f"file://{root}/runs"},
            "model": {"path": str(root / "model"), "dtype": arguments.dtype},
            "data": {
                "train": [str(root / "prompts.jsonl")],
                "prompts_per_iteration": arguments.trajectories // arguments.n,
                "max_prompt_tokens": 4096,
            },
            "rollout": {
                "n": arguments.n,
                "max_response_tokens": arguments.response_tokens,
                "ignore_eos": True,
                "prompts_per_shard": arguments.trajectories // arguments.n,
            },
            "reward": reward if arguments.reward_model else {"function": "tests.rewards:letters"},
            "algorithm": {
                "advantage": {"type": "gae" if ppo else "grpo"},
                "kl": {
                    "in_reward": 0.01 if ppo else None,
                    "in_loss": 0.04 if arguments.reference and not ppo else None,
                },
                "rollout_correction": {"bypass": True} if ppo else None,
            },
            "actor": trainer,
            "critic": trainer if ppo else None,
            "checkpoint": {"every": 1 if arguments.snapshots else 1000},
            "train": {"iterations": arguments.iterations},
        },
        "benchmark",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), required=True)
    for name in ("trajectories", "n", "response_tokens", "iterations"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    for name in ("reference", "reward_model", "snapshots"):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with listening(on_event):
        train(config(arguments))
    print("marks", json.dumps(MARKS), flush=True)


if __name__ == "__main__":
    main()
