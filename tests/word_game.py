"""Environments of gymnasium, for tests; tests/tasksets has those of verifiers."""

from __future__ import annotations

from contextlib import suppress
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

    gymnasium.register("Echo-v0", entry_point=Echo)
    gymnasium.register("Numbers-v0", entry_point=Numbers)


class Numbers:
    """An environment without texts."""

    def __new__(cls) -> Any:
        import gymnasium

        class Plain(gymnasium.Env):
            observation_space = gymnasium.spaces.Discrete(3)
            action_space = gymnasium.spaces.Text(10)

        return Plain()


with suppress(ImportError):
    register()
