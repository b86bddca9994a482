"""Counts how often the intervals of `ratchet compare` cover the truth, and what they find, on simulated scores.

    OMP_NUM_THREADS=1 python benchmarks/coverage.py

Answers are right or wrong. Prompts differ in how hard they are and in what B gains on them; runs in the luck of their
seeds. Needs no model.
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np
from rich.console import Console
from rich.table import Table

from ratchet.infra.runs.intervals import interval, settings_estimate
from tests.simulated_scores import policies, scores_of

RUNS, PROMPTS, ANSWERS, SEEDS, EFFECTS = (2, 3, 5), (48, 256, 1024), (1, 4), (0.0, 0.02, 0.1), (0.0, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, help="simulated comparisons of each kind")
    trials, console = parser.parse_args().trials, Console()
    table = Table("policies: prompts", "answers", "effect", "covered", "found")
    for prompts, answers, effect in product(PROMPTS, ANSWERS, EFFECTS):
        generator = np.random.default_rng(0)
        drawn = [policies(scores_of(generator, 1, prompts, answers, effect=effect)) for _ in range(trials)]
        ends = np.array([interval(scores) for scores in drawn])
        table.add_row(f"{prompts}", f"{answers}", f"{effect:g}", *shares(ends, effect))
    console.print(table)
    table = Table("settings: runs a side", "prompts", "answers", "seeds", "effect", "covered", "found", "smallest")
    for runs, prompts, answers, seeds, effect in product(RUNS, PROMPTS, ANSWERS, SEEDS, EFFECTS):
        generator = np.random.default_rng(0)
        sides = [scores_of(generator, runs, prompts, answers, seeds=seeds, effect=effect) for _ in range(trials)]
        estimates = [settings_estimate(scores) for scores in sides]
        ends = np.array([(estimate.low, estimate.high) for estimate in estimates])
        smallest = np.median([estimate.smallest for estimate in estimates])
        row = (f"{runs}", f"{prompts}", f"{answers}", f"{seeds:g}", f"{effect:g}")
        table.add_row(*row, *shares(ends, effect), f"{smallest:.3f}")
    console.print(table)


def shares(ends: np.ndarray, effect: float) -> tuple[str, str]:
    """Returns the share of intervals that hold the effect, and of those that lie above 0."""
    covered = (ends[:, 0] <= effect) & (effect <= ends[:, 1])
    return f"{covered.mean():.1%}", f"{(ends[:, 0] > 0).mean():.1%}"


if __name__ == "__main__":
    main()
