"""Measures the cost of an iteration: response tokens per CPU-second, and the share of each part.

    OMP_NUM_THREADS=1 python benchmarks/iteration.py [--iterations 5]

A Llama with 3.7 M parameters, random weights, float32, one thread; 32 trajectories of 32 prompt and 64 response tokens,
sampled one by one with end-of-sequence ignored. PPO has four models (actor, critic, reference, and the rollout, which
shares the actor's weights) and one epoch. With bypass, the rollout's log-probs are used as the old ones, as in TRL's
PPO trainer. GRPO has neither critic nor reference. CPU time is measured for the driver's process and for the temporary
Prefect server; the first iteration is warm-up and does not count.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")

import psutil
import torch
from rich.console import Console
from rich.table import Table

from ratchet.flows.train import train
from ratchet.infra.progress import Event, IterationClosed, listening
from ratchet.infra.store.log import RunLog
from ratchet.infra.store.object_store import LocalBackend
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.config import RunConfig, parse_config
from tests import tiny

PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 32, 64
ALGORITHMS = ("ppo", "ppo-bypass", "grpo")


class Ledger:
    """CPU-seconds by part. The time of a nested part is subtracted from the outer one, so that the parts add up."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.requests: dict[str, int] = defaultdict(int)
        self.bytes = 0
        self._open: list[float] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.process_time()
        self._open.append(0.0)
        try:
            yield
        finally:
            spent = time.process_time() - started
            self.cpu[name] += spent - self._open.pop()
            if self._open:
                self._open[-1] += spent

    def wrap(self, owner: type, method: str, name: Callable[..., str]) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.part(name(*arguments)):
                return original(*arguments, **options)

        setattr(owner, method, timed)

    def count(self, method: str) -> None:
        original = getattr(LocalBackend, method)

        @functools.wraps(original)
        def counted(backend: LocalBackend, *arguments: Any) -> Any:
            self.requests[method] += 1
            if method in ("put", "create"):
                self.bytes += len(arguments[1])
            return original(backend, *arguments)

        setattr(LocalBackend, method, counted)

    def clear(self) -> None:
        self.cpu.clear()
        self.requests.clear()
        self.bytes = 0


def config(root: Path, algorithm: str, iterations: int) -> RunConfig:
    ppo = algorithm.startswith("ppo")
    trainer = {"mini_batch_trajectories": PROMPTS, "micro_batch_tokens": 16384}
    return parse_config(
        {
            "run": {"name": algorithm, "store": f"file://{root}/runs"},
            "model": {"path": str(root / "model"), "dtype": "float32"},
            "data": {
                "train": [str(root / "prompts.jsonl")],
                "prompts_per_iteration": PROMPTS if ppo else PROMPTS // 4,
                "max_prompt_tokens": PROMPT_TOKENS,
            },
            "rollout": {
                "n": 1 if ppo else 4,
                "max_response_tokens": RESPONSE_TOKENS,
                "ignore_eos": True,
                "prompts_per_shard": PROMPTS,
            },
            "reward": {"function": "tests.rewards:letters"},
            "algorithm": {
                "advantage": {"type": "gae" if ppo else "grpo"},
                "kl": {"in_reward": 0.01 if ppo else None},
                "rollout_correction": {"bypass": True} if algorithm == "ppo-bypass" else None,
            },
            "actor": trainer,
            "critic": trainer if ppo else None,
            "train": {"iterations": iterations},
        },
        "benchmark",
    )


