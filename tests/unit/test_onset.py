"""The search for the iteration in which a gap begins to open, on simulated scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ratchet.flows.commands.tables import confidence
from ratchet.tasks.analysis.onset import SHARE, Onset, Rescored, interval, search
from tests.tiers import sampled


def steps(gaps: dict[int, float], error: float = 0.01) -> list[Rescored]:
    return [Rescored(iteration, gap, 0.0, error) for iteration, gap in gaps.items()]


def test_without_noise_the_search_is_binary_and_sure() -> None:
    looked: list[int] = []

    def look(iteration: int) -> Rescored:
        looked.append(iteration)
        return Rescored(iteration, 0.5 if iteration >= 11 else 0.0, 0.0, 1e-6)

    rescored, found = search(look, 63, more=9)
    assert found is not None
    assert (found.iteration, found.low, found.high, found.unseen) == (11, 11, 11, 0)
    assert len(looked) == len(rescored) == 8, "two ends, and log2 of 64 between them: no more can narrow it"
    assert [entry.iteration for entry in rescored] == sorted(looked)


def test_a_gap_that_does_not_grow_is_no_onset() -> None:
    rescored, found = search(lambda iteration: Rescored(iteration, 0.01 * (iteration > 3), 0.0, 0.01), 63, more=9)
    assert found is None
    assert [entry.iteration for entry in rescored] == [0, 63]


def test_the_interval_ends_where_a_gap_is_certainly_open_or_closed() -> None:
    # the threshold is 0.1, and its noise a tenth of that
    assert interval(steps({0: 0.0, 4: 0.02, 8: 0.1, 12: 0.2, 16: 1.0}), 8) == (5, 12)
    assert interval(steps({0: 0.0, 4: 0.09, 8: 0.1, 12: 0.11, 16: 1.0}), 8) == (1, 16)
    # what none of them shows, several in a row do: one at least was open
    many = {0: 0.0, **dict.fromkeys(range(4, 14), 0.125), 16: 1.0}
    assert interval(steps({0: 0.0, 4: 0.125, 16: 1.0}), 4) == (1, 16)
    assert interval(steps(many), 4)[1] < 14
    assert interval(steps({0: 0.0, 4: 0.2, 8: 0.0, 16: 1.0}), 9) == (9, 9), "the measurements contradict each other"


def test_a_search_that_noise_misled_comes_back() -> None:
    """The middle one seems closed by chance; each of its neighbours is open."""
    misled = lambda iteration: Rescored(iteration, 0.5 * (iteration >= 8 and iteration != 16), 0.0, 0.05)  # noqa: E731
    assert search(misled, 32)[1].iteration > 16  # type: ignore[union-attr]
    assert search(misled, 32, more=20)[1].iteration == 8  # type: ignore[union-attr]


@dataclass(frozen=True)
class Case:
    """A run with 16 prompts of 8 answers an iteration, whose policy learns to exploit its reward from `begin` on, at
    an iteration of its own, over about four times `slow` iterations."""

    last: int
    slow: float
    noise: float
    """Standard deviation of the reward of an answer, which is otherwise 1 for one that exploits it."""
    more: int


def searched(case: Case, trials: int) -> tuple[list[int], list[Onset]]:
    """Returns the true onsets of simulated runs, and those found."""
    generator = np.random.default_rng(0)
    truths, found = [], []
    for _ in range(trials):
        begin = case.last * generator.uniform(0.25, 0.75)
        rates = 0.4 / (1 + np.exp((begin - np.arange(case.last + 1)) / case.slow))

        def look(iteration: int, rates: np.ndarray = rates) -> Rescored:
            chances = np.clip(rates[iteration] * generator.uniform(0.5, 1.5, 16), 0, 1)
            exploits = generator.random((16, 8)) < chances[:, None]
            gaps = (exploits + case.noise * generator.normal(size=(16, 8))).mean(1)
            return Rescored(iteration, float(gaps.mean()), 0.0, float(gaps.std(ddof=1) / 4))

        onset = search(look, case.last, case.more)[1]
        if onset is not None:
            truths.append(int(np.argmax(rates > (1 - SHARE) * rates[0] + SHARE * rates[-1])))
            found.append(onset)
    return truths, found


@sampled(5)
@pytest.mark.parametrize(
    "case",
    [
        Case(last=15, slow=0.3, noise=0.0, more=0),
        Case(last=15, slow=1.5, noise=0.5, more=0),
        Case(last=15, slow=1.5, noise=0.5, more=8),
        Case(last=63, slow=6.0, noise=0.0, more=8),
        Case(last=63, slow=6.0, noise=0.5, more=8),
    ],
)
def test_the_interval_holds_the_onset_in_90_percent(case: Case) -> None:
    truths, found = searched(case, trials=150)
    covered = np.mean([onset.low <= truth <= onset.high for truth, onset in zip(truths, found, strict=True)])
    # two standard deviations of a share of 150 are 5 points; no upper bound, since few measurements are cautious
    assert covered > 0.9 - 0.05
    assert all(onset.low <= onset.iteration <= onset.high for onset in found)


def test_more_iterations_narrow_the_interval_as_they_are_asked_for() -> None:
    """What `--more` is asked for is what narrows the interval, until nothing is left that could."""
    for noise in (0.0, 0.5):
        widths = []
        for more in (0, 8, 16):
            _, found = searched(Case(last=31, slow=3.0, noise=noise, more=more), trials=60)
            widths.append(np.mean([onset.high - onset.low for onset in found]))
            unseen = [onset.unseen for onset in found]
        # searches of other lengths draw other noise: a mean of 60 moves by 5 %
        assert widths[0] > 1.2 * widths[1] and 1.05 * widths[1] >= widths[2]
        assert np.mean(unseen) < 4


@pytest.mark.parametrize(
    ("onset", "says"),
    [
        (Onset(3, 0.1, 3, 3, 0), "the 90 % interval is iteration 3 alone"),
        (Onset(3, 0.1, 2, 6, 0), "iterations 2 to 6, and all that could narrow it are scored: only more prompts"),
        (
            Onset(3, 0.1, 2, 6, 3),
            "iterations 2 to 6; `ratchet bisect run --more 7` scores 3 more of these to narrow it",
        ),
        (Onset(3, 0.1, 2, 60, 30), "`ratchet bisect run --more 12` scores 8 more of these"),
    ],
)
def test_what_is_said_of_the_confidence(onset: Onset, says: str) -> None:
    assert says in confidence(onset, "ratchet bisect run", 4)
