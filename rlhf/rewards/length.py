"""Length reward: a penalty for long responses, in characters (`algorithm.overlong_penalty` counts tokens)."""

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    wanted_characters: int = 2_000,
    buffer_characters: int = 1_000,
) -> float:
    """0.0 up to `wanted_characters`, then a linear decrease to -1.0 over the next `buffer_characters`.

    Args:
        data_source: unused.
        solution_str: text of the response.
        ground_truth: unused.
        extra_info: unused.
        wanted_characters: longest response without a penalty.
        buffer_characters: characters over which the penalty grows.
    """
    return -min(max(len(solution_str) - wanted_characters, 0) / buffer_characters, 1.0)
