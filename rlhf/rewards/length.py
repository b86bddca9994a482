"""Shaping: a penalty for too long responses, in characters (`algorithm.overlong_penalty` counts tokens)."""

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    wanted_characters: int = 2_000,
    buffer_characters: int = 1_000,
) -> float:
    """Returns 0.0 up to `wanted_characters`, then falls linearly to -1.0 at `buffer_characters` more."""
    return -min(max(len(solution_str) - wanted_characters, 0) / buffer_characters, 1.0)
