"""Compares two settings by several runs of each, which differ only in their seed.

A difference is the mean score of the runs of B minus that of the runs of A, over the validation answers that all of
them gave. Its interval (95 %) covers the luck of the seeds and the noise of the prompts, as `intervals` describes, and
`smallest` is the effect that such runs would miss once in five times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import numpy as np

from ratchet.infra.runs.comparison import (
    Doubt,
    Rewards,
    changed_keys,
    falls_short,
    finite_or_none,
    judged,
    paired,
    paired_by_text,
    parted_at,
    rewards_of,
    scored_frames,
)
from ratchet.infra.runs.intervals import SideScores, Verdict, settings_estimate
from ratchet.infra.runs.run import Run
from ratchet.infra.store.run_store import VALIDATE
from ratchet.rlhf.config.reading import listed
from ratchet.rlhf.errors import UserError, counted

if TYPE_CHECKING:
    import pandas as pd

SEED = "run.seed "
"""How the description of a changed seed begins."""
FEWEST = 2
"""Number of runs without which a side shows no luck."""


@dataclass(frozen=True)
class SideRun:
    """A run of a side, and its score in the iteration of the verdict."""

    url: str
    seed: int | None
    """None if another trainer made its trajectories."""
    score: float


@dataclass(frozen=True)
class SettingsDifference:
    """The difference between the settings in one validation."""

    iteration: int
    prompts: int
    """Number of prompts that all runs answered."""
    a: float
    """Mean score of the runs of A over these prompts."""
    b: float
    difference: float
    """B minus A."""
    low: float | None
    """Lower end of the interval; None if there is only one prompt."""
    high: float | None
    smallest: float | None
    """The smallest effect that such runs would show with a probability of 80 %."""


@dataclass(frozen=True)
class SettingsComparison:
    """The runs of two settings, and the difference between their scores."""

    compares: Literal["settings"]
    a: tuple[SideRun, ...]
    b: tuple[SideRun, ...]
    config: tuple[str, ...]
    """The keys of the config that differ between the sides, such as ``actor.lr 1e-05 -> 2e-05``."""
    unknown: tuple[str, ...]
    """What the comparison cannot know, in sentences."""
    differences: tuple[SettingsDifference, ...]
    """One for each validation that all runs have."""
    rewards: Rewards | None
    """Changes to the meaning of a score between the sides; None if there are none."""
    unpaired: int
    """Answers that are left out, because another run has none to the same prompt."""
    iteration: int
    """The last iteration before which all runs were validated, to which the verdict refers."""
    prompts: int
    answers: int
    """Number of answers of each run behind the verdict."""
    difference: float
    low: float | None
    """Lower end of the interval; None for one prompt, or if all scores are equal."""
    high: float | None
    smallest: float | None
    """The smallest effect that these runs would show with a probability of 80 %."""
    spread: float
    """The range of all scores that were compared."""
    verdict: Verdict
    doubt: Doubt | None

    def falls_short(self, margin: float) -> bool:
        """True if B must not pass as A + `margin`: the whole interval is below it, or the rewards differ."""
        return falls_short(self.rewards, self.high, margin)


def compare_settings(a: Sequence[Run], b: Sequence[Run]) -> SettingsComparison:
    """Compares the setting of the runs `b` with that of the runs `a`.

    Args:
        a: Runs of the baseline, two at least, which differ only in their seed.
        b: Runs of the setting to judge, two at least.

    Raises:
        UserError: A side has one run, or runs of several settings or of one seed; or nothing pairs.
        Corrupt: An object is missing or damaged.
    """
    sides, runs = {"A": a, "B": b}, [*a, *b]
    _check(sides)
    differences: list[SettingsDifference] = []
    unpaired, ends = 0, list[float]()
    table: pd.DataFrame | None = None
    for iteration, frames in scored_frames(runs, "validation", 0):
        answered = _answered_by_all(runs, frames)
        unpaired += sum(map(len, frames)) - len(runs) * len(answered)
        if len(answered):
            table = answered
            scores = _scores(answered, len(a))
            differences.append(_difference(scores, iteration))
            values = answered[[*range(len(runs))]].to_numpy()
            ends += [float(values.min()), float(values.max())]
    if table is None:
        raise UserError(
            f"{listed([run.store.url.rpartition('/')[2] for run in runs])} have no validation in common: set "
            "validation.data and validation.every alike, or `ratchet resume` the runs that are behind"
        )
    last, values = differences[-1], table[[*range(len(runs))]].to_numpy()
    are_equal = bool((values == values[0, 0]).all())
    rewards = rewards_of((a[0], b[0]), last.iteration, VALIDATE)
    interval = (
        -np.inf if last.low is None or are_equal else last.low,
        np.inf if last.high is None or are_equal else last.high,
    )
    verdict, doubt = judged(interval, max(ends) - min(ends), rewards, are_equal=are_equal)
    means = iter(values.mean(0).tolist())
    _check_rewards(sides, last.iteration)
    return SettingsComparison(
        compares="settings",
        a=tuple(SideRun(run.store.url, _seed(run), next(means)) for run in a),
        b=tuple(SideRun(run.store.url, _seed(run), next(means)) for run in b),
        config=tuple(line for line in changed_keys([a[0].config, b[0].config]) if not line.startswith(SEED)),
        unknown=tuple(_unknown(sides)),
        differences=tuple(differences),
        rewards=rewards,
        unpaired=unpaired,
        iteration=last.iteration,
        prompts=last.prompts,
        answers=len(table),
        difference=last.difference,
        low=finite_or_none(interval[0]),
        high=finite_or_none(interval[1]),
        smallest=None if are_equal else last.smallest,
        spread=max(ends) - min(ends),
        verdict=verdict,
        doubt=doubt,
    )


def _seed(run: Run) -> int | None:
    return run.config.run.seed if run.trainer is None else None


def _name(run: Run) -> str:
    return run.store.url.rpartition("/")[2]


def _check(sides: dict[str, Sequence[Run]]) -> None:
    """Refuses runs that do not show the luck of one setting.

    Raises:
        UserError: A side has too few runs, a run is there twice, or runs of a side differ in more than their seed, or
            in nothing.
    """
    urls = [run.store.url for runs in sides.values() for run in runs]
    for url in urls:
        if urls.count(url) > 1:
            raise UserError(f"compare: {url} is there twice: name each run once")
    for side, runs in sides.items():
        if len(runs) < FEWEST:
            raise UserError(
                f"compare: side {side} has {counted(len(runs), 'run')}, whose luck cannot be told from the setting: "
                "name two at least, with other seeds"
            )
        for one, other in combinations(runs, 2):
            if one.trainer is not None or other.trainer is not None:
                continue  # what is a seed in their configs is not known
            changed = changed_keys([one.config, other.config])
            more = [line for line in changed if not line.startswith(SEED)]
            if more:
                raise UserError(
                    f"compare: {_name(one)} and {_name(other)} of side {side} differ in more than run.seed "
                    f"({'; '.join(more)}): name runs of one setting"
                )
            if not changed:
                raise UserError(
                    f"compare: {_name(one)} and {_name(other)} of side {side} have the same run.seed, "
                    f"{one.config.run.seed}: name runs with other seeds"
                )


def _check_rewards(sides: dict[str, Sequence[Run]], iteration: int) -> None:
    """Refuses runs of a side that the code of different rewards has scored. Raises `UserError`."""
    for side, runs in sides.items():
        for run in runs[1:]:
            if rewards_of((runs[0], run), iteration, VALIDATE) is not None:
                raise UserError(
                    f"compare: {_name(runs[0])} and {_name(run)} of side {side} were scored by other code of the "
                    "reward: name runs of one reward"
                )


def _unknown(sides: dict[str, Sequence[Run]]) -> Iterator[str]:
    """Says what the runs do not show: settings and seeds of other trainers' runs, and luck that a side shares."""
    of_others = [run for runs in sides.values() for run in runs if run.trainer is not None]
    if of_others:
        yield (
            f"whether the runs of a side differ only in their seed is unknown, since another trainer computed "
            f"{listed([_name(run) for run in of_others])}"
        )
    for side, runs in sides.items():
        shared = [at for one, other in combinations(runs, 2) if (at := parted_at(one, other)) not in (None, "0")]
        if shared:
            yield f"runs of side {side} share everything up to {shared[0]}: the interval covers only luck after it"


