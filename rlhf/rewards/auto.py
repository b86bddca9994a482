"""Chooses a built-in reward for every row: by its `data_source`, and otherwise by `reward_model.style`."""

import fnmatch
from typing import Any

BY_SOURCE = {
    "reasoning_gym/*": "reasoning_gym",
    "countdown*": "countdown",
    "*gsm8k*": "gsm8k",
    "*math*": "math",
    "*aime*": "math",
    "*olympiad*": "math",
    "*numina*": "math",
}
"""Patterns for the lower-case name of a data source, in order."""
STYLES = ("countdown", "gsm8k", "math")


def reward_of(data_source: str, style: str | None) -> str | None:
    """Returns the name of the built-in reward for a row; None if there is none."""
    for pattern, name in BY_SOURCE.items():
        if fnmatch.fnmatch(data_source.lower(), pattern):
            return name
    return style if style in STYLES else None


def problem_of(data_source: str, style: str | None) -> str | None:
    """Explains why a row has no built-in reward, and what to do; None if it has one."""
    if reward_of(data_source, style) is not None:
        return None
    return (
        f"reward.function auto has no built-in reward for data_source {data_source}: name your own (reward.function: "
        f"my_rewards.py), a built-in (reward.function: gsm8k), or a built-in in the row's reward_model.style "
        f"({', '.join(STYLES)})"
    )


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, prompt_tail: str = ""
) -> Any:
    import importlib

    style = extra_info.get("reward_style") if isinstance(extra_info, dict) else None
    if (problem := problem_of(data_source, style)) is not None:
        raise ValueError(problem)
    module = importlib.import_module(f"ratchet.rlhf.rewards.{reward_of(data_source, style)}")
    return module.compute_score(data_source, solution_str, ground_truth, extra_info, prompt_tail=prompt_tail)
