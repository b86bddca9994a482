"""Trains a whole small run as a user starts it, killed and resumed: `make gpu-train`.

    python benchmarks/gpu_train.py [--iterations 6] [--output gpu-train.md]

GRPO with a reference; vLLM generates on the GPU of the trainer, and the models take turns there (`offload_when_idle`).
The driver is killed (SIGKILL) while the third iteration generates, and the same command resumes the run. The report has
the seconds of each iteration by part, the weights that were sent to vLLM, and the memory. Without a GPU the same run
uses a tiny model, float32, and vLLM on the CPU. Exit code 1: the run did not end as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import psutil
import yaml

from benchmarks import parts
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.config import RunConfig, parse_config
from ratchet.rlhf.metrics import timer

ROOT = Path(__file__).parents[1]
KILLED_IN = 2
"""The iteration in which the driver is killed."""
STAGES = ("generate", "old_log_probs", "ref_log_probs", "update_actor")
WAIT_S = 1800.0
"""A run that makes no progress for so long has failed."""


def config_of(root: Path, iterations: int) -> RunConfig:
    """Returns the config: 1 B parameters on a GPU, 5 M without one."""
    on_gpu = parts.on_gpu()
    prompts, n, response = (32, 8, 512) if on_gpu else (8, 4, 48)
    return parse_config(
        {
            "run": {"name": "gpu-train", "store": f"file://{root}/runs"},
            "model": {"path": str(root / "model"), "dtype": "bfloat16" if on_gpu else "float32"},
            "data": {
                "train": [str(root / "prompts.jsonl")],
                "prompts_per_iteration": prompts,
                "max_prompt_tokens": 64,
            },
            "rollout": {
                "engine": {"type": "vllm", "gpu_memory_utilization": 0.7},
                "n": n,
                "max_response_tokens": response,
                "prompts_per_shard": prompts // 4,
            },
            "reward": {"function": "length"},
            "algorithm": {"advantage": {"type": "grpo"}, "kl": {"in_loss": 0.001}},
            "critic": None,
            "actor": {"offload_when_idle": True, "mini_batch_trajectories": prompts * n // 4, "lr": 1e-5},
            "checkpoint": {"every": 2},
            "train": {"iterations": iterations},
        },
        "benchmark",
    )


@dataclass
class Memory:
    """Samples the memory in use while a run works, of the GPU or of the run's processes, and keeps the largest
    amount.
    """

    process: psutil.Process
    peak: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def close(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.peak

    def _sample(self) -> None:
        in_use = _gpu_bytes if parts.on_gpu() else self._resident
        while not self._ended.wait(0.5):
            with suppress(psutil.Error, OSError, ValueError):
                self.peak = max(self.peak, in_use())

    def _resident(self) -> int:
        processes = [self.process, *self.process.children(recursive=True)]
        return sum(process.memory_info().rss for process in processes)


def _gpu_bytes() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return 2**20 * int(subprocess.check_output(query, text=True).split()[0])


class Training:
    """A process that trains, and the times at which it closed iterations."""

    def __init__(self, root: Path, config: RunConfig, name: str) -> None:
        path = root / "run.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self.url = f"{config.run.store}/{config.run.name}"
        self.log = root / f"{name}.log"
        self.turns = root / f"{name}.turns"
        path_list = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path_list, "PREFECT_HOME": str(root / "prefect")}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--drive", str(path), str(self.turns)],
                cwd=root,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.memory = Memory(psutil.Process(self.process.pid))
        self.began = time.monotonic()
        self.closed: dict[int, float] = {}
        """Time at which each iteration was seen to be closed."""

    def until(self, true: Callable[[Run], bool]) -> bool:
        """Watches the run until a condition holds, or the process ends; returns True if the condition holds."""
        last, seen = time.monotonic(), -1
        while time.monotonic() - last < WAIT_S:
            with suppress(Exception):  # there is no run yet, or a record is being written
                run = open_run(self.url)
                if run.state.iteration > seen:
                    last, seen = time.monotonic(), run.state.iteration
                    self.closed.setdefault(seen, last)
                if true(run):
                    return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.2)
        return False

    def kill(self) -> list[psutil.Process]:
        """Kills the process alone; returns the processes that it leaves behind."""
        left = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return left

    def end(self) -> None:
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()

    @property
    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def _is_vllm(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "ratchet.rlhf.rollout.vllm_process" in process.cmdline()
    return False


def about(config: RunConfig) -> str:
    model, rollout = parts.SIZES["1B" if parts.on_gpu() else "5M"], config.rollout
    return (
        f"GRPO of a Llama with {model['num_hidden_layers']} layers of {model['hidden_size']}, {config.model.dtype}, "
        f"{config.data.prompts_per_iteration} prompts x {rollout.n}, at most {rollout.max_response_tokens} tokens; "
        f"vLLM on the {'GPU' if parts.on_gpu() else 'CPU'}"
    )


def gap(run: Run, iteration: int) -> float:
    """Returns the mean difference between the log-probs of vLLM and of the trainer, in nats."""
    frame = run.trajectories([iteration], columns=["rollout_log_probs", "old_log_probs"])
    rows = zip(frame["rollout_log_probs"], frame["old_log_probs"], strict=True)
    return float(np.mean(np.concatenate([np.abs(np.subtract(*row)) for row in rows])))


def table(run: Run, spans: dict[int, tuple[float, float]]) -> str:
    """Renders a row per iteration, in Markdown; see `spans_of` for `spans`."""
    metrics = run.metrics()
    names = [name for name in STAGES if timer(name) in metrics]
    head = [*names, "weight sync", "snapshot", "everything else"]
    lines = [
        "| iteration | seconds | " + " | ".join(head) + " | of all this: turns | MB to vLLM | gap of log-probs |",
        "|---" * (len(head) + 5) + "|",
    ]
    for row in metrics.to_dict("records"):
        iteration = int(row["iteration"])
        seconds = [row.get(timer(name), 0.0) for name in names]
        seconds += [row.get("timing_s/update_weights", 0.0), row.get("timing_s/save_checkpoint", 0.0)]
        seconds = [0.0 if np.isnan(value) else float(value) for value in seconds]
        wall, turns = spans.get(iteration, (float("nan"), float("nan")))
        moved = row.get("perf/weight_sync_bytes", 0.0)
        lines.append(
            f"| {iteration} | {wall:.1f} | "
            + " | ".join(f"{value:.2f}" for value in [*seconds, wall - sum(seconds)])
            + f" | {turns:.2f} | {0.0 if np.isnan(moved) else moved / 1e6:,.1f} | {gap(run, iteration):.1e} |"
        )
    return "\n".join(lines)


def spans_of(*trainings: Training) -> dict[int, tuple[float, float]]:
    """Returns by iteration the seconds from the close before, or the process's start, to its close, and those of
    turns.
    """
    spans: dict[int, tuple[float, float]] = {}
    for training in trainings:
        lines = training.turns.read_text().splitlines() if training.turns.exists() else []
        turns = [json.loads(line) for line in lines if line.endswith("]")]
        before = training.began
        for number, closed in sorted(training.closed.items()):
            if number and number - 1 not in spans:
                taken = sum(seconds for ended, seconds in turns if before < ended <= closed)
                spans[number - 1] = closed - before, taken
            before = closed
    return spans


def drive(path: str, turns: str) -> None:
    """Runs `ratchet train`, and writes when each turn ended and its seconds, a line each."""
    from ratchet.rlhf.rollout.vllm_engine import VLLMRollout
    from ratchet.rlhf.train.torch_engine import TorchEngine

    file = Path(turns).open("a", buffering=1)  # noqa: SIM115  (until the process ends)
    for engine in (TorchEngine, VLLMRollout):
        original = engine.place

        def place(self: Any, *, original: Any = original, **where: bool) -> None:
            began = time.monotonic()
            original(self, **where)
            ended = time.monotonic()
            file.write(json.dumps([ended, ended - began]) + "\n")

        engine.place = place  # type: ignore[method-assign]
    from ratchet.flows.commands.app import main as ratchet

    sys.argv = ["ratchet", "train", path]
    ratchet()


def measure(root: Path, iterations: int) -> tuple[str, bool]:
    """Trains, kills, resumes; returns the report, and True if the run ended as it should."""
    config = config_of(root, iterations)
    parts.model_folder(root / "model", "1B" if parts.on_gpu() else "5M")
    parts.prompt_file(root / "prompts.jsonl", parts.prompt_ids(512, 32))
    first = Training(root, config, "first")
    trainings = [first]
    try:
        if not first.until(lambda run: run.state.iteration == KILLED_IN and bool(run.state.shards)):
            return f"The run did not reach iteration {KILLED_IN}:\n\n```\n{first.last_words}\n```", False
        peak = first.memory.close()
        left = first.kill()
        _, alive = psutil.wait_procs([process for process in left if _is_vllm(process)], timeout=60)
        second = Training(root, config, "second")
        trainings.append(second)
        second.until(lambda run: False)
        peak = max(peak, second.memory.close())
        run = open_run(second.url)
        state = run.state
        code = second.process.poll()
        is_good = code == 0 and state.iteration == iterations and state.term == 2 and not alive
        lines = [
            f"{about(config)}. The driver was killed in iteration {KILLED_IN}, after a shard was committed; "
            "seconds that contain a start of the driver or of vLLM say nothing about the work.",
            "",
            table(run, spans_of(first, second)),
            "",
            f"Peak memory of {'the GPU' if parts.on_gpu() else 'all processes together'}: {peak / 2**30:.2f} GiB. "
            + ("The run ended as it should" if is_good else "THE RUN DID NOT END AS IT SHOULD")
            + f": {state.iteration} of {iterations} iterations, driver {state.term}, exit code {code}; "
            f"{len(alive)} vLLM processes outlived the first driver.",
        ]
        return "\n".join(lines if is_good else [*lines, "", "```", second.last_words, "```"]), is_good
    finally:
        for training in trainings:
            training.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("gpu-train.md"), help="file of the report")
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive is not None:
        drive(*options.drive)
        return
    with tempfile.TemporaryDirectory() as folder:
        text, is_good = measure(Path(folder), options.iterations)
    options.output.write_text(text + "\n")
    print(text)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
