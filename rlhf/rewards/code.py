"""Programs: 1 if the last Python block of the response passes the tests. Only with `reward.allow_code: true`.

The ground truth is JSON: ``{"inputs": [...], "outputs": [...]}`` (standard input and expected standard output of each
run), or ``{"asserts": "..."}`` (Python that runs after the program, in its process, and must not raise; in a list, each
item is a statement). Tests that follow one that ran out of time are skipped, and count as failed.

Each run is a process of its own in bubblewrap: no network, no view of other processes, the system read-only, an empty
private folder that is removed, and limits on time, memory, processes, files and output. That protects the machine's
files, network and other processes from a program; it does not protect against a hole in the kernel. With the option
`sandbox: limits` there are only the limits and the folder: a program may then do what the user may, such as read files,
reach the network and end other processes.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ratchet.rlhf import child_processes
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rewards.functions import continued

MAX_OUTPUT = 1 << 20
MAX_PROGRAM = 1 << 16
PROCESSES = 32
"""Limit for the user; the system enforces none for root."""
START_S = 2.0
"""Seconds for Python and the sandbox to start."""

_BLOCK = re.compile(
    r"(?:^[ \t]*+(?:[-*>]|[0-9]+[.)])?[ \t]*+```[ \t]*+|(?<!\S)```(?=\w))([^\s`]*+)[^\n`]*+\n(.*?)```",
    re.DOTALL | re.MULTILINE,
)
"""Blocks of any language, so that the end of one is never taken for the beginning of another. They begin at the start
of a line, or within a line if they name a language."""
_PYTHON = re.compile(r"py(thon)?[0-9.]*", re.IGNORECASE)


def check_sandbox(sandbox: str = "bubblewrap", **_: Any) -> None:
    """Raises UserError if programs cannot be run as asked."""
    if sandbox not in ("bubblewrap", "limits"):
        raise UserError(f"reward.options: {{code: {{sandbox: {sandbox}}}}} is none: write bubblewrap or limits")
    if sandbox == "bubblewrap" and shutil.which("bwrap") is None:
        raise UserError(
            "reward.function code runs programs in bubblewrap, and there is no bwrap here: install bubblewrap, or, "
            "where programs may do what you may, set reward.options: {code: {sandbox: limits}}"
        )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    seconds: float = 5.0,
    memory_mb: int = 1024,
    sandbox: Literal["bubblewrap", "limits"] = "bubblewrap",
    prompt_tail: str = "",
) -> dict[str, float]:
    """Returns 1.0 if every test passes, else 0.0; the part `passed` is the share of tests that pass."""
    check_sandbox(sandbox)
    truth = check_truth(ground_truth)
    program = last_program(continued(solution_str, prompt_tail, "```python", "```py", "```"))
    if program is None or len(program) > MAX_PROGRAM:
        return {"score": 0.0, "passed": 0.0}
    if "asserts" in truth:
        program += f"\n{truth['asserts']}\n"
        # printed after the assertions: a program that exits before them cannot know it
        word = secrets.token_hex(16)
        tests = [(f"{word}\n", word)]
    else:
        tests = list(zip(truth["inputs"], truth["outputs"], strict=True))
    passed = 0
    for given, expected in tests:
        began = time.monotonic()
        printed = run(program, given, "asserts" in truth, seconds=seconds, memory_mb=memory_mb, sandbox=sandbox)
        if printed is not None:
            lines = _lines(printed)
            # a program may print before its assertions
            passed += (lines[-1:] if "asserts" in truth else lines) == _lines(expected)
        elif time.monotonic() - began >= seconds:
            break
    return {"score": float(passed == len(tests)), "passed": passed / len(tests)}


def last_program(response: str) -> str | None:
    """Returns the last Python block; without one, the last block that names no language."""
    blocks = _BLOCK.findall(response.replace("\r\n", "\n"))
    python = [text for language, text in blocks if _PYTHON.fullmatch(language)]
    found = python or [text for language, text in blocks if not language]
    return textwrap.dedent(found[-1]) if found else None  # blocks within a list are indented


def check_truth(ground_truth: Any) -> dict[str, Any]:
    """Returns the tests of a ground truth; raises ValueError if there are none."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(truth, dict) and truth.get("fn_name"):
        raise ValueError(f"tests of a function (fn_name {truth['fn_name']}) have to be written as `asserts`")
    if isinstance(truth, dict):
        asserts, inputs, outputs = (truth.get(name) for name in ("asserts", "inputs", "outputs"))
        asserts = "\n".join(map(str, asserts)) if isinstance(asserts, list) else asserts
        if isinstance(asserts, str) and asserts.strip():
            return {"asserts": asserts}
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0:
            return {"inputs": [str(each) for each in inputs], "outputs": [str(each) for each in outputs]}
    raise ValueError(
        f"the ground truth {str(ground_truth)[:60]!r} has neither `inputs` with as many `outputs` nor `asserts`"
    )


def run(program: str, given: str, asserts: bool, *, seconds: float, memory_mb: int, sandbox: str) -> str | None:
    """Returns what a program prints; None if it fails, or exceeds its limits."""
    with tempfile.TemporaryDirectory(prefix="ratchet-code-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(program)
        (folder / "launch.py").write_text(_LAUNCH)
        here = "/program" if sandbox == "bubblewrap" else name
        command = [sys.executable, "-I", "-B", f"{here}/launch.py", str(math.ceil(seconds)), str(memory_mb << 20)]
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
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": here},
                start_new_session=True,
            )
            try:
                process.communicate(given.encode(), timeout=seconds + START_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                child_processes.end(process)
            stdout.seek(0)
            return stdout.read(MAX_OUTPUT).decode(errors="replace") if process.returncode == 0 else None


_LAUNCH = f"""
import ctypes, os, resource, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: who would end it may be killed
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
word = input() if sys.argv[3:] else None
os.chdir(os.path.dirname(__file__))
for what, limit in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, memory),
    (resource.RLIMIT_FSIZE, {MAX_OUTPUT}),
    (resource.RLIMIT_NPROC, {PROCESSES}),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(what, (limit, limit))
sys.argv = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
if word:
    print()
    print(word)
"""


def _bubblewrap(folder: Path) -> list[str]:
    """Builds the bubblewrap command: the system read-only, as far as Python needs it, and nothing else."""
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
    shown = [part for path in dict.fromkeys(needed) for part in ("--ro-bind-try", path, path)]
    return [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        *("--cap-drop", "ALL"),
        *("--tmpfs", "/tmp"),  # before the paths that may lie in it
        *shown,
        *("--proc", "/proc"),
        *("--dev", "/dev"),
        *("--bind", str(folder), "/program"),
        *("--chdir", "/program"),
        "--",
    ]


def _lines(text: str) -> Sequence[str]:
    """Splits text into lines, ignoring spaces at their ends, and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
