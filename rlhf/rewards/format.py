"""Shaping: 1 if the response consists of a thought and an answer, in their tags, once each (arXiv 2501.12948)."""

from collections.abc import Sequence
from typing import Any

from ratchet.rlhf.rewards.functions import continued


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    tags: Sequence[str] = ("think", "answer"),
    prompt_tail: str = "",
) -> float:
    """Returns 1.0 if the response is ``<tag>...</tag>`` for each tag in turn and otherwise only white space, else
    0.0."""
    # the prompt may have opened the first tag
    text = continued(solution_str, prompt_tail, f"<{tags[0]}>")
    rest = text.strip()
    for tag in tags:
        opened, closed = f"<{tag}>", f"</{tag}>"
        if text.count(opened) != 1 or text.count(closed) != 1 or not rest.startswith(opened):
            return 0.0
        inside, found, rest = rest.removeprefix(opened).partition(closed)
        if not found or not inside.strip():
            return 0.0
        rest = rest.lstrip()
    return float(not rest)


def right_answer(ground_truth: Any, tags: Sequence[str] = ("think", "answer"), **_: Any) -> str:
    """Returns a response that gets 1.0, for the trial before a run."""
    return "".join(f"<{tag}>4</{tag}>" for tag in tags)
