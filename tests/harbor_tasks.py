"""Tasks of Harbor, written to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

HELLO = """
mkdir -p /logs/verifier
if grep -q hello /app/out.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
DOCKERFILE = """
FROM ubuntu:24.04
# where commands begin
WORKDIR /app
ENV COLOR=red \\
    SIZE="very large"
COPY words.txt notes/
"""
SETTINGS = """
version = "1.0"
[verifier]
timeout_sec = 60.0
[environment]
memory_mb = 1024
"""


def task(
    folder: Path,
    *,
    test: str = HELLO,
    dockerfile: str = DOCKERFILE,
    settings: str = SETTINGS,
    instruction: str = "Write hello into out.txt.",
    more: Mapping[str, str] | None = None,
) -> Path:
    """Writes a task; `more` are further files. Returns its folder."""
    files = {
        "instruction.md": f"{instruction}\n",
        "task.toml": settings,
        "tests/test.sh": test,
        "environment/Dockerfile": dockerfile,
        "environment/words.txt": "some words\n",
        "solution/solve.sh": "echo hello > out.txt\n",
        **(more or {}),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