def _answered_by_all(runs: Sequence[Run], frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Pairs the answers of all runs to the same prompts: a row each, the scores of run k in column k."""
    own = all(run.trainer is None for run in runs)
    talk = any(run.config.rollout.agent is not None for run in runs)
    first = frames[0]
    table = first.set_index("trajectory_id")[["prompt_id", "score"]].rename(columns={"score": 0})
    for number, frame in enumerate(frames[1:], 1):
        pairs = paired(first, frame, same_text=not talk) if own else paired_by_text(first, frame)
        if pairs.empty:
            return table.iloc[:0]
        scores = pairs.set_index("trajectory_id_a")["score_b"].rename(number)
        table = table.join(scores, how="inner")
    return table


def _scores(table: pd.DataFrame, of_a: int) -> SideScores:
    """Groups the scores by prompt; the first `of_a` runs are those of A."""
    runs = [table[number].tolist() for number in range(table.shape[1] - 1)]
    return SideScores.of(table["prompt_id"].tolist(), runs[:of_a], runs[of_a:])


def _difference(scores: SideScores, iteration: int) -> SettingsDifference:
    estimate = settings_estimate(scores)
    a, b = (float(means.mean()) for means in scores.means)
    numbers = (finite_or_none(number) for number in (estimate.low, estimate.high, estimate.smallest))
    return SettingsDifference(iteration, len(scores.answers), a, b, scores.difference, *numbers)
