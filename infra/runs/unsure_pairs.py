"""Pairs of answers that a run's reward model can hardly tell apart, and whose labels therefore teach it most."""

from __future__ import annotations

import json
import math
from collections import Counter
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pyarrow as pa

from ratchet.infra.runs.run import Run, own_answers
from ratchet.infra.runs.training_data import COLUMNS, SampledPrompt, SampledResponse, groups_of
from ratchet.rlhf import seeding
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import MESSAGES

PAIRS = pa.schema(
    {
        "pair_id": pa.string(),
        "prompt": pa.string(),
        "answer_a": pa.string(),
        "answer_b": pa.string(),
        "probability_a": pa.float64(),
        "messages": MESSAGES,
        "tools": pa.string(),
        "trajectory_id_a": pa.string(),
        "trajectory_id_b": pa.string(),
        "model_score_a": pa.float64(),
        "model_score_b": pa.float64(),
        "data_source": pa.string(),
        "run": pa.string(),
        "iteration": pa.int64(),
    }
)
"""Columns of the pairs. `probability_a` is the reward model's probability that answer a is better."""


def unsure_pairs(run: Run, count: int, window: int | None) -> pa.Table:
    r"""Chooses the pairs whose order is least certain to a run's reward model.

    Under the Bradley-Terry model, with which it was trained, answer a is better with probability
    :math:`\sigma(r_a - r_b)`, which is closest to one half where the scores differ least (uncertainty sampling). A
    prompt gives at most one pair per iteration.

    Args:
        count: largest number of pairs.
        window: newest closed iterations to choose from; None: all.

    Returns:
        The pairs, the least certain first, with columns `PAIRS`. Which of the answers is a is drawn at random.

    Raises:
        UserError: the run has no reward model that scores whole responses, or no pair.
        Corrupt: an object of the run is missing or damaged.
    """
    if run.config.reward.model is None or run.config.reward.model.kind != "outcome":
        raise UserError(f"{run.store.url} has no reward.model that scores whole responses: name a run that has one")
    name, end = run.store.url.rpartition("/")[2], run.state.iteration
    columns = (*COLUMNS, "replayed_from", "model_score")
    closest: dict[tuple[object, ...], tuple[float, SampledPrompt, tuple[SampledResponse, SampledResponse]]] = {}
    for iteration in range(0 if window is None else max(0, end - window), end):
        frame = own_answers(run.trajectories(iteration, columns))
        frame = frame.assign(score=frame["model_score"])
        for question, answers in groups_of(frame.to_dict("records"), name, iteration, Counter()):
            if (pair := _closest(answers)) is not None:
                texts = tuple(sorted(answer.text for answer in pair))
                found = (abs(pair[0].score - pair[1].score), question, pair)
                key = (question.messages, question.tools, *texts)
                if key not in closest or found[0] < closest[key][0]:
                    closest[key] = found
    if not closest:
        raise UserError(f"{run.store.url} has no prompt with two different answers in its {end} closed iterations")
    least_certain = sorted(closest.values(), key=lambda found: (found[0], found[2][0].trajectory_id))[:count]
    return pa.Table.from_pylist([_row(question, pair) for _, question, pair in least_certain], PAIRS)


def _closest(answers: list[SampledResponse]) -> tuple[SampledResponse, SampledResponse] | None:
    """Returns the two different answers whose scores differ least."""
    by_text = {answer.text: answer for answer in answers}
    ordered = sorted(by_text.values(), key=lambda answer: (answer.score, answer.trajectory_id))
    # in order of scores, the closest two are neighbours
    neighbours = list(pairwise(ordered))
    return min(neighbours, key=lambda pair: pair[1].score - pair[0].score, default=None)


def _row(question: SampledPrompt, pair: tuple[SampledResponse, SampledResponse]) -> dict[str, Any]:
    texts = [question.text, *sorted(answer.text for answer in pair)]
    digest = sha256(json.dumps(texts).encode()).hexdigest()[:16]
    first, second = pair if seeding.generator(0, "pair", digest).random() < 0.5 else pair[::-1]
    return {
        "pair_id": digest,
        "prompt": question.text,
        "answer_a": first.text,
        "answer_b": second.text,
        "probability_a": (1 + math.tanh((first.score - second.score) / 2)) / 2,  # the sigmoid, which cannot overflow
        "messages": [{"role": role, "content": content} for role, content in question.messages],
        "tools": question.tools,
        "trajectory_id_a": first.trajectory_id,
        "trajectory_id_b": second.trajectory_id,
        "model_score_a": first.score,
        "model_score_b": second.score,
        "data_source": question.data_source,
        "run": question.run,
        "iteration": question.iteration,
    }
