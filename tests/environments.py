"""Environments for tests: they answer a policy of random weights, too."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ratchet.rlhf.environments import harbor
from ratchet.rlhf.environments.environment import Observation
from ratchet.rlhf.sandboxes.processes import Bubblewrap
from ratchet.rlhf.sandboxes.sandbox import Limits


class Chatty:
    """Says XY, then asks in a message, and so on, until it has heard four turns; vowels are rewarded, and end a
    turn.
    """

    stop = tuple("aeiouAEIOU")

    def __init__(self, worth: float = 1.0) -> None:
        self.worth, self.turns = worth, 0

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        assert "numbers" in ground_truth

    def step(self, turn: str) -> Observation:
        self.turns += 1
        says: Any = "XY" if self.turns % 2 else [{"role": "user", "content": "and"}]
        heard = sum(map(turn.count, "aeiou"))
        return Observation(None if self.turns == 4 else says, self.worth * heard, parts={"vowels": heard})


class Ledger:
    """Books each turn in a folder that outlives the process, and says the balance. A booking with a key that is there
    changes nothing, and a turn with an `x` must not be booked again. Vowels end a turn."""

    stop = tuple("aeiouAEIOU")

    def __init__(self, folder: str, turns: int = 4) -> None:
        self.folder, self.turns = Path(folder), turns
        self.answered = self.balance = 0

    def reset(self, messages: Any, ground_truth: Any, extra_info: Any) -> None: ...

    def step(self, turn: str, key: str) -> Observation:
        self.folder.mkdir(exist_ok=True)
        self._append("calls", {"key": key, "turn": turn, "delicate": not self.is_repeatable(turn)})
        try:
            os.close(os.open(self.folder / key.replace("/", "_"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            self._append("effects", {"key": key, "turn": turn})
        self.answered += 1
        self.balance += len(turn)
        return Observation(None if self.answered == self.turns else f"{self.balance} ", float(len(turn)))

    def snapshot(self) -> str:
        return json.dumps([self.answered, self.balance])

    def restore(self, state: str) -> None:
        self.answered, self.balance = json.loads(state)

    def is_repeatable(self, turn: str) -> bool:
        return "x" not in turn

    def _append(self, name: str, entry: dict[str, str | bool]) -> None:
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


class Savings(Ledger):
    """Pays the balance at the end, and nothing before."""

    def step(self, turn: str, key: str) -> Observation:
        observation = super().step(turn, key)
        return Observation(observation.content, float(self.balance) if observation.content is None else 0.0)


class Shaky(Savings):
    """Fails once, in the second turn, and never again."""

    def step(self, turn: str, key: str) -> Observation:
        observation = super().step(turn, key)
        if self.answered == 2 and not (self.folder / "failed").exists():
            (self.folder / "failed").touch()
            raise RuntimeError("not today")
        return observation

    def is_repeatable(self, turn: str) -> bool:
        return True


ADD_LINE = "cat >> lines; echo >> lines; touch -d @0 lines .; wc -l < lines"
"""Without times, snapshots of the same files are the same."""


class Workshop(Ledger):
    """A ledger beside a sandbox, in which each turn adds a line to a file. Pays the lines of the file at the end."""

    def __init__(self, folder: str, turns: int = 4) -> None:
        super().__init__(folder, turns)
        self.sandbox = Bubblewrap(["/work"], Limits())

    def reset(self, messages: Any, ground_truth: Any, extra_info: Any) -> None:
        self.sandbox.start({})

    def step(self, turn: str, key: str) -> Observation:
        content = super().step(turn, key).content
        done = self.sandbox.exec(["sh", "-c", ADD_LINE], turn.encode(), seconds=60)
        lines = int(done.output)
        assert lines == self.answered, f"{lines} lines after {self.answered} turns"
        return Observation(None if content is None else f"{lines} ", float(self.balance) if content is None else 0.0)

    def snapshot(self) -> str:
        return json.dumps([super().snapshot(), base64.b64encode(self.sandbox.snapshot()).decode()])

    def restore(self, state: str) -> None:
        books, files = json.loads(state)
        super().restore(books)
        self.sandbox.restore(base64.b64decode(files))

    def is_repeatable(self, turn: str) -> bool:
        return True

    def close(self) -> None:
        self.sandbox.stop()


class Tally:
    """Savings without effects, whose turns can be replayed."""

    stop = tuple("aeiouAEIOU")
    replayable = True

    def __init__(self, folder: str) -> None:
        self.answered = self.balance = 0

    def reset(self, messages: Any, ground_truth: Any, extra_info: Any) -> None: ...

    def step(self, turn: str) -> Observation:
        self.answered += 1
        self.balance += len(turn)
        is_over = self.answered == 4
        return Observation(None if is_over else f"{self.balance} ", float(self.balance) if is_over else 0.0)


def entries(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns what ledgers booked there: `calls` or `effects`."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_books(folder: Path, *, drivers: int | None = None, is_damaged: bool = False) -> None:
    """Asserts that no turn had its effect twice; and, unless the store has lost what was stored, that none was repeated
    that must not be, and that each driver repeated at most one turn of each trajectory.

    Args:
        drivers: how many processes have driven the run; None: any number.
    """
    effects = [entry["key"] for entry in entries(folder, "effects")]
    assert len(effects) == len(set(effects)), "an effect was made twice"
    if is_damaged:
        return
    calls = entries(folder, "calls")
    delicate = [entry["key"] for entry in calls if entry["delicate"]]
    assert len(delicate) == len(set(delicate)), "a turn was repeated that must not be"
    by_trajectory: dict[str, list[str]] = {}
    for entry in calls:
        by_trajectory.setdefault(entry["key"].rpartition("/")[0], []).append(entry["key"])
    for trajectory, keys in by_trajectory.items():
        repeated = len(keys) - len(set(keys))
        assert drivers is None or repeated < drivers, f"{drivers} drivers repeated {repeated} turns of {trajectory}"


class Structured:
    """Expects a ground truth that is a structure."""

    stop = ()

    def reset(self, messages: Any, ground_truth: Any, extra_info: Any) -> None:
        self.target = ground_truth["target"]

    def step(self, turn: str) -> Observation:
        return Observation(None, float(turn == str(self.target)))


class Broken:
    stop = ("e",)

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None: ...

    def step(self, turn: str) -> Observation:
        raise RuntimeError("not today")


class Mute:
    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None: ...

    def step(self, turn: str) -> Observation:
        return Observation(None)


class Deaf:
    stop = ()

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None: ...


class Script:
    """An environment that gives prepared answers, and records the turns that it receives."""

    stop = ("!",)

    def __init__(self, scripts: list[list[Any]], heard: list[list[str]]) -> None:
        self.scripts, self.heard = scripts, heard

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        self.script, self.turns = self.scripts[int(ground_truth)], self.heard[int(ground_truth)]

    def step(self, turn: str) -> Observation:
        self.turns.append(turn)
        return self.script[len(self.turns) - 1]  # type: ignore[no-any-return]


class Absent:
    """An environment that never answers."""

    stop = ("e",)

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None: ...

    def step(self, turn: str) -> Observation:
        time.sleep(3600)
        return Observation(None)


class Leaves:
    """An environment that ends the program, with the ground truth as its exit code."""

    stop = ()

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        raise SystemExit(ground_truth)


class Typed(harbor.Environment):
    """A task of Harbor in which each turn adds a byte to /app/ledger, and says its size. Vowels end a turn.

    It notes what it is asked in a folder outside the sandbox, and kills the process at some of the notes, once each.
    """

    stop = tuple("aeiouAEIOU")

    def __init__(self, folder: str, kills: Mapping[str, Sequence[int]] = MappingProxyType({}), **options: Any) -> None:
        super().__init__(commands="blocks", **options)
        self.folder, self.kills = Path(folder), kills

    @classmethod
    def schemas(cls, commands: str = "", **_: object) -> list[Mapping[str, Any]]:
        return []

    def commands(self, turn: str) -> list[str]:
        return ["printf x >> ledger; stat -c %s ledger"]

    def step(self, turn: str, key: str) -> Observation:
        self._note("asked", key)
        observation = super().step(turn, key)
        self._note("answered", key)
        return observation

    def ended(self) -> Observation:
        observation = super().ended()
        self._note("rewarded", "")
        return observation

    def _note(self, event: str, key: str) -> None:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"{event}.jsonl").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps({"key": key}) + "\n")
            file.flush()
            if len(entries(self.folder, event)) in self.kills.get(event, ()):
                os.kill(os.getpid(), signal.SIGKILL)
