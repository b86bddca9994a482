"""Code reward: does the last Python block of the response pass the tests? Requires `reward.allow_code: true`.

The ground truth is JSON: ``{"inputs": [...], "outputs": [...]}`` (standard input and expected standard output of each
run), or ``{"asserts": "..."}`` (Python that runs after the program, in the same process, and must not raise; or a list
of statements). After a test that runs out of time, the remaining tests are not run and count as failed.

Each run is a separate process in bubblewrap: no network, no view of other processes, a read-only system, an empty
private folder that is removed afterwards, and limits on time, memory, processes, files and output. This protects the
machine's files, network and other processes, but not against kernel bugs. With the option `sandbox: limits` there are
only the limits and the folder: a program may then do everything that the user may, such as read files, use the network
and end other processes.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from rlhf.errors import UserError

MAX_OUTPUT = 1 << 20
MAX_PROGRAM = 1 << 16
PROCESSES = 32
"""Limit on the processes of the user. The system does not enforce it for root."""
START_S = 2.0
"""Extra time for Python and the sandbox to start."""

_BLOCK = re.compile(
    r"(?:^[ \t]*+(?:[-*>]|[0-9]+[.)])?[ \t]*+```[ \t]*+|(?<!\S)```(?=\w))([^\s`]*+)[^\n`]*+\n(.*?)```",
    re.DOTALL | re.MULTILINE,
)
"""A code block of any language, so that the end of one block is not taken for the start of the next. It starts at the
beginning of a line, or within a line if it names a language."""
_PYTHON = re.compile(r"py(thon)?[0-9.]*", re.IGNORECASE)


def check_sandbox(sandbox: str = "bubblewrap", **_: Any) -> None:
    """Check that programs can run in the chosen sandbox.

    Raises:
        UserError: the sandbox is unknown, or bubblewrap is not installed.
    """
    if sandbox not in ("bubblewrap", "limits"):
        raise UserError(f"reward.options: {{code: {{sandbox: {sandbox}}}}} is unknown: write bubblewrap or limits")
    if sandbox == "bubblewrap" and shutil.which("bwrap") is None:
        raise UserError(
            "reward.function code runs programs in bubblewrap, but there is no bwrap here: install bubblewrap, or, "
            "if programs may do everything that you may, set reward.options: {code: {sandbox: limits}}"
        )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    seconds: float = 5.0,
    memory_mb: int = 1024,
    sandbox: Literal["bubblewrap", "limits"] = "bubblewrap",
) -> dict[str, float]:
    """Run the last program of the response against the tests.

    Args:
        data_source: unused.
        solution_str: text of the response.
        ground_truth: the tests, as JSON text or parsed.
        extra_info: unused.
        seconds: time limit of each test, in seconds.
        memory_mb: memory limit of each test, in MiB.
        sandbox: `bubblewrap`, or `limits` for no isolation.

    Returns:
        `score`: 1.0 if every test passes, else 0.0; `passed`: share of tests that pass.

    Raises:
        UserError: the sandbox is unknown, or bubblewrap is not installed.
        ValueError: the ground truth has no usable tests.
    """
    check_sandbox(sandbox)
    truth = _tests(ground_truth)
    program = last_program(solution_str)
    if program is None or len(program) > MAX_PROGRAM:
        return {"score": 0.0, "passed": 0.0}
    if "asserts" in truth:
        program += f"\n{truth['asserts']}\n"
        word = secrets.token_hex(16)
        tests = [(f"{word}\n", word)]
    else:
        tests = list(zip(truth["inputs"], truth["outputs"], strict=True))
    passed = 0
    for stdin, expected in tests:
        started = time.monotonic()
        printed = run(program, stdin, "asserts" in truth, seconds=seconds, memory_mb=memory_mb, sandbox=sandbox)
        if printed is not None:
            lines = _lines(printed)
            passed += (lines[-1:] if "asserts" in truth else lines) == _lines(expected)
        elif time.monotonic() - started >= seconds:
            break
    return {"score": float(passed == len(tests)), "passed": passed / len(tests)}


def last_program(response: str) -> str | None:
    """The last block marked as Python, or else the last block without a language; None if there is neither."""
    blocks = _BLOCK.findall(response.replace("\r\n", "\n"))
    python = [text for language, text in blocks if _PYTHON.fullmatch(language)]
    candidates = python or [text for language, text in blocks if not language]
    return textwrap.dedent(candidates[-1]) if candidates else None  # blocks in lists are indented


def _tests(ground_truth: Any) -> dict[str, Any]:
    """The tests of a ground truth. Raises ValueError if there are none."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(truth, dict) and truth.get("fn_name"):
        raise ValueError(f"tests of a function (fn_name {truth['fn_name']}) have to be written as `asserts`")
    if isinstance(truth, dict):
        asserts, inputs, outputs = (truth.get(name) for name in ("asserts", "inputs", "outputs"))
        asserts = "\n".join(map(str, asserts)) if isinstance(asserts, list) else asserts
        if isinstance(asserts, str) and asserts.strip():
            return {"asserts": asserts}
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0:
            return {"inputs": [str(item) for item in inputs], "outputs": [str(item) for item in outputs]}
    raise ValueError(
        f"the ground truth {str(ground_truth)[:60]!r} has neither `inputs` with as many `outputs` nor `asserts`"
    )


