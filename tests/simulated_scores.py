"""Scores of runs that never ran: what intervals of differences should cover is known."""

from __future__ import annotations

import numpy as np

from ratchet.infra.runs.intervals import PairedScores, SideScores


def scores_of(
    generator: np.random.Generator,
    runs: int,
    prompts: int,
    answers: int,
    *,
    seeds: float = 0.0,
    effect: float = 0.0,
    apart: float = 0.1,
) -> SideScores:
    """Draws answers that are right or wrong. Prompts differ in how hard they are, and in what B gains on them (`effect`
    plus or minus `apart`); runs in their luck, of standard deviation `seeds`."""
    hard, gain = generator.uniform(0.4, 0.6, prompts), effect + apart * generator.choice([-1, 1], prompts)
    sides = []
    for sign in (-0.5, 0.5):
        luck = generator.normal(0, seeds, (runs, 1)) if seeds else np.zeros((runs, 1))
        sides.append(generator.binomial(answers, np.clip(hard + sign * gain + luck, 0, 1)).astype(float))
    return SideScores(sides[0], sides[1], np.full(prompts, answers))


def policies(sides: SideScores) -> PairedScores:
    return PairedScores(sides.a[0], sides.b[0], sides.answers)
