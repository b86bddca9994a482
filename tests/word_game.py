"""Environments of other packages, for tests: of verifiers (`load_environment`), and of gymnasium."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def load_environment(kind: str = "single", turns: int = 3) -> Any:
    """Loads an environment of verifiers whose rubric counts letters."""
    import verifiers
    from datasets import Dataset

    rows = {"question": ["hi", "say a"], "answer": ["a", "b"]}
    dataset = Dataset.from_dict(rows)

    def letters(completion: Any, **_: Any) -> float:
        return float(sum(map(str.isalpha, str(completion[-1]["content"] or ""))))

    async def has_answer(completion: Any, answer: str, **_: Any) -> float:
        return float(answer in str(completion[-1]["content"] or ""))

    rubric = verifiers.Rubric(funcs=[letters, has_answer], weights=[1.0, 2.0])
    if kind == "single":
        return verifiers.SingleTurnEnv(dataset=dataset, rubric=rubric)
    if kind == "tool":

        def double(number: int) -> int:
            """Double a number.

            Args:
                number: the number.
            """
            return 2 * number

        return verifiers.ToolEnv(dataset=dataset, rubric=rubric, tools=[double], max_turns=turns)

    class Chat(verifiers.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "more"}]

    return Chat(dataset=dataset, rubric=rubric, max_turns=turns)


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