def run(program: str, stdin: str, asserts: bool, *, seconds: float, memory_mb: int, sandbox: str) -> str | None:
    """Run a program.

    Args:
        program: Python source.
        stdin: text for its standard input.
        asserts: whether the program ends with assertions. The launcher then reads a random word from `stdin` and prints
            it at the end: a program that exits before its assertions cannot know the word.
        seconds: time limit, in seconds.
        memory_mb: memory limit, in MiB.
        sandbox: `bubblewrap` or `limits`.

    Returns:
        The standard output, or None if the program fails or exceeds a limit.
    """
    with tempfile.TemporaryDirectory(prefix="ratchet-code-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(program)
        (folder / "launch.py").write_text(_LAUNCH)
        home = "/program" if sandbox == "bubblewrap" else name
        command = [sys.executable, "-I", "-B", f"{home}/launch.py", str(math.ceil(seconds)), str(memory_mb << 20)]
        command += ["asserts"] if asserts else []
        if sandbox == "bubblewrap":
            command = [*_bubblewrap(folder), *command]
        with tempfile.TemporaryFile() as stdout:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home},
                start_new_session=True,
            )
            try:
                process.communicate(stdin.encode(), timeout=seconds + START_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the program and its children
                process.wait()
            stdout.seek(0)
            return stdout.read(MAX_OUTPUT).decode(errors="replace") if process.returncode == 0 else None


_LAUNCH = f"""
import ctypes, os, resource, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the parent that enforces the time limit may be killed
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
word = input() if sys.argv[3:] else None
os.chdir(os.path.dirname(__file__))
for kind, limit in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, memory),
    (resource.RLIMIT_FSIZE, {MAX_OUTPUT}),
    (resource.RLIMIT_NPROC, {PROCESSES}),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (limit, limit))
sys.argv = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
if word:
    print()
    print(word)
"""


def _bubblewrap(folder: Path) -> list[str]:
    """The bubblewrap command: the parts of the system that Python needs, read-only, and nothing else."""
    needed = [
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        "/etc/alternatives",
        sys.prefix,
        sys.base_prefix,
    ]
    mounts = [part for path in dict.fromkeys(needed) for part in ("--ro-bind-try", path, path)]
    return [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        *("--cap-drop", "ALL"),
        *("--tmpfs", "/tmp"),  # first, because the mounts below may be in it
        *mounts,
        *("--proc", "/proc"),
        *("--dev", "/dev"),
        *("--bind", str(folder), "/program"),
        *("--chdir", "/program"),
        "--",
    ]


def _lines(text: str) -> Sequence[str]:
    """The lines of a text, without spaces at the ends of lines and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
