"""Steps of `make gpu` that are whole runs, as a user starts them: `python benchmarks/gpu_runs.py STEP --json FILE`.

`start` is a short one. `train` is GRPO with a reference and vLLM on the trainer's GPU, where the models take turns; its
driver is killed (SIGKILL) while the third iteration generates, and the same command resumes it. `curve` is the demo,
examples/sentences, with vLLM. Each prints what it sees as soon as it sees it: a row for each iteration or validation.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import psutil
import yaml

from benchmarks import parts
from benchmarks.gpu_steps import GIB, Notes, main, say
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf import child_processes
from ratchet.rlhf.config import RunConfig, load_config, parse_config
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.metrics import timer

ROOT = Path(__file__).parents[1]
SENTENCES = ROOT / "examples/sentences"
KILLED_IN = 2
"""The iteration in which the driver is killed."""
STAGES = ("generate", "old_log_probs", "ref_log_probs", "update_actor")
SOLVED_ON_A_CPU = {0: 0.112, 10: 0.812, 20: 0.896, 30: 0.938}
"""Share of held-out prompts that the demo solves by iteration (docs/benchmarks.md), in float32, without vLLM."""


def grpo_config(root: Path, tiny: bool) -> RunConfig:
    """Returns the config of a run of 1 B parameters, or 5 M."""
    prompts, n, response = (8, 4, 48) if tiny else (32, 8, 512)
    return parse_config(
        {
            "run": {"name": "train", "store": f"file://{root}/runs"},
            "model": {"path": str(root / "model"), "dtype": "bfloat16"},
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
            "train": {"iterations": 4 if tiny else 6},
        },
        "benchmark",
    )


@dataclass
class Memory:
    """Samples the memory in use while a run works, of the GPU or else of the run's processes, and keeps the largest
    amount.
    """

    process: psutil.Process
    peak: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        in_use = _gpu_bytes if shutil.which("nvidia-smi") else self._resident
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
    """A process that trains."""

    def __init__(self, root: Path, config: RunConfig) -> None:
        path = root / "run.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self.url = f"{config.run.store}/{config.run.name}"
        self.log = root / "log"
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ratchet.flows.commands.app", "train", str(path)],
                cwd=ROOT,
                env=os.environ | {"PREFECT_HOME": str(root / "prefect")},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.memory = Memory(psutil.Process(self.process.pid))
        self.began = time.monotonic()

    def watch(self, seen: Callable[[Run], bool]) -> None:
        """Shows the run to a function several times a second until it returns True, and once the process has ended."""
        is_done = False
        while not is_done:
            is_done, run = self.process.poll() is not None, None
            with suppress(UserError):  # there is no run yet
                run = open_run(self.url)
            is_done = (run is not None and seen(run)) or is_done
            time.sleep(0 if is_done else 0.2)

    def kill(self) -> list[psutil.Process]:
        """Kills the process alone; returns the processes that it leaves behind."""
        left = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return left

    def close(self) -> None:
        """Ends the process and those that it has started."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()
        self.memory.close()

    def check(self, iterations: int) -> None:
        """Raises AssertionError if the process has not trained as long as it should."""
        words = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        code = self.process.poll()
        assert code == 0, f"it ended with exit code {code}:\n{words}"
        done = open_run(self.url).state.iteration
        assert done == iterations, f"{done} of {iterations} iterations:\n{words}"


