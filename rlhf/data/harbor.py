"""Task folders of Harbor: an instruction, an environment, and a script that rewards what was done there.

``instruction.md`` is the prompt, ``task.toml`` the settings, ``environment/`` describes the machine, ``tests/test.sh``
writes the reward, and ``solution/`` is never read. https://www.harborframework.com/docs/tasks describes the format.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ratchet.rlhf.errors import UserError, in_one_line

SETTINGS, INSTRUCTION, SCRIPT = "task.toml", "instruction.md", "tests/test.sh"
WORKDIR = "/app"
"""Folder in which commands begin if the task names none."""
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def is_task(folder: Path) -> bool:
    """True if a folder is a task of Harbor."""
    return (folder / SETTINGS).is_file() and (folder / INSTRUCTION).is_file()


def task_folders(folder: Path) -> list[Path]:
    """Returns the folder if it is a task, or the tasks in it, by name; none if it has no tasks."""
    if is_task(folder):
        return [folder]
    return sorted(inner for inner in folder.iterdir() if inner.is_dir() and is_task(inner))


def row_of(folder: Path) -> dict[str, object]:
    """Returns a task's row in a dataset."""
    content = (folder / INSTRUCTION).read_text().strip()
    task = {"task": str(folder), "digest": task_digest(folder)}
    return {"prompt": [{"role": "user", "content": content}], "extra_info": task}


def task_digest(folder: Path) -> str:
    """Returns the sha256 of the names, modes and contents of a task's files, but for the solution."""
    digest = hashlib.sha256()
    for path in _files(folder):
        digest.update(json.dumps([str(path.relative_to(folder)), path.stat().st_mode & 0o111 != 0]).encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        place = Path(name)
        if place == folder:
            folders[:] = [inner for inner in folders if inner != "solution"]
        folders.sort()
        yield from (place / file for file in sorted(files))


@dataclass(frozen=True)
class Copy:
    """A COPY line of a Dockerfile."""

    source: Path
    target: str


@dataclass(frozen=True)
class Task:
    """A task, as far as it is read."""

    folder: Path
    digest: str
    workdir: str
    env: Mapping[str, str]
    """Environment variables of commands."""
    copies: Sequence[Copy]
    memory_mb: int | None
    verifier_seconds: float
    verifier_env: Mapping[str, str]


def read_task(folder: Path, *, skip_run: bool = False) -> Task:
    """Reads a task.

    Args:
        skip_run: the machine has what the RUN lines of the Dockerfile install, so they are left out.

    Raises:
        UserError: there is no such task, or it needs what a sandbox of this machine does not have.
    """
    if not is_task(folder):
        raise UserError(f"{folder} is no task of Harbor: it needs {SETTINGS} and {INSTRUCTION}")
    if not (folder / SCRIPT).is_file():
        raise UserError(f"{folder} has no {SCRIPT}, which rewards the task: add it")
    try:
        settings = tomllib.loads((folder / SETTINGS).read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"cannot read {folder / SETTINGS}: {in_one_line(error)}") from None
    if settings.get("steps"):
        raise UserError(f"{folder} has [[steps]]: only tasks of one step are read; leave it out")
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            raise UserError(f"{folder} has a {name}: a sandbox is one machine without network; leave the task out")
    workdir, env, copies = _dockerfile(folder, skip_run=skip_run)
    memory = environment.get("memory_mb", environment.get("memory"))
    return Task(
        folder=folder,
        digest=task_digest(folder),
        workdir=str(environment.get("workdir") or workdir),
        env=env | _texts(folder, "environment.env", environment.get("env", {})),
        copies=copies,
        memory_mb=None if memory is None else _megabytes(folder, memory),
        verifier_seconds=float(verifier.get("timeout_sec", 600.0)),
        verifier_env=_texts(folder, "verifier.env", verifier.get("env", {})),
    )


def _texts(folder: Path, key: str, values: object) -> dict[str, str]:
    """Returns environment variables. Those that take the user's own, which may be secrets, are refused."""
    texts = {str(name): str(value) for name, value in values.items()} if isinstance(values, dict) else {}
    for name, value in texts.items():
        if "${" in value:
            raise UserError(f"{folder / SETTINGS}: {key}.{name} is {value}: write the value; no variable is passed on")
    return texts


def _megabytes(folder: Path, memory: object) -> int:
    if isinstance(memory, int | float):
        return int(memory)
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT]?)i?B?", str(memory), re.IGNORECASE)
    if match is None:
        raise UserError(f"{folder / SETTINGS}: environment.memory is {memory}: write memory_mb, a number")
    return int(float(match[1]) * UNITS[match[2].upper()]) >> 20


def _dockerfile(folder: Path, *, skip_run: bool) -> tuple[str, dict[str, str], list[Copy]]:
    """Returns what a task's Dockerfile says of the folder, the variables and the files."""
    path = folder / "environment" / "Dockerfile"
    workdir, env, copies = "", dict[str, str](), list[Copy]()
    text = path.read_text() if path.is_file() else ""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        instruction, rest = word.upper(), rest.strip()
        if instruction == "WORKDIR":
            workdir = _joined(workdir, rest)
        elif instruction == "ENV":
            pairs = [part.partition("=") for part in shlex.split(rest)] if "=" in rest else [rest.partition(" ")]
            env |= {name: value.strip() for name, _, value in pairs}
        elif instruction in ("COPY", "ADD"):
            copies += _copies(path, workdir, line, rest)
        elif instruction == "RUN" and not skip_run:
            raise UserError(
                f"{path} has `{line.strip()[:60]}`, which a sandbox cannot run: install what it installs on the "
                "machines of the rollout, and set rollout.environment.options.skip_run=true"
            )
    return workdir or WORKDIR, env, copies


def _copies(path: Path, workdir: str, line: str, rest: str) -> Iterator[Copy]:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    *sources, target = [word for word in words if not word.startswith("--chmod") and not word.startswith("--chown")]
    within = path.parent.resolve()
    for name in sources:
        source = (within / name.lstrip("/")).resolve()
        if name.startswith(("--", "http:", "https:")) or not source.is_relative_to(within) or not source.exists():
            raise UserError(f"{path}: `{line.strip()[:60]}` copies what environment/ does not have: put it there")
        place = _joined(workdir, target)
        if source.is_file() and (target.endswith(("/", ".")) or len(sources) > 1):
            place = _joined(place, source.name)
        yield Copy(source, place)


def _joined(folder: str, path: str) -> str:
    return os.path.normpath(PurePosixPath("/", folder, path))
