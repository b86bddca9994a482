"""What held-out answers say of a policy: pass@1, mean@n, maj@n and best@n, by data source.

With :math:`s_{ij}` the score of answer j of n to prompt i: pass@1 is the share of answers that are solved (a threshold
says from which score on; where a score does not mean that, there is no pass@1), mean@n the mean of :math:`s_{ij}`,
best@n that of :math:`\\max_j s_{ij}`, and maj@n (arXiv 2203.11171) that of the score of the answer that is given most
often, the first of them if there are several.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rlhf.rewards.countdown import Malformed, last_answer
from rlhf.rewards.math import boxed

Sums = dict[str, dict[str, tuple[float, int]]]
"""By data source and metric: a sum, and over how many."""


def final_answer(response: str) -> str:
    """What a response comes to: its last ``<answer>``, ``\\boxed{}`` or line after ``####``; else its last line."""
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
    """The metrics of some answers.

    Args:
        sources: for every answer, in order, the data source,
        prompts: the prompt that it belongs to,
        responses: its text,
        scores: and its score.
        n: answers to a prompt. One with fewer, because the others could not be scored, says nothing of them together.
        solved: the score from which on an answer is solved; None: there is no pass@1.
    """
    answers: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for source, prompt, response, score in zip(sources, prompts, responses, scores, strict=True):
        answers[source, prompt].append((final_answer(response), score))
    found: Sums = defaultdict(dict)
    for (source, _), given in answers.items():
        each = [score for _, score in given]
        add(found[source], "mean_score", sum(each), len(each))
        if solved is not None:
            add(found[source], "pass@1", sum(score >= solved for score in each), len(each))
        if len(each) == n > 1:
            [(most, _)] = Counter(answer for answer, _ in given).most_common(1)
            add(found[source], f"mean@{n}", sum(each) / n, 1)
            add(found[source], f"maj@{n}", next(score for answer, score in given if answer == most), 1)
            add(found[source], f"best@{n}", max(each), 1)
    return dict(found)


def add(metrics: dict[str, tuple[float, int]], name: str, total: float, count: int) -> None:
    before, counted = metrics.get(name, (0.0, 0))
    metrics[name] = (before + total, counted + count)


def means(parts: Iterable[Sums]) -> dict[str, dict[str, float]]:
    """Of sums over some prompts each: the metrics over all of them."""
    whole: Sums = defaultdict(dict)
    for part in parts:
        for source, metrics in part.items():
            for name, (total, count) in metrics.items():
                add(whole[source], name, total, count)
    return {source: {name: total / count for name, (total, count) in each.items()} for source, each in whole.items()}
