"""`rollout.environment: harbor`: tasks of Harbor, in a sandbox by bubblewrap.

The policy calls the tool `shell`, or writes commands in blocks of Bash; a turn without a command is the last. Then the
task's script runs in the sandbox and writes the reward. The sandbox's files after each turn are the state of the
environment, so a crash repeats no command whose output was stored; one whose output it lost runs again, in the files
from before it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ratchet.rlhf.data.formats import Messages
from ratchet.rlhf.data.harbor import Task, read_task
from ratchet.rlhf.environments.environment import Observation
from ratchet.rlhf.environments.tools import MalformedCall, tool_calls
from ratchet.rlhf.errors import RatchetError, UserError
from ratchet.rlhf.sandboxes.processes import SYSTEM, Bubblewrap, check_bubblewrap
from ratchet.rlhf.sandboxes.sandbox import COPY_S, Finished, Limits

TOOL = "shell"
LOGS, TESTS = "/logs/verifier", "/tests"
KEPT = ("/tmp", "/root", "/logs", TESTS)
"""Folders that a command may change beside the task's own."""
SMALL = 1 << 16
"""Size of the files of a sandbox, packed, that are stored in the run itself, in bytes."""
_BLOCK = re.compile(r"^```(?:bash|sh|shell)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Run a Bash command. Files stay from one command to the next; processes, variables and the "
        "current folder do not.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "the command"}},
            "required": ["command"],
        },
    },
}


