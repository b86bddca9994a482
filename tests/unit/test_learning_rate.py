"""The learning rate, by hand."""

import pytest

from ratchet.rlhf.config import LRScheduleConfig
from ratchet.rlhf.train.learning_rate import learning_rate


def rates(schedule: LRScheduleConfig, iterations: int) -> list[float]:
    return [learning_rate(8.0, schedule, iteration) for iteration in range(iterations)]


def test_constant() -> None:
    assert rates(LRScheduleConfig(), 3) == [8, 8, 8]
    assert rates(LRScheduleConfig(warmup_iterations=4), 6) == [2, 4, 6, 8, 8, 8]


def test_linear() -> None:
    assert rates(LRScheduleConfig(type="linear", decay_iterations=4), 6) == [8, 6, 4, 2, 0, 0]
    schedule = LRScheduleConfig(type="linear", decay_iterations=2, warmup_iterations=2, min_ratio=0.5)
    assert rates(schedule, 6) == [4, 8, 8, 6, 4, 4], "the decay starts after the warm-up"


def test_cosine() -> None:
    schedule = LRScheduleConfig(type="cosine", decay_iterations=4, min_ratio=0.25)
    half = 2**-0.5
    assert rates(schedule, 7) == pytest.approx([8, 2 + 3 * (1 + half), 5, 2 + 3 * (1 - half), 2, 2, 2])
