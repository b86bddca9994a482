"""`make gpu` is rehearsed whole on the simulated GPU, with tiny models and vLLM on the CPU; failures are reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from benchmarks.gpu import MINUTES, ROOT, Step, run, steps, summary
from ratchet.rlhf import child_processes
from tests.contract.test_simulated_gpu import compiles
from tests.extras import needs
from tests.simulated.device import library

T = TypeVar("T")
LIMIT_S = 1800.0
"""No step may be too slow on a busy machine."""
HANGS = "import threading; threading.Event().wait()"


def script(*arguments: str, on_simgpu: bool = True) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    if on_simgpu:
        library()
        environment["PYTHONPATH"] = f"{ROOT / 'tests/simulated/everywhere'}{os.pathsep}{ROOT / 'src'}{os.pathsep}{ROOT}"
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def rows(figures: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in figures.read_text().splitlines()]


@compiles
@needs("vllm")
def test_the_whole_hour(tmp_path: Path) -> None:
    process = script("--tiny", "--minutes", "600", "--output", str(tmp_path / "gpu.md"))
    printed, errors = process.communicate(timeout=2 * LIMIT_S)
    report = (tmp_path / "gpu.md").read_text()
    assert process.returncode == 0, errors[-2000:] + report[-6000:]
    expected = steps(True, tmp_path / "gpu.jsonl")
    assert [line.split(" | ")[0] for line in printed.splitlines()[2:]] == [f"| {step.name}" for step in expected]
    outcomes = {row["step"]: row["outcome"] for row in rows(tmp_path / "gpu.jsonl") if "outcome" in row}
    assert outcomes == {step.name: "ok" for step in expected}
    measured = {row["step"] for row in rows(tmp_path / "gpu.jsonl") if "step" in row and "outcome" not in row}
    assert measured == outcomes.keys() - {"tests", "kernels-1b"}, "pytest has no figures; the other's have no step"
    for said in ("simulated GPU, 80 GiB", "the digests are equal", "| 1.000 |", "driver 2 closed the iteration"):
        assert said in report


@compiles
@needs("vllm")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_step_that_is_killed_leaves_what_was_before_it(number: signal.Signals, tmp_path: Path) -> None:
    """And whoever stops the program stops all that it has started."""
    report, figures = tmp_path / "gpu.md", tmp_path / "gpu.jsonl"
    process = script("--tiny", "--output", str(report), "--only", "ledger", "train")
    whole = psutil.Process(process.pid)
    step = until(process, lambda: child_of(whole, f"{ROOT}/benchmarks/gpu_runs.py"))
    until(process, lambda: child_of(step, "ratchet.flows.commands.app"))
    below = whole.children(recursive=True)
    process.send_signal(number)
    process.wait(timeout=LIMIT_S)
    assert process.returncode == (1 if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 60
    while left := child_processes.remaining(below):
        assert time.monotonic() < deadline, child_processes.described(left)
    assert [row["step"] for row in rows(figures) if row.get("outcome") == "ok"] == ["ledger"]
    assert "`ledger`: ok" in report.read_text()


def child_of(parent: psutil.Process, argument: str) -> psutil.Process | None:
    for one in parent.children():
        with suppress(psutil.Error):  # it has just ended
            if argument in one.cmdline():
                return one
    return None


def until(process: subprocess.Popen[str], true: Callable[[], T | None]) -> T:
    while (found := true()) is None:
        assert process.poll() is None, process.communicate()
    return found


def test_a_machine_without_a_gpu_is_told_so_in_one_line() -> None:
    process = script(on_simgpu=False)
    printed, told = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, printed) == (2, "")
    assert told.count("\n") == 1
    assert "no GPU" in told


def test_what_goes_wrong_is_a_row(tmp_path: Path) -> None:
    def step(name: str, program: str, limit_s: float = LIMIT_S, needs: tuple[str, ...] = ()) -> Step:
        return Step(name, name, limit_s, ("-c", program), needs)

    report = tmp_path / "gpu.md"
    outcomes = [
        run(step("fails", "print('| so far |'); raise ValueError('no | such thing')"), LIMIT_S, report),
        run(step("hangs", HANGS, limit_s=1.0), LIMIT_S, report),
        run(step("lacks", "raise AssertionError", needs=("json", "no_such_package")), LIMIT_S, report),
        run(step("late", "raise AssertionError"), 0.0, report),
    ]
    assert [result.is_good for result in outcomes] == [False, False, True, False]
    text = summary(outcomes)
    assert "| failed: ValueError: no \\| such thing |" in text
    assert "| too slow: ended after" in text
    assert "| skipped: no_such_package is missing |" in text
    assert "| skipped: no time is left |" in text
    assert "## fails\n\n| so far |\n" in report.read_text()


DETACHED = f"""
import subprocess, sys
child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {HANGS!r}], start_new_session=True)"
subprocess.run([sys.executable, "-c", child], start_new_session=True)
{HANGS}
"""
"""Leaves a process in a group of its own whose parent has ended."""


def test_a_step_ends_with_what_it_has_started(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    run(Step("detached", "detached", 5.0, ("-c", DETACHED)), LIMIT_S, tmp_path / "gpu.md")
    here = [one for one in psutil.process_iter(["cmdline"]) if HANGS in (one.info["cmdline"] or ())]
    assert not here
    assert set(psutil.Process().children(recursive=True)) <= before


def test_the_steps_fit_into_an_hour() -> None:
    of_a_gpu = steps(False, Path("gpu.jsonl"))
    assert sum(step.limit_s for step in of_a_gpu) <= 60 * MINUTES
    for step in of_a_gpu:
        assert all(Path(part).exists() for part in step.command if part.startswith("/"))