class Environment:
    """A task of Harbor. `extra_info` of the prompt names its folder (`task`) and its `digest`."""

    stop: tuple[str, ...] = ()

    def __init__(
        self,
        commands: Literal["tools", "blocks"] = "tools",
        seconds: float = 30.0,
        memory_mb: int = 2048,
        output_bytes: int = 8000,
        skip_run: bool = False,
        snapshots: str | None = None,
    ) -> None:
        """Describes a sandbox; `reset` or `restore` makes it.

        Args:
            commands: ``tools``: calls of the tool `shell`; ``blocks``: the last block of Bash in the turn.
            seconds: time limit of a command.
            memory_mb: largest memory of a process, whatever the task says.
            output_bytes: how much of a command's output the policy reads; the middle of a longer one is left out.
            skip_run: see `read_task`.
            snapshots: folder for the files of sandboxes that are not small. All machines of the rollout need it.

        Raises:
            UserError: an option is wrong, or bubblewrap is missing.
        """
        if commands not in ("tools", "blocks"):
            raise UserError(f"commands is {commands!r}: write tools or blocks")
        check_bubblewrap("rollout.environment harbor")
        self._form, self._seconds, self._memory_mb = commands, seconds, memory_mb
        self._output_bytes, self._skip_run = output_bytes, skip_run
        self._snapshots = None if snapshots is None else Path(snapshots)
        self._task: Task | None = None
        self._sandbox: Bubblewrap | None = None

    @classmethod
    def schemas(cls, commands: str = "tools", **_: object) -> list[Mapping[str, Any]]:
        """Returns the schema of the tool, for the chat template."""
        return [SCHEMA] if commands == "tools" else []

    def reset(self, messages: Messages, ground_truth: Any, extra_info: Any) -> None:
        """Starts a sandbox with the files of the task.

        Raises:
            UserError: there is no such task, it has changed, or it needs what a sandbox does not have.
        """
        if not isinstance(extra_info, Mapping) or not isinstance(folder := extra_info.get("task"), str):
            raise UserError("the prompt names no task: set data.train to a folder of Harbor's task folders")
        task, sandbox = self._made(folder, str(extra_info.get("digest")))
        sandbox.start({})
        for copy in task.copies:
            sandbox.upload(copy.source, copy.target)

    def step(self, turn: str, key: str) -> Observation:
        """Runs the turn's commands; a turn without one ends the trajectory with the task's reward."""
        try:
            commands = self.commands(turn)
        except MalformedCall as error:
            return Observation(self._answer([f"error: {error}"]))
        if not commands:
            return self.ended()
        return Observation(self._answer([self._shown(self._run(command)) for command in commands]))

    def commands(self, turn: str) -> list[str]:
        """Finds the commands in a turn. Raises MalformedCall if a call has no command."""
        if self._form == "blocks":
            return [block for block in _BLOCK.findall(turn)[-1:] if block.strip()]
        found: list[str] = []
        for call in tool_calls(turn, [TOOL]):
            if call.name != TOOL or not isinstance(command := call.arguments.get("command"), str):
                raise MalformedCall(f'there is only the tool {TOOL}, with the argument "command", a text')
            found.append(command)
        return found

    def ended(self) -> Observation:
        """Runs the task's script, and returns its reward: that of ``reward.json``, else of ``reward.txt``; 0 if it
        writes none. Other numbers of ``reward.json`` are parts."""
        task, sandbox = self._started
        # what the policy may have put there does not count
        for command in (["find", TESTS, "-mindepth", "1", "-delete"], ["rm", "-rf", LOGS], ["mkdir", "-p", LOGS]):
            sandbox.exec(command, seconds=COPY_S)
        sandbox.upload(task.folder / "tests", TESTS)
        script = ["bash", f"{TESTS}/test.sh"]
        done = sandbox.exec(script, seconds=task.verifier_seconds, env=task.verifier_env, most=self._output_bytes)
        numbers = _numbers(sandbox.download(f"{LOGS}/reward.json"), sandbox.download(f"{LOGS}/reward.txt"))
        if numbers is None:
            how = "ran out of time" if done.code is None else f"ended with {done.code}"
            tail = " ".join((done.output + done.errors).decode(errors="replace").split())[-300:]
            error = f"{task.folder.name}: tests/test.sh {how} and wrote no reward to {LOGS}: {tail}"
            return Observation(None, 0.0, error=error)
        reward = numbers.pop("reward", 0.0)
        return Observation(None, reward, parts=numbers)

    def snapshot(self) -> str:
        """Returns the sandbox's files, or, if they are not small, the sha256 that names their file in `snapshots`."""
        task, sandbox = self._started
        packed = sandbox.snapshot()
        state = {"task": str(task.folder), "digest": task.digest}
        if len(packed) <= SMALL:
            return json.dumps({**state, "files": base64.b64encode(packed).decode()})
        if self._snapshots is None:
            raise RatchetError(
                f"the files of {task.folder.name} take {len(packed) >> 10} KiB: set rollout.environment.options."
                "snapshots to a folder that all machines of the rollout see"
            )
        digest = hashlib.sha256(packed).hexdigest()
        self._snapshots.mkdir(parents=True, exist_ok=True)
        written = self._snapshots / f".{digest}.{secrets.token_hex(8)}"
        with written.open("wb") as file:
            file.write(packed)
            file.flush()
            os.fsync(file.fileno())
        written.rename(self._snapshots / f"{digest}.tar.gz")
        return json.dumps({**state, "sha256": digest})

    def restore(self, state: str) -> None:
        """Starts a sandbox with the files of a snapshot. Raises UserError if they are missing or damaged."""
        known = json.loads(state)
        if "files" in known:
            packed = base64.b64decode(known["files"])
        else:
            where = (self._snapshots or Path()) / f"{known['sha256']}.tar.gz"
            packed = where.read_bytes() if self._snapshots is not None and where.is_file() else b""
            if hashlib.sha256(packed).hexdigest() != known["sha256"]:
                raise UserError(
                    f"the sandbox's files are not in {where}: set rollout.environment.options.snapshots to "
                    "the folder of the run's first part"
                )
        self._made(known["task"], known["digest"])[1].restore(packed)

    def is_repeatable(self, turn: str) -> bool:
        """Returns True: the sandbox has the files from before the turn, and no network."""
        return True

    def close(self) -> None:
        """Removes the sandbox."""
        if self._sandbox is not None:
            self._sandbox.stop()

    @property
    def _started(self) -> tuple[Task, Bubblewrap]:
        assert self._task is not None and self._sandbox is not None, "reset or restore comes first"
        return self._task, self._sandbox

    def _made(self, folder: str, digest: str) -> tuple[Task, Bubblewrap]:
        task = read_task(Path(folder), skip_run=self._skip_run)
        if task.digest != digest:
            raise UserError(f"{folder} has changed since the run read it: restore it, or fork the run")
        self.close()
        self._task, self._sandbox = task, self._sandbox_of(task)
        return self._task, self._sandbox

    def _sandbox_of(self, task: Task) -> Bubblewrap:
        targets = (
            copy.target if copy.source.is_dir() else str(PurePosixPath(copy.target).parent) for copy in task.copies
        )
        places = [task.workdir, *targets]
        for place in places:
            if place == "/" or any(PurePosixPath(place).is_relative_to(path) for path in SYSTEM):
                raise UserError(
                    f"{task.folder} puts files into {place}, where the sandbox shows the machine's: choose "
                    "another folder in its Dockerfile"
                )
        limits = Limits(min(task.memory_mb or self._memory_mb, self._memory_mb))
        return Bubblewrap([*places, *KEPT], limits, {"HOME": "/root", **task.env})

    def _run(self, command: str) -> Finished:
        # as on a terminal, errors are part of the output
        merged = ["sh", "-c", 'exec "$@" 2>&1', "sh", "bash", "-c", command]
        return self._started[1].exec(merged, seconds=self._seconds, most=self._output_bytes)

    def _shown(self, done: Finished) -> str:
        """Returns what the policy reads of a command."""
        text = done.output.decode(errors="replace")
        if done.code is None:
            return f"{text}\n[ended after {self._seconds:g} s]".lstrip()
        return text if done.code == 0 else f"{text}\n[exit code {done.code}]".lstrip()

    def _answer(self, texts: list[str]) -> Messages:
        if self._form == "blocks":
            return [{"role": "user", "content": "\n".join(texts)}]
        return [{"role": "tool", "name": TOOL, "content": text} for text in texts]


def _numbers(as_json: bytes | None, as_text: bytes | None) -> dict[str, float] | None:
    """Returns the numbers that a script wrote, with `reward` among them; None if it wrote none.

    Of several numbers without the name `reward`, the reward is the mean.
    """
    try:
        if as_json is not None:
            found = json.loads(as_json)
            numbers = {str(name): float(value) for name, value in found.items()} if isinstance(found, dict) else {}
            if numbers and "reward" not in numbers:
                numbers["reward"] = sum(numbers.values()) / len(numbers)
        else:
            numbers = {"reward": float((as_text or b"").decode())}
    except (ValueError, TypeError):
        return None
    return numbers if numbers and all(map(math.isfinite, numbers.values())) else None