def _is_vllm(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "ratchet.rlhf.rollout.vllm_process" in process.cmdline()
    return False


def step_start(tiny: bool, note: Notes) -> None:
    """Trains a tiny model for two iterations, with the policy itself generating: no vLLM."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        config = grpo_config(root, tiny=True).with_values({"rollout.engine": {"type": "hf"}, "train.iterations": 2})
        parts.model_folder(root / "model", "5M")
        parts.prompt_file(root / "prompts.jsonl", parts.prompt_ids(64, 32))
        with closing(Training(root, config)) as training:
            training.watch(lambda run: False)
            seconds = time.monotonic() - training.began
            training.check(iterations=2)
        say(f"Two iterations of GRPO, bfloat16, with the start of Prefect: {seconds:.0f} s.")
        note(seconds=seconds)


class Rows:
    """Prints a row for each iteration that is closed."""

    def __init__(self, note: Notes) -> None:
        self.note, self.count, self.before = note, 0, time.monotonic()
        parts = ["seconds", *STAGES, "weight sync", "snapshot", "everything else"]
        cells = ["iteration", *parts, "tokens", "MB to vLLM", "MFU of the update", "gap of log-probs"]
        say(f"| {' | '.join(cells)} |", "|---" * len(cells) + "|")

    def __call__(self, run: Run) -> None:
        for values in run.metric_rows()[self.count :]:
            wall = time.monotonic() - self.before
            stages = [values.get(timer(name), 0.0) for name in STAGES]
            stages += [values.get("timing_s/update_weights", 0.0), values.get("timing_s/save_checkpoint", 0.0)]
            moved, mfu = values.get("perf/weight_sync_bytes", 0.0), values.get("perf/mfu/actor")
            difference = gap(run, self.count)
            cells = [f"{seconds:.2f}" for seconds in (wall, *stages, wall - sum(stages))]
            cells += [f"{values['perf/generated_tokens']:,.0f}", f"{moved / 1e6:,.1f}"]
            cells += ["unknown" if mfu is None else f"{mfu:.1%}", f"{difference:.1e}"]
            say(f"| {self.count} | {' | '.join(cells)} |")
            self.note(iteration=self.count, wall=wall, gap=difference, metrics=values)
            self.count, self.before = self.count + 1, time.monotonic()


def gap(run: Run, iteration: int) -> float:
    """Returns the mean difference between the log-probs of vLLM and of the trainer, in nats."""
    frame = run.trajectories([iteration], columns=["rollout_log_probs", "old_log_probs"])
    rows = zip(frame["rollout_log_probs"], frame["old_log_probs"], strict=True)
    return float(np.mean(np.concatenate([np.abs(np.subtract(*row)) for row in rows])))


def step_train(tiny: bool, note: Notes) -> None:
    """Trains, kills the driver, and resumes."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        config = grpo_config(root, tiny)
        iterations = config.train.iterations
        size = "5M" if tiny else "1B"
        parts.model_folder(root / "model", size)
        parts.prompt_file(root / "prompts.jsonl", parts.prompt_ids(512, 32))
        say(
            f"GRPO with a reference, Llama of {size}, bfloat16, {config.data.prompts_per_iteration} prompts x "
            f"{config.rollout.n}, at most {config.rollout.max_response_tokens} tokens; vLLM beside the trainer. Its "
            f"start counts in iteration 0; the driver's end and start in iteration {KILLED_IN}.\n"
        )
        rows, closed_at = Rows(note), dict[int, float]()

        def is_in_the_middle(run: Run) -> bool:
            rows(run)
            return run.state.iteration == KILLED_IN and bool(run.state.shards)

        def never(run: Run) -> bool:
            rows(run)
            closed_at.setdefault(run.state.iteration, time.monotonic())
            return False

        with closing(Training(root, config)) as first:
            first.watch(is_in_the_middle)
            words = first.log.read_text(errors="replace")[-2000:]
            assert first.process.poll() is None, f"it ended before iteration {KILLED_IN}:\n{words}"
            vllm = [process for process in first.kill() if _is_vllm(process)]
        killed_at = time.monotonic()
        while (alive := child_processes.remaining(vllm)) and time.monotonic() < killed_at + 60:
            time.sleep(0.1)
        with closing(Training(root, config)) as second:
            second.watch(never)
            second.check(iterations)
        term, seconds = open_run(second.url).state.term, closed_at[KILLED_IN + 1] - killed_at
        peak = max(first.memory.peak, second.memory.peak)
        whose = "the GPU" if shutil.which("nvidia-smi") else "all processes together"
        say(
            "",
            f"Killed in iteration {KILLED_IN}, after a shard was committed; driver {term} closed the iteration "
            f"{seconds:.0f} s later. Peak memory of {whose}: {peak / GIB:.2f} GiB.",
        )
        note(resumed_s=seconds, peak_bytes=peak)
        assert term == 2, f"driver {term} ended the run"
        assert not alive, f"{len(alive)} vLLM processes outlived the first driver"


def smollm2() -> Path:
    """Returns the folder of SmolLM2-135M, which it makes if it is missing. Raises UserError if it cannot."""
    from ratchet.rlhf.models.smollm2 import is_made, make

    folder = ROOT / "models/smollm2"
    folder.parent.mkdir(exist_ok=True)
    if not is_made(folder):
        make(folder, lambda line: print(line, file=sys.stderr))
    return folder


def step_curve(tiny: bool, note: Notes) -> None:
    """Trains the demo with vLLM, and shows its learning curve beside the CPU's."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        if tiny:
            from tests import tiny as models

            model = models.model_folder(root / "model", hidden=64, heads=2, key_value_heads=1)
        else:
            model = smollm2()
        subprocess.run(
            [sys.executable, str(SENTENCES / "sentences.py"), str(root)], check=True, stdout=subprocess.DEVNULL
        )
        changes: dict[str, Any] = {
            "run.store": f"file://{root}/runs",
            "model.path": str(model),
            "model.dtype": "bfloat16",
            "data.train": [str(root / "train.parquet")],
            "validation.data": str(root / "test.parquet"),
            "reward.function": str(SENTENCES / "sentences.py"),
            "rollout.engine": {"type": "vllm", "gpu_memory_utilization": 0.5},
            "algorithm.rollout_correction": None,
        }
        if tiny:
            changes |= {
                "train.iterations": 2,
                "validation.every": 1,
                "validation.n": 1,
                "rollout.max_response_tokens": 8,
            }
        config = load_config(SENTENCES / "grpo.yaml").with_values(changes)
        is_solved = runpy.run_path(str(SENTENCES / "sentences.py"))["is_solved"]
        say(
            "Share of held-out prompts solved; the CPU's is float32, without vLLM.\n",
            "| iterations | here | on a CPU |",
        )
        say("|---|---|---|")
        solved: dict[int, float] = {}

        def show(run: Run) -> bool:
            for iteration in sorted(set(range(run.state.iteration + 1)) - set(solved)):
                answers = run.validation(iteration)
                if answers.empty:
                    continue
                pairs = zip(answers["response"], answers["ground_truth"], strict=True)
                share = float(np.mean([is_solved(response, word) for response, word in pairs]))
                solved[iteration], there = share, SOLVED_ON_A_CPU.get(iteration)
                say(f"| {iteration} | {share:.1%} | {'' if there is None else f'{there:.1%}'} |")
                note(iteration=iteration, solved=share, on_a_cpu=there)
            return False

        with closing(Training(root, config)) as training:
            training.watch(show)
            training.check(config.train.iterations)
            seconds = time.monotonic() - training.began
        say("", f"{config.train.iterations} iterations in {seconds:.0f} s, with validations and the start.")
        note(seconds=seconds)
        last = solved[config.train.iterations]
        assert tiny or last > 0.75, f"{last:.1%} are solved at the end: it has not learned what it does on a CPU"


if __name__ == "__main__":
    main({"start": step_start, "train": step_train, "curve": step_curve}, __doc__)
