"""A built-in reward for every row: by its `data_source`, and otherwise by `reward_model.style`."""

import fnmatch
from typing import Any

BY_SOURCE = {
    "countdown*": "countdown",
    "*gsm8k*": "gsm8k",
    "*math*": "math",
    "*aime*": "math",
    "*olympiad*": "math",
    "*numina*": "math",
}
"""Patterns that the lower-case name of a data source is compared with, in order."""
STYLES = ("countdown", "gsm8k", "math")


def reward_of(data_source: str, style: str | None) -> str:
    """Raises `ValueError` where there is none."""
    for pattern, name in BY_SOURCE.items():
        if fnmatch.fnmatch(data_source.lower(), pattern):
            return name
    if style in STYLES:
        return style
    raise ValueError(f"there is no built-in reward for data_source {data_source!r}: name one in reward.function")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    import importlib

    style = extra_info.get("reward_style") if isinstance(extra_info, dict) else None
    module = importlib.import_module(f"rlhf.rewards.{reward_of(data_source, style)}")
    return module.compute_score(data_source, solution_str, ground_truth, extra_info)
