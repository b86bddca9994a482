"""Estimates of what another policy would score: simulated policies, whose true scores are known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ratchet.tasks.analysis.off_policy import ENOUGH, Estimate, estimated, together
from tests.tiers import sampled

REPEATS = 600
Sample = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.str_]]


def better(p: NDArray[np.float64], effect: float) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-(np.log(p / (1 - p)) + effect)))


def sample(rng: np.random.Generator, prompts: int, n: int, effect: float, noise: float) -> Sample:
    """Draws scores under one policy, and the log-ratios of another one that moves the odds of each prompt.

    Args:
        effect: How far it moves them; 0: both policies solve the same share.
        noise: Standard deviation of what it changes about answers without an effect on their scores.
    """
    p = rng.beta(1, 2, size=prompts)
    q = better(p, effect)
    scores = (rng.random((prompts, n)) < p[:, None]).astype(float)
    of_score = np.where(scores > 0, np.log(q / p)[:, None], np.log((1 - q) / (1 - p))[:, None])
    log_ratios = of_score + noise * rng.standard_normal((prompts, n)) - noise**2 / 2
    return scores.ravel(), log_ratios.ravel(), np.repeat(np.arange(prompts).astype(str), n)


def simulated(prompts: int, n: int, effect: float, noise: float) -> tuple[list[Estimate], float]:
    """Returns estimates, and the true change."""
    rng = np.random.default_rng(prompts)
    every = np.random.default_rng(0).beta(1, 2, size=1_000_000)
    truth = float((better(every, effect) - every).mean())
    return [estimated(*sample(rng, prompts, n, effect, noise)) for _ in range(REPEATS)], truth


@sampled(4)
@pytest.mark.parametrize("noise", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("effect", [0.0, 0.2, 0.6])
@pytest.mark.parametrize(("prompts", "n"), [(16, 8), (64, 8), (256, 4), (256, 1)])
def test_intervals_cover_the_truth(prompts: int, n: int, effect: float, noise: float) -> None:
    found, truth = simulated(prompts, n, effect, noise)
    covered = np.mean([abs(estimate.change - truth) < estimate.reach for estimate in found])
    assert 0.92 <= covered <= 0.98
    spread = np.std([estimate.change for estimate in found]) / np.sqrt(REPEATS)
    assert np.mean([estimate.change for estimate in found]) == pytest.approx(truth, abs=4 * spread + 0.002)


def test_a_null_has_no_winner_and_an_effect_is_seen() -> None:
    null, _ = simulated(64, 8, 0.0, 0.4)
    assert np.mean([estimate.differs for estimate in null]) < 0.07
    effect, _ = simulated(64, 8, 0.2, 0.4)
    assert np.mean([estimate.differs and estimate.change > 0 for estimate in effect]) > 0.95


def test_below_the_bound_intervals_are_too_narrow_and_nothing_is_told() -> None:
    far, truth = simulated(16, 8, 0.6, 1.7)
    covered = np.mean([abs(estimate.change - truth) < estimate.reach for estimate in far])
    assert covered < 0.9, "so there has to be a bound"
    assert np.mean([estimate.tells for estimate in far]) < 0.02 and ENOUGH == 0.5
    assert together(far) is None or len([estimate for estimate in far if estimate.tells])


def test_the_same_policy_changes_nothing() -> None:
    scores = np.random.default_rng(0).random(32)
    for prompts in (np.repeat(np.arange(8), 4), np.arange(32), np.array([0] * 31 + [1])):
        same = estimated(scores, np.zeros(32), prompts.astype(str))
        assert same.change == pytest.approx(0, abs=1e-15) and same.error == pytest.approx(0, abs=1e-15)
        assert same.effective == pytest.approx(1) and same.score == pytest.approx(scores.mean())


def test_few_prompts_tell_nothing() -> None:
    scores, log_ratios, prompts = sample(np.random.default_rng(0), 7, 8, 0.2, 0.1)
    assert not estimated(scores, log_ratios, prompts).tells


def test_iterations_are_averaged() -> None:
    found, truth = simulated(64, 8, 0.2, 0.4)
    means = [together(found[first : first + 4]) for first in range(0, REPEATS, 4)]
    assert all(mean is not None for mean in means)
    covered = np.mean([abs(mean.change - truth) < mean.reach for mean in means if mean is not None])
    assert 0.9 <= covered <= 0.99
