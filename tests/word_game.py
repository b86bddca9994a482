"""Environments of gymnasium, for tests; tests/tasksets has those of verifiers."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any


def register() -> None:
    import gymnasium

    class Echo(gymnasium.Env):
        """Rewards the letters of three answers."""

        observation_space = action_space = gymnasium.spaces.Text(1000)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            self.left = 3
            return f"seed {seed}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            self.left -= 1
            return f"{self.left} left", float(sum(map(str.isalpha, action))), self.left == 0, False, {}

    class Draws(gymnasium.Env):
        """Answers with a number that it draws: its state is in what `inside` names."""

        observation_space = action_space = gymnasium.spaces.Text(1000)
        started = 0

        def __init__(self, inside: str) -> None:
            self.inside = inside

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            drawing = Random(seed)
            self.said: Any = None
            if self.inside == "attributes":
                self.drawing, self.count = drawing, {("turns", 0): [0]}
            elif self.inside == "an object":
                self.holder = SimpleNamespace(drawing=drawing)
            elif self.inside == "two attributes":
                self.drawing = self.other = drawing
            elif self.inside == "a set":
                self.drawing, self.said = drawing, set()
            elif self.inside == "a function":
                self.draw = lambda: drawing.random()
            elif self.inside == "the process":
                Draws.started += 1
                self.drawing, self.start = drawing, Draws.started
            return "draw", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if self.inside == "a set":
                self.said.add(action)
            if self.inside == "attributes":
                self.count["turns", 0][0] += 1
            if self.inside == "an object later" and self.said is None:
                self.said = SimpleNamespace(drawing=Random(3))
            source = self.holder if self.inside == "an object" else self.said if "later" in self.inside else self
            number = self.draw() if self.inside == "a function" else source.drawing.random()
            return str(number), number, False, False, {}

    def lake(folder: str) -> Any:
        """Frozen Lake without holes, played by the number of letters of an answer; notes each step in a file."""
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

        class Lake(FrozenLakeEnv):
            def step(self, a: int) -> Any:
                before = int(self.s)
                answer = super().step(a)
                entry = {"process": os.getpid(), "from": before, "action": a, "to": answer[0]}
                with Path(folder).open("a") as file:
                    file.write(f"{json.dumps(entry)}\n")
                return answer

        ice = Lake(desc=["SFFF", "FFFF", "FFFF", "FFFG"])
        return gymnasium.wrappers.TransformAction(ice, lambda text: len(text) % 4, gymnasium.spaces.Text(1000))

    gymnasium.register("Echo-v0", entry_point=Echo)
    gymnasium.register("Numbers-v0", entry_point=Numbers)
    gymnasium.register("Draws-v0", entry_point=Draws)
    gymnasium.register("Lake-v0", entry_point=lake, max_episode_steps=5)


class Numbers:
    """An environment without texts."""

    def __new__(cls) -> Any:
        import gymnasium

        class Plain(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 1, (3,))
            action_space = gymnasium.spaces.Text(10)

        return Plain()


with suppress(ImportError):
    register()
