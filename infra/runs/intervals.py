"""Intervals (95 %) of differences between scores: of two policies, and of two settings.

*Policies*: both answer the same prompts, and a bootstrap resamples the prompts, each with all of its answers, since
answers to one prompt are not independent. The interval says what other prompts would show of the same two policies.

*Settings*: each has several runs, which differ only in their seed, and the interval says what other seeds and other
prompts would show. The difference :math:`D` between the mean scores of the sides varies with the runs and
with the prompts,

.. math::
    V_r = \\frac{s_A^2}{n_A} + \\frac{s_B^2}{n_B}, \\qquad V_p = \\max(0, v - e)

where :math:`s^2` is the variance of the scores of a side's runs, which also holds the noise of their answers, :math:`v`
is the variance of :math:`D` over prompts, and :math:`e` the part of :math:`v` that is noise of the answers and counted
already. The ends are :math:`D \\pm \\sqrt{t_r^2 V_r + t_p^2 V_p}`, with quantiles of Student distributions: two parts
that are known unequally well are added so, and cover at least as much as each alone. The degrees of freedom of
:math:`t_r` are those of two sides whose seeds are equally lucky.

To resample runs, as a hierarchical bootstrap does, needs more than two or three runs a side: it covers far too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Verdict = Literal["B is better", "B is worse", "no difference", "cannot tell"]

RESAMPLES = 2000
"""With other samples, the ends of an interval would move by about 2 % of its width. Samples are fixed: the same scores
always give the same interval."""
ENDS = (0.025, 0.975)
POWER = 0.8
"""The probability with which the smallest effect that is worth naming would be found."""
TOO_WIDE = 0.5
"""Share of the range of scores: a wider interval that contains 0 says nothing."""


@dataclass(frozen=True)
class PairedScores:
    """The scores of two runs for the same answers, summed by prompt; arrays of shape (prompts,)."""

    a: np.ndarray
    b: np.ndarray
    answers: np.ndarray
    """The number of answers to each prompt that both runs gave."""

    @classmethod
    def of(cls, prompts: Sequence[str], a: Sequence[float], b: Sequence[float]) -> PairedScores:
        """Groups the scores of A and B for the same answers by the prompts of these answers."""
        _, numbers = np.unique(np.asarray(prompts), return_inverse=True)
        return cls(np.bincount(numbers, a), np.bincount(numbers, b), np.bincount(numbers))

    @property
    def means(self) -> tuple[float, float]:
        """The mean score over all answers, of A and of B."""
        return float(self.a.sum() / self.answers.sum()), float(self.b.sum() / self.answers.sum())

    @property
    def difference(self) -> float:
        """The mean of B minus that of A."""
        return float((self.b - self.a).sum() / self.answers.sum())

    def resampled(self) -> np.ndarray:
        """Resamples the prompts with replacement. Returns differences of shape (RESAMPLES,); infinite ones for a single
        prompt."""
        count = len(self.answers)
        if count < 2:
            return np.resize([-np.inf, np.inf], RESAMPLES)
        drawn = _draws(count)
        differences: np.ndarray = (drawn @ (self.b - self.a)) / (drawn @ self.answers)
        # a bootstrap is too narrow by this factor: the mean of n prompts is nearer to them than the truth is
        wider: np.ndarray = self.difference + (differences - self.difference) * np.sqrt(count / (count - 1))
        return wider


@lru_cache(maxsize=1)
def _draws(count: int) -> np.ndarray:
    """Counts each of `count` prompts in each sample; shape (RESAMPLES, count)."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(np.float32)


def interval(scores: PairedScores) -> tuple[float, float]:
    """Returns the ends of the interval of the difference between two policies; infinite if there is only one prompt."""
    differences = scores.resampled()
    if not np.isfinite(differences).all():
        return -np.inf, np.inf
    low, high = np.quantile(differences, ENDS)
    return float(low), float(high)


