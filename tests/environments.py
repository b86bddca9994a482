"""Environments for tests: they answer a policy of random weights, too."""

from __future__ import annotations

import time
from typing import Any

from ratchet.rlhf.environments.environment import Observation


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
