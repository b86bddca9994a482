"""Statistics of a validation by data source: mean_score, pass@1, maj@n and best@n, and standard errors.

With :math:`s_{ij}` the score of answer j of n to prompt i: pass@1 is the share of solved answers, whose score is at
least a threshold; without a threshold there is no pass@1. mean_score is the mean of :math:`s_{ij}`, and best@n that of
:math:`\\max_j s_{ij}`. maj@n (arXiv 2203.11171) is the mean score of the most frequent answer to a prompt; if several
are equally frequent, the first one counts. The standard errors of mean_score and pass@1 are those of a mean over P
prompts, :math:`\\sqrt{\\sum_i (\\bar s_i - \\bar s)^2 / (P (P - 1))}` with :math:`\\bar s_i` the mean of prompt i,
because the answers to one prompt are not independent (arXiv 2411.00640).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ratchet.rlhf.metrics import validation_metrics
from ratchet.rlhf.rewards.countdown import Malformed, last_answer
from ratchet.rlhf.rewards.math import boxed

Sums = dict[str, dict[str, tuple[float, int]]]
"""A sum and the number of its terms, by data source and metric."""
STDERR = "_stderr"
"""Ends the names of standard errors."""
_PROMPTS, _SQUARES = " over prompts", " over prompts, squared"


def reported(sources: Iterable[str], n: int) -> list[str]:
    """Returns the metrics that a validation of data sources may report, including pass@1, which needs a threshold."""
    errors = {f"mean_score{STDERR}": 0.0, f"pass@1{STDERR}": 0.0}
    several = {f"maj@{n}": 0.0, f"best@{n}": 0.0} if n > 1 else {}
    statistics = {"mean_score": 0.0, "pass@1": 0.0} | several | errors
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
        _add_mean(totals[source], "mean_score", values)
        if solved is not None:
            _add_mean(totals[source], "pass@1", [float(score >= solved) for score in values])
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
    return {source: _statistics(metrics) for source, metrics in whole.items()}


def _add_mean(metrics: dict[str, tuple[float, int]], name: str, values: Sequence[float]) -> None:
    """Adds the answers to a prompt to a mean and to its standard error, in place."""
    mean = sum(values) / len(values)
    add(metrics, name, sum(values), len(values))
    add(metrics, f"{name}{_PROMPTS}", mean, 1)
    add(metrics, f"{name}{_SQUARES}", mean * mean, 1)


def _statistics(sums: dict[str, tuple[float, int]]) -> dict[str, float]:
    """Returns the means of sums, and the standard errors of those over several prompts."""
    statistics = {
        name: total / count for name, (total, count) in sums.items() if not name.endswith((_PROMPTS, _SQUARES))
    }
    for name in [name.removesuffix(_PROMPTS) for name in sums if name.endswith(_PROMPTS)]:
        (total, count), (squares, _) = sums[f"{name}{_PROMPTS}"], sums[f"{name}{_SQUARES}"]
        if count > 1:
            variance = max(0.0, squares - total * total / count) / (count - 1)
            statistics[f"{name}{STDERR}"] = math.sqrt(variance / count)
    return statistics
