"""`make gpu` is tried on the CPU, where its steps run with tiny sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import ROOT, Step, report, run, steps

LIMIT_S = 1800.0
"""No step may be too slow on a busy machine."""


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as on a machine without a GPU."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)


def test_the_script_runs_on_a_cpu(tmp_path: Path) -> None:
    """All of its own steps; the others are tests and benchmarks."""
    own = ("memory", "digest", "sync", "updates", "twice")
    ran = script("--device", "cpu", "--minutes", "60", "--output", str(tmp_path / "gpu.md"), "--only", *own)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    text = (tmp_path / "gpu.md").read_text()
    assert ran.stdout.strip() == text.strip()
    rows = [line.split(" | ") for line in text.splitlines() if line.endswith(" | ok |")]
    titles = [step.title for step in steps("cpu") if step.name in own]
    assert [row[0].removeprefix("| ") for row in rows] == titles
    assert all(f"**{title}**" in text for title in titles)
    assert "the digests are equal" in text
    assert "| 1.000 |" in text, "each byte is sent once"


def test_a_machine_without_a_gpu_is_told_so_in_one_line() -> None:
    told = script("--device", "cuda")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.count("\n") == 1
    assert "no GPU" in told.stderr


def test_what_goes_wrong_is_a_row() -> None:
    outcomes = [
        run(
            Step("fails", "fails", LIMIT_S, ("-c", "print('| so far |'); raise ValueError('no | such thing')")), LIMIT_S
        ),
        run(Step("hangs", "hangs", 1.0, ("-c", "import threading; threading.Event().wait()")), LIMIT_S),
        run(
            Step("lacks", "lacks", LIMIT_S, ("-c", "raise AssertionError"), needs=("json", "no_such_package")), LIMIT_S
        ),
        run(Step("late", "late", LIMIT_S, ("-c", "raise AssertionError")), 0.0),
    ]
    assert [result.is_good for result in outcomes] == [False, False, True, False]
    text = report("a machine", outcomes)
    assert "| failed: ValueError: no \\| such thing |" in text
    assert "| too slow: ended after" in text
    assert "| skipped: no_such_package is missing |" in text
    assert "| skipped: no time is left |" in text
    assert "**fails**\n\n| so far |\n" in text


def test_the_steps_of_a_gpu_fit_into_ten_minutes() -> None:
    assert sum(step.limit_s for step in steps("cuda")) <= 600
    for step in steps("cuda"):
        assert all(Path(part).exists() for part in step.command if part.startswith("/"))
