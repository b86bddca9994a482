"""Answers in an hour what one GPU shows: `make gpu`.

    python benchmarks/gpu.py                       # writes gpu.md and gpu.jsonl
    python benchmarks/gpu.py --only sync train     # some of its steps
    python benchmarks/gpu.py --minutes 15          # the first ones

In this order: does it run; are the trainer's log-probs those of vLLM; tokens/s and the share of peak FLOPs; memory
beside the formula; seconds of a weight sync; kill and resume; the demo's learning curve beside the CPU's; the rest.

Each step is a process with a time limit of its own, at which it ends with all that it has started. What it prints is
appended to gpu.md at once, and each of its figures to gpu.jsonl: a machine that is lost takes only the rest with it. A
step that fails, is too slow or lacks a package says so, and the others still run. Exit code: 0 if no step failed, 1 if
one did, 2 if nothing could be run (no GPU, or a package that every step needs is missing), so that a script never takes
that for a measurement. `--tiny` has sizes that a simulated GPU computes (tests/simulated).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIRED = ("torch", "transformers", "numpy", "pyarrow", "pydantic", "safetensors", "jaxtyping", "psutil")
"""Modules that every step needs."""
MINUTES = 60.0
GIB = 2**30
BECOME_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux's prctl."""


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
    is_good: bool


def steps(tiny: bool, figures: Path) -> tuple[Step, ...]:
    """Returns the steps in order; their limits add up to `MINUTES` at most.

    Args:
        tiny: sizes for a simulated GPU, which has no limits of time.
        figures: the file to which steps append figures.
    """
    written = ("--json", str(figures), *(["--tiny"] if tiny else []))

    def own(name: str, title: str, limit_s: float, *needs: str, script: str = "gpu_steps") -> Step:
        return Step(name, title, limit_s, (f"{ROOT}/benchmarks/{script}.py", name, *written), needs)

    def whole(name: str, title: str, limit_s: float, *needs: str) -> Step:
        return own(name, title, limit_s, "prefect", "tenacity", *needs, script="gpu_runs")

    def updates(name: str, limit_s: float, options: str) -> Step:
        if tiny:
            options = "--size tiny --kernels torch --checkpointing selective --packing on --steps 1"
        command = (f"{ROOT}/benchmarks/engines.py", *options.split(), "--json", str(figures))
        return Step(name, f"updates: {options}", limit_s, command)

    tests = f"-m pytest {ROOT}/tests/gpu --rootdir={ROOT} --confcutdir={ROOT}/tests/gpu -q -rs -p no:cacheprovider"
    kernels = "torch,compile,liger" if find_spec("liger_kernel") else "torch,compile"
    every = f"--kernels {kernels} --checkpointing selective --packing on --steps 3"
    measured = (
        updates("kernels-1b", 120, f"--size 1b {every}"),
        updates("kernels-4b", 150, f"--size 4b {every}"),
        updates("plain-1b", 60, "--size 1b --kernels torch --checkpointing none --packing off,on --steps 3"),
        updates("full-4b", 60, "--size 4b --kernels torch --checkpointing full --packing on --steps 3"),
    )
    in_order = (
        Step("tests", "tests/gpu", 420, tuple(tests.split()), needs=("pytest",), is_markdown=False),
        whole("start", "a short run", 180),
        own("log-probs", "log-probs of vLLM and of the trainer", 240, "vllm"),
        own("speed", "tokens per second", 300, "vllm"),
        own("ledger", "memory beside the formula", 120),
        own("memory", "memory for another process", 60),
        own("sync", "weight sync", 180),
        whole("train", "a run that is killed and resumed", 600, "vllm"),
        whole("curve", "the demo's learning curve", 900, "vllm"),
        *(measured[:1] if tiny else measured),
        own("digest", "digest by parts", 60),
        own("twice", "one update, twice", 90),
    )
    return tuple(replace(step, limit_s=1800.0) for step in in_order) if tiny else in_order


