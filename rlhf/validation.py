"""Statistics of a validation by data source: mean_score, pass@1, maj@n and best@n.

With :math:`s_{ij}` the score of answer j of n to prompt i: pass@1 is the share of solved answers, whose score is at
least a threshold; without a threshold there is no pass@1. mean_score is the mean of :math:`s_{ij}`, and best@n that of
:math:`\\max_j s_{ij}`. maj@n (arXiv 2203.11171) is the mean score of the most frequent answer to a prompt; if several
are equally frequent, the first one counts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ratchet.rlhf.metrics import validation_metrics
from ratchet.rlhf.rewards.countdown import Malformed, last_answer
from ratchet.rlhf.rewards.math import boxed

Sums = dict[str, dict[str, tuple[float, int]]]
"""A sum and the number of its terms, by data source and metric."""


def reported(sources: Iterable[str], n: int) -> list[str]:
    """Returns the metrics that a validation of data sources may report, including pass@1, which needs a threshold."""
    several = {f"maj@{n}": 0.0, f"best@{n}": 0.0} if n > 1 else {}
    statistics = {"mean_score": 0.0, "pass@1": 0.0} | several
    return [name for source in dict.fromkeys(sources) for name in validation_metrics(source, statistics, n)]


def final_answer(response: str) -> str:
    """Extracts the last line of a response's ``<answer>``, ``\\boxed{}`` or text after ``####``; else its last line."""
    try:
        text = last_answer(response)
    except Malformed:
        marked = re.findall(r"####[ \t]*([^\n]+)", response)
        text = boxed(response) or (marked[-1] if marked else response)
    lines = text.strip().splitlines()
    return re.sub(r"\s", "", lines[-1] if lines else "")


def sums(
    sources: Sequence[str],
    prompts: Sequence[str],
    responses: Sequence[str],
    scores: Sequence[float],
    n: int,
    solved: float | None = None,
) -> Sums:
    """Sums the metrics over some answers. The first four arguments have one entry per answer.

    Args:
        n: answers per prompt. Prompts with fewer, because some could not be scored, have no maj@n and best@n.
        solved: minimum score of a solved answer; None: no pass@1.
    """
    answers: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for source, prompt, response, score in zip(sources, prompts, responses, scores, strict=True):
        answers[source, prompt].append((final_answer(response), score))
    totals: Sums = defaultdict(dict)
    for (source, _), scored_answers in answers.items():
        values = [score for _, score in scored_answers]
        add(totals[source], "mean_score", sum(values), len(values))
        if solved is not None:
            add(totals[source], "pass@1", sum(score >= solved for score in values), len(values))
        if len(values) == n > 1:
            [(most_common, _)] = Counter(answer for answer, _ in scored_answers).most_common(1)
            add(totals[source], f"maj@{n}", next(score for answer, score in scored_answers if answer == most_common), 1)
            add(totals[source], f"best@{n}", max(values), 1)
    return dict(totals)


def add(metrics: dict[str, tuple[float, int]], name: str, total: float, count: int) -> None:
    """Adds a sum of `count` terms to a metric, in place."""
    before, counted = metrics.get(name, (0.0, 0))
    metrics[name] = (before + total, counted + count)


def means(parts: Iterable[Sums]) -> dict[str, dict[str, float]]:
    """Returns the metrics over all prompts, from sums over disjoint sets of prompts; by data source and metric."""
    whole: Sums = defaultdict(dict)
    for part in parts:
        for source, metrics in part.items():
            for name, (total, count) in metrics.items():
                add(whole[source], name, total, count)
    return {
        source: {name: total / count for name, (total, count) in metrics.items()} for source, metrics in whole.items()
    }
