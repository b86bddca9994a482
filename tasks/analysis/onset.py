"""Finds the iteration in which a gap begins to open, from noisy measurements of few iterations.

The gap counts as open from the iteration on, the *onset*, in which it has grown by `SHARE` of its growth from the first
iteration to the last. A binary search measures as few iterations as it needs. Where the noise misleads it, it ends
beside the onset, so an interval of iterations comes with it. A measured iteration was certainly *open*, or certainly
*closed*, if its gap is above or below the threshold by `CERTAIN_OF_INTERVAL` standard errors; of several measured
iterations in a row whose mean gap is, at least one was. The onset is not after a last one that was open, and after a
first one that was closed.

The interval holds the onset in at least 90 % of simulated searches (`tests/unit/test_onset.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

SHARE = 0.1
"""Share of the gap's total growth at which it counts as open."""
CERTAIN = 3.0
"""Standard errors by which a gap has to grow."""
CERTAIN_OF_INTERVAL = 2.1
"""Standard errors by which a mean gap must differ from the threshold to bound the interval."""
MOST_MORE = 8
"""Number of further iterations that are worth asking for at a time."""


@dataclass(frozen=True)
class Rescored:
    """The trajectories of an iteration under both rewards."""

    iteration: int
    reward: float
    """Mean score in the run."""
    strict: float
    """Mean score under the stricter reward."""
    error: float
    """Standard error of the gap over prompts."""

    @property
    def gap(self) -> float:
        return self.reward - self.strict


@dataclass(frozen=True)
class Onset:
    """Where a gap began to open."""

    iteration: int
    """The first measured iteration whose gap is open, as far as the search can say."""
    threshold: float
    low: int
    """The first iteration of the 90 % interval."""
    high: int
    """The last iteration of the interval."""
    unseen: int
    """Number of iterations that were not measured, and could narrow the interval."""


def search(look: Callable[[int], Rescored], last: int, more: int = 0) -> tuple[list[Rescored], Onset | None]:
    """Searches the iterations 0 to `last`.

    Args:
        look: Measures the gap in an iteration.
        last: The last iteration, 1 or more.
        more: The number of iterations to measure beyond the search, as far as they can narrow the interval.

    Returns:
        The measured iterations, in order, and the onset; None if the gap has not grown by more than its noise.
    """
    seen = {iteration: look(iteration) for iteration in (0, last)}
    first, final = seen[0], seen[last]
    grown, noise = final.gap - first.gap, float(np.hypot(final.error, first.error))
    if grown <= CERTAIN * noise or grown <= 0:
        return _ordered(seen), None
    threshold = first.gap + max(SHARE * grown, CERTAIN * first.error)
    below, above = 0, last
    while above - below > 1:
        between = (below + above) // 2
        seen[between] = look(between)
        below, above = (below, between) if seen[between].gap > threshold else (between, above)
    for _ in range(more):
        below, above = _parted(_ordered(seen), threshold)
        low, high = interval(_ordered(seen), above)
        wanted = (below + above) // 2 if above - below > 1 else _most_telling(seen, low, high)
        if wanted is None:
            break
        seen[wanted] = look(wanted)
    _, above = _parted(_ordered(seen), threshold)
    low, high = interval(_ordered(seen), above)
    return _ordered(seen), Onset(above, threshold, low, high, len(_unseen(seen, low, high)))


def _parted(rescored: Sequence[Rescored], threshold: float) -> tuple[int, int]:
    """Parts the measured iterations in a closed and an open half, so that the gaps fit best: the sum of what those of
    the open half have above the threshold, and the others below it, is largest.

    Returns:
        The last iteration of the closed half, and the first of the open one; after a binary search, its result.
    """
    above = np.array([entry.gap for entry in rescored]) - threshold
    fits = above[::-1].cumsum()[::-1][1:] - above.cumsum()[:-1]
    place = int(fits.argmax())
    return rescored[place].iteration, rescored[place + 1].iteration


def _ordered(seen: Mapping[int, Rescored]) -> list[Rescored]:
    return [seen[iteration] for iteration in sorted(seen)]


def interval(rescored: Sequence[Rescored], found: int) -> tuple[int, int]:
    """Returns the first and last iteration in which the gap may have begun to open.

    Args:
        rescored: The measured iterations, in order, of which the first and the last define the threshold.
        found: An iteration that is in the interval whatever the measurements say.
    """
    first, final = rescored[0], rescored[-1]
    threshold = (1 - SHARE) * first.gap + SHARE * final.gap
    # few prompts may all agree, and their gaps then seem to be without noise
    usual = float(np.mean([entry.error**2 for entry in rescored]))
    low, high = 1, final.iteration
    between = rescored[1:-1]
    for start in range(len(between)):
        for end in range(start + 1, len(between) + 1):
            window = between[start:end]
            above = float(np.mean([entry.gap for entry in window])) - threshold
            noise = sum((entry.error**2 + usual) / 2 for entry in window) / len(window) ** 2
            error = (noise + ((1 - SHARE) * first.error) ** 2 + (SHARE * final.error) ** 2) ** 0.5
            if above > CERTAIN_OF_INTERVAL * error:
                high = min(high, window[-1].iteration)
            if above < -CERTAIN_OF_INTERVAL * error:
                low = max(low, window[0].iteration + 1)
    return min(low, found), max(high, found)


def _unseen(seen: Mapping[int, Rescored], low: int, high: int) -> list[int]:
    """Returns the iterations whose measurement could narrow the interval: the gap is open in the last one anyway."""
    return [iteration for iteration in range(low, high) if iteration not in seen]


def _most_telling(seen: Mapping[int, Rescored], low: int, high: int) -> int | None:
    """Returns the middle of the longest stretch of the interval that was not measured."""
    ends = [low - 1, *(iteration for iteration in sorted(seen) if low <= iteration < high), high]
    begin, end = max(pairwise(ends), key=lambda stretch: stretch[1] - stretch[0])
    return (begin + end) // 2 if end - begin > 1 else None