def run(step: Step, left_s: float, report: Path) -> Result:
    """Runs a step, whose output goes to the end of the report, and ends all processes that it has started.

    Args:
        step: The step.
        left_s: Seconds that are left for all steps.
        report: A file, in Markdown.
    """
    missing = [name for name in step.needs if find_spec(name) is None]
    if missing or left_s <= 0:
        reason = f"{', '.join(missing)} is missing" if missing else "no time is left"
        result = Result(step, f"skipped: {reason}", 0.0, is_good=bool(missing))
        _append(report, f"\n## {step.title}\n\nskipped: {reason}.\n")
        return result
    fence = "" if step.is_markdown else "```\n"
    _append(report, f"\n## {step.title}\n\n{fence}")
    with report.open("a") as output, tempfile.TemporaryFile("w+") as errors:
        started, code = time.monotonic(), _exit_code(step, min(step.limit_s, left_s), output, errors)
        seconds = time.monotonic() - started
        errors.seek(0)
        complaints = [line.rstrip() for line in errors if line.strip()][-15:]
    outcome, last = "ok", complaints[-1][:200] if complaints else f"exit code {code}"
    if code != 0:
        outcome = f"failed: {last}" if code is not None else f"too slow: ended after {seconds:.0f} s"
    said = "\n".join(["\n```", *complaints, "```\n"]) if code != 0 and complaints else ""
    _append(report, f"{fence}\n`{step.name}`: {outcome} ({seconds:.0f} s).\n{said}")
    return Result(step, outcome, seconds, is_good=code == 0)


def _exit_code(step: Step, limit_s: float, output: object, errors: object) -> int | None:
    """Runs a step; returns its exit code, or None if it reached the limit."""
    import psutil

    # what a step has started is found below this process, also after whatever started it has died
    ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1, 0, 0, 0)
    before = psutil.Process().children(recursive=True)
    process = subprocess.Popen(
        [sys.executable, *step.command],
        cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
        stdout=output, stderr=errors, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for _ in range(6):  # what is started meanwhile is found by the next look
            left = [one for one in psutil.Process().children(recursive=True) if one not in before]
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(left, timeout=10)
        process.wait()


def environment() -> dict[str, str]:
    """Returns the environment of a step."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT)]))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def _append(report: Path, text: str) -> None:
    with report.open("a") as file:
        file.write(text)


def machine() -> str:
    import torch

    from ratchet.rlhf.distributed import accelerator

    names = ("torch", "transformers", "triton", "liger-kernel", "flash-attn", "deepspeed", "megatron-core", "vllm")
    packages = [f"{name} {number}" if (number := _version(name)) else f"no {name}" for name in names]
    cuda = f"CUDA {torch.version.cuda}, " if accelerator.has_cuda() else ""
    return (
        f"{accelerator.name()}, {accelerator.free_and_total()[1] / GIB:.0f} GiB, {cuda}{os.cpu_count()} CPUs, "
        f"Python {platform.python_version()}, {', '.join(packages)}"
    )


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def summary(results: Sequence[Result]) -> str:
    lines = ["| step | seconds | outcome |", "|---|---|---|"]
    for result in results:
        outcome = result.outcome.replace("|", "\\|")
        lines.append(f"| {result.step.name} | {result.seconds:.0f} | {outcome} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("gpu.md"), help="the report; figures are in NAME.jsonl beside"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit of all steps")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run these steps only, by name")
    parser.add_argument("--tiny", action="store_true", help="sizes for a simulated GPU")
    options = parser.parse_args()
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        print(f"make gpu needs {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        sys.exit(2)
    report = options.output.resolve()
    figures = report.with_suffix(".jsonl")
    chosen = steps(options.tiny, figures)
    names = [step.name for step in chosen]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"there is no step {unknown[0]}; steps are {', '.join(names)}")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    from ratchet.rlhf.distributed import accelerator

    if not accelerator.is_available():
        print("make gpu: PyTorch finds no GPU on this machine, so nothing was measured", file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # a step ends, too
    # this process takes no memory of the GPU
    program = "from benchmarks.gpu import machine; print(machine())"
    about = subprocess.check_output([sys.executable, "-c", program], env=environment(), text=True).strip()
    deadline = time.monotonic() + 60 * options.minutes
    now, results = f"{datetime.now(UTC):%Y-%m-%d %H:%M}", list[Result]()
    _append(report, f"\n# {now} UTC\n\n{about}.\n")
    _append(figures, json.dumps({"machine": about, "at": now}) + "\n")
    for step in chosen:
        if options.only and step.name not in options.only:
            continue
        print(f"{step.title} ...", file=sys.stderr, flush=True)
        results.append(run(step, deadline - time.monotonic(), report))
        outcome = {"step": step.name, "outcome": results[-1].outcome, "seconds": results[-1].seconds}
        _append(figures, json.dumps(outcome) + "\n")
        print(f"{step.title}: {results[-1].outcome} ({results[-1].seconds:.0f} s)", file=sys.stderr, flush=True)
    text = summary(results)
    _append(report, f"\n## All steps\n\n{text}\n")
    print(text)
    sys.exit(0 if all(result.is_good for result in results) else 1)


if __name__ == "__main__":
    main()
