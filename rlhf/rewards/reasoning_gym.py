"""Problems of the package reasoning-gym, each scored by the package (extra `reasoning-gym`).

The answer is the text in the last ``<answer>…</answer>``, or else the whole response. ``extra_info.reasoning_gym`` has
the problem as JSON: `ratchet data reasoning-gym` writes it.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ratchet.rlhf.rewards.functions import continued

COLUMN = "reasoning_gym"
EVALUATING = frozenset(
    (
        "binary_matrix",
        "bitwise_arithmetic",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "number_sorting",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    )
)
"""Datasets whose scorers run answers, or fields of a row, as Python: an answer could do anything."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

Score = Callable[[str, Mapping[str, Any]], float]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, prompt_tail: str = ""
) -> float:
    """Returns the score of the dataset's own scorer: 1.0 for a right answer, and for others often a little above 0."""
    stored = extra_info.get(COLUMN) if isinstance(extra_info, Mapping) else None
    if not isinstance(stored, str):
        raise ValueError(f"the row has no extra_info.{COLUMN}: write the dataset with `ratchet data reasoning-gym`")
    problem = json.loads(stored)
    score = scorer(problem["metadata"]["source_dataset"])
    text = continued(solution_str, prompt_tail, "<answer>")
    marked = _ANSWER.findall(text)
    try:
        return float(score((marked[-1] if marked else text).strip(), problem))
    except Exception:  # some scorers raise for an answer of another form than theirs
        return 0.0


@cache
def scorer(dataset: str) -> Score:
    """Returns a dataset's scorer; raises ValueError if there is none, or it runs what it scores."""
    from reasoning_gym import get_score_answer_fn

    if dataset in EVALUATING:
        raise ValueError(f"reasoning-gym would run answers to {dataset} as Python: choose another dataset")
    score: Score = get_score_answer_fn(dataset)
    return score
