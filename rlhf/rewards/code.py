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
import re
import secrets
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, Literal

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rewards.functions import continued
from ratchet.rlhf.sandboxes.processes import Bubblewrap, Limited, check_bubblewrap
from ratchet.rlhf.sandboxes.sandbox import Limits, Sandbox

MAX_OUTPUT = 1 << 20
MAX_PROGRAM = 1 << 16
PROCESSES = 32
"""Limit for the user; the system enforces none for root."""
FOLDER = "/program"
"""Folder of a program in its sandbox."""

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
    if sandbox == "bubblewrap":
        check_bubblewrap(
            "reward.function code", "where programs may do what you may, set reward.options: {code: {sandbox: limits}}"
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
    limits = Limits(memory_mb, file_bytes=MAX_OUTPUT, processes=PROCESSES, open_files=64)
    place: Sandbox = (
        Bubblewrap([FOLDER], limits, shown=(sys.prefix, sys.base_prefix))
        if sandbox == "bubblewrap"
        else Limited([FOLDER], limits)
    )
    place.start({f"{FOLDER}/program.py": program.encode(), f"{FOLDER}/launch.py": _LAUNCH.encode()})
    try:
        launch = [sys.executable, "-I", "-B", place.where(f"{FOLDER}/launch.py"), *(["asserts"] if asserts else [])]
        done = place.exec(launch, given.encode(), seconds=seconds)
    finally:
        place.stop()
    return done.output[:MAX_OUTPUT].decode(errors="replace") if done.code == 0 else None


_LAUNCH = """
import os, runpy, sys
word = input() if sys.argv[1:] else None
os.chdir(os.path.dirname(__file__))
sys.argv = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
if word:
    print()
    print(word)
"""


def _lines(text: str) -> Sequence[str]:
    """Splits text into lines, ignoring spaces at their ends, and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
