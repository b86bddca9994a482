"""Measures seconds per iteration with vLLM and the trainer in two processes: in turn (`sync`), or with vLLM generating
ahead (`one_step_off`, `async`).

    OMP_NUM_THREADS=1 python benchmarks/ahead.py [--iterations 6]

GRPO on a Llama with 3.7 M parameters, random weights, float32. An iteration has 64 trajectories of about 170 prompt and
64 response tokens (end-of-sequence is ignored), in two shards. vLLM runs in its own process and the trainer in the
driver's, with one thread each. Each mode runs in a new process; the first two iterations are warm-up and do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")

MODES = ("sync", "one_step_off", "async")
WARM = 2


def measure(mode: str, folder: Path, iterations: int) -> None:
    """Prints the wall-clock seconds of each iteration, and the sum of its stages' seconds."""
    from ratchet.flows.train import train
    from ratchet.infra.progress import Event, IterationClosed, listening
    from tests import tiny

    tiny.model_folder(folder / "model", hidden=256, intermediate=688, layers=4, heads=8, key_value_heads=8)
    tiny.prompt_file(folder / "prompts.parquet", 64)
    config = tiny.config(
        folder,
        data__prompts_per_iteration=32,
        rollout={
            "engine": "vllm",
            "n": 2,
            "max_response_tokens": 64,
            "ignore_eos": True,
            "prompts_per_shard": 16,
            "mode": mode,
            "max_staleness": 2,
        },
        reward__function="tests.rewards:letters",
        algorithm={"advantage": "grpo", "kl": {"in_reward": None}},
        actor__mini_batch_trajectories=32,
        actor__micro_batch_tokens=4096,
        train__iterations=iterations,
    )
    last = 0.0

    def on_event(event: Event) -> None:
        nonlocal last
        if isinstance(event, IterationClosed):
            now = time.perf_counter()
            if event.iteration >= WARM:
                print("seconds", now - last, event.metrics["timing_s/stages"], flush=True)
            last = now

    with listening(on_event):
        train(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.mode:
            return measure(options.mode, Path(folder), options.iterations + WARM)
    print("| mode | seconds per iteration | sum of its stages | overlapped | relative to sync |")
    print("|---|---|---|---|---|")
    sync = 0.0
    for mode in MODES:
        command = [sys.executable, __file__, "--mode", mode, "--iterations", str(options.iterations)]
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        rows = [line.split()[1:] for line in output.splitlines() if line.startswith("seconds")]
        wall, stages = (statistics.median(float(row[column]) for row in rows) for column in (0, 1))
        sync = sync or wall
        print(
            f"| {mode} | {wall:.2f} | {stages:.2f} | {max(1 - wall / stages, 0):.0%} | {wall / sync:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
