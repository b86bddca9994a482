"""Shaping: does the response consist of a thought and an answer, in their tags, once each? (arXiv 2501.12948)"""

from collections.abc import Sequence
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    tags: Sequence[str] = ("think", "answer"),
) -> float:
    """1.0 if the response is ``<tag>...</tag>`` for each tag in turn and nothing else but white space, else 0.0."""
    rest = solution_str.strip()
    for tag in tags:
        opened, closed = f"<{tag}>", f"</{tag}>"
        if solution_str.count(opened) != 1 or solution_str.count(closed) != 1 or not rest.startswith(opened):
            return 0.0
        inside, found, rest = rest.removeprefix(opened).partition(closed)
        if not found or not inside.strip():
            return 0.0
        rest = rest.lstrip()
    return float(not rest)