@dataclass(frozen=True)
class SideScores:
    """The scores of the runs of two sides for the same answers, summed by prompt."""

    a: np.ndarray
    """Of shape (runs of A, prompts)."""
    b: np.ndarray
    answers: np.ndarray
    """The number of answers to each prompt that all runs gave; of shape (prompts,)."""

    @classmethod
    def of(cls, prompts: Sequence[str], a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> SideScores:
        """Groups the scores of all runs for the same answers, a row for each run, by the prompts of these answers."""
        _, numbers = np.unique(np.asarray(prompts), return_inverse=True)
        sums = [np.array([np.bincount(numbers, run) for run in side]) for side in (a, b)]
        return cls(sums[0], sums[1], np.bincount(numbers))

    @property
    def means(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean score of each run of A, and of each of B."""
        total = self.answers.sum()
        return self.a.sum(1) / total, self.b.sum(1) / total

    @property
    def difference(self) -> float:
        """The mean over the runs of B minus that over the runs of A."""
        a, b = self.means
        return float(b.mean() - a.mean())


@dataclass(frozen=True)
class Estimate:
    """What some runs show of the difference between two settings."""

    low: float
    """Lower end of the interval; infinite, as the others, if there is only one prompt."""
    high: float
    smallest: float
    """The smallest effect that such runs would show with probability `POWER`."""


def settings_estimate(scores: SideScores) -> Estimate:
    """Returns the interval of the difference between two settings, and the smallest effect that such runs would show.

    Args:
        scores: The scores of the runs, two at least on each side.
    """
    count = len(scores.answers)
    if count < 2:
        return Estimate(-np.inf, np.inf, np.inf)
    sides, runs = (scores.a, scores.b), np.array([len(scores.a), len(scores.b)])
    total = scores.answers.sum()
    of_runs = np.array([means.var(ddof=1) for means in scores.means]) / runs
    of_answers = sum(_of_answers(side, scores.answers) / len(side) for side in sides)
    gains = scores.b.mean(0) - scores.a.mean(0)
    over_prompts = _of_mean(gains - scores.difference * scores.answers) / total**2
    # if seeds move both sides alike
    freedom = float((1 / runs).sum() ** 2 / (1 / (runs**2 * (runs - 1))).sum())
    by_runs, by_prompts = float(of_runs.sum()), max(0.0, over_prompts - of_answers)
    half = np.hypot(student(ENDS[1], freedom) * by_runs**0.5, student(ENDS[1], count - 1) * by_prompts**0.5)
    # A variance of few runs is more often too small than too large: divided by the median of its distribution, it is
    # as often too large. And no seeds are so alike that the noise of the prompts goes away.
    by_runs /= (1 - 2 / (9 * freedom)) ** 3
    seen = [student(ENDS[1], df) + student(POWER, df) for df in (freedom, count - 1)]
    smallest = max(np.hypot(seen[0] * by_runs**0.5, seen[1] * by_prompts**0.5), seen[1] * over_prompts**0.5)
    return Estimate(scores.difference - float(half), scores.difference + float(half), float(smallest))


def _of_mean(deviations: np.ndarray) -> float:
    """Returns the variance of the sum of prompts' deviations from their mean."""
    count = deviations.shape[-1]
    return float((deviations**2).sum() * count / (count - 1))


def _of_answers(side: np.ndarray, answers: np.ndarray) -> float:
    """Returns the variance of a run's mean that its answers alone explain: what remains of the scores of a side's runs
    without the mean of each run and of each prompt."""
    apart = side - side.mean(0)
    apart = apart - apart.sum(1, keepdims=True) / answers.sum() * answers
    return _of_mean(apart) / float(answers.sum()) ** 2 / (len(side) - 1)


@lru_cache(maxsize=256)
def student(probability: float, freedom: float) -> float:
    """Returns the quantile of a Student distribution, to about four digits.

    Args:
        probability: Between 0.5 and 1.
        freedom: Degrees of freedom, 1 or more.
    """
    # t = sqrt(freedom) tan(angle): the density of the angle is a power of its cosine
    angles = np.linspace(0, np.pi / 2, 2_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = np.interp(2 * probability - 1, mass / mass[-1], angles)
    return float(np.sqrt(freedom) * np.tan(angle))


def verdict_of(low: float, high: float, spread: float) -> Verdict:
    """Returns the verdict on B of an interval. `spread` is the range of the scores of both runs."""
    if low > 0:
        return "B is better"
    if high < 0:
        return "B is worse"
    return "cannot tell" if high - low > TOO_WIDE * spread else "no difference"
