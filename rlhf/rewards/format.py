"""Format reward: is the response a thought and an answer, each in its tags and exactly once? (arXiv 2501.12948)"""

from collections.abc import Sequence
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    tags: Sequence[str] = ("think", "answer"),
) -> float:
    """1.0 if the response is one non-empty ``<tag>...</tag>`` per tag, in order, and otherwise white space; else 0.0.

    Args:
        data_source: unused.
        solution_str: text of the response.
        ground_truth: unused.
        extra_info: unused.
        tags: names of the tags, in order.
    """
    rest = solution_str.strip()
    for tag in tags:
        opened, closed = f"<{tag}>", f"</{tag}>"
        if solution_str.count(opened) != 1 or solution_str.count(closed) != 1 or not rest.startswith(opened):
            return 0.0
        inside, separator, rest = rest.removeprefix(opened).partition(closed)
        if not separator or not inside.strip():
            return 0.0
        rest = rest.lstrip()
    return float(not rest)