def workspace(root: Path) -> None:
    shape = {"hidden": 256, "layers": 4, "intermediate": 688, "heads": 8, "key_value_heads": 8, "vocabulary": 1024}
    tiny.model_folder(root / "model", **shape)
    rows = [
        {"data_source": "benchmark", "prompt": f"{number:03d} {'abcdefghijklmnopqrstuvwxyzab'[: PROMPT_TOKENS - 4]}"}
        for number in range(256)
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(algorithm: str, root: Path, iterations: int) -> dict[str, float]:
    ledger = Ledger()
    for method in ("rows", "update", "begin", "finish"):
        ledger.wrap(Worker, method, lambda worker, request, *_: request.call.stage)
    ledger.wrap(Worker, "generate", lambda *_: "generate")
    for method in ("begin_save", "finish_save"):
        ledger.wrap(Worker, method, lambda worker, role: "snapshot")
    ledger.wrap(RunStore, "write_shard", lambda *_: "commits: Parquet shards")
    ledger.wrap(RunStore, "read_shard", lambda *_: "commits: reading shards")
    ledger.wrap(RunStore, "write_manifest", lambda *_: "commits: manifests")
    ledger.wrap(RunStore, "close", lambda *_: "commits: close")
    ledger.wrap(RunLog, "append", lambda *_: "commits: log")
    for method in ("create", "put", "get", "delete", "list"):
        ledger.count(method)
    started: dict[str, float] = {}
    results: dict[str, float] = {}

    def on_event(event: Event) -> None:
        if not isinstance(event, IterationClosed):
            return
        server = sum(child.cpu_times().user + child.cpu_times().system for child in psutil.Process().children(True))
        now = {"cpu": time.process_time(), "wall": time.perf_counter(), "server": server}
        if event.iteration == 0:
            started.update(now)
            ledger.clear()
        elif event.iteration == iterations:
            results.update({name: (value - started[name]) / iterations for name, value in now.items()})
            results.update({f"part: {name}": value / iterations for name, value in ledger.cpu.items()})
            results.update({f"requests: {name}": value / iterations for name, value in ledger.requests.items()})
            results["bytes"] = ledger.bytes / iterations

    with listening(on_event):
        train(config(root, algorithm, iterations + 1))
    results["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return results


def show(console: Console, algorithm: str, results: dict[str, float]) -> None:
    tokens = PROMPTS * RESPONSE_TOKENS
    parts = {name.removeprefix("part: "): value for name, value in results.items() if name.startswith("part: ")}
    parts["workflow (Prefect, and the code that calls the stages)"] = results["cpu"] - sum(parts.values())
    fixed = sum(seconds for name, seconds in parts.items() if name.startswith(("commits", "workflow")))
    table = Table(title=f"{algorithm}: {tokens / results['cpu']:.0f} response tokens per CPU-second")
    for column in ("part", "CPU-s", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, seconds in parts.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / results['cpu']:.1%}")
    table.add_section()
    table.add_row("the driver's process", f"{results['cpu']:.3f}", "100%")
    table.add_row("workflow and commits (included above)", f"{fixed:.3f}", f"{fixed / results['cpu']:.1%}")
    table.add_row("the temporary Prefect server (separate process)", f"{results['server']:.3f}", "")
    table.add_row("wall-clock seconds", f"{results['wall']:.3f}", "")
    console.print(table)
    requests = {
        name.removeprefix("requests: "): value for name, value in results.items() if name.startswith("requests")
    }
    listed = ", ".join(f"{value:.1f} {name}" for name, value in requests.items())
    console.print(
        f"store requests per iteration: {sum(requests.values()):.1f} ({listed}); "
        f"{results['bytes'] / 1e6:.1f} MB written; peak memory {results['peak_mb']:.0f} MB; "
        f"including the server's CPU: {tokens / (results['cpu'] + results['server']):.0f} tokens per CPU-second",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--only", choices=ALGORITHMS, help="measure one algorithm, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, width=100)
    if arguments.only is None:  # a separate process for each, so that peak memory is that of one algorithm
        import subprocess
        import sys

        machine = platform.processor() or platform.machine()
        console.print(f"{machine}, torch {torch.__version__}, 1 thread", highlight=False)
        for algorithm in ALGORITHMS:
            command = [sys.executable, __file__, "--only", algorithm, "--iterations", str(arguments.iterations)]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd())])})
        return
    with tempfile.TemporaryDirectory() as folder:
        workspace(Path(folder))
        show(console, arguments.only, measure(arguments.only, Path(folder), arguments.iterations))


if __name__ == "__main__":
    main()
