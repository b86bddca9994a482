"""The check of the rollout's weights, by simulation: what it finds, and that it finds nothing if nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.infra.store.records import CANARIES
from ratchet.rlhf.rollout.canary import BOUNDS, MARGIN, TEXTS, TOKENS, Canary, check, difference, is_stale, tolerance
from ratchet.rlhf.rollout.engine import Scored

TOKENS_IN_ALL = TEXTS * (TOKENS - 1)
SYNCS = 1000


def history(
    update: float, noise: float, seed: int, *, stale: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Log-probs of the engine, of the trainer, and of the trainer before, in a run whose policy drifts.

    Rounding has heavy tails (Student's t with 3 degrees of freedom), grows with the log-prob, and is drawn anew after
    each update on both sides. With `stale` the engine keeps the weights from before the last update.
    """
    numbers = np.random.default_rng(seed)

    def rounded(values: np.ndarray) -> np.ndarray:
        return values + noise * (1 + np.abs(values)) * numbers.standard_t(3, len(values))

    old = -numbers.exponential(2.0, TOKENS_IN_ALL)
    before = rounded(old)
    for _ in range(SYNCS):
        new = np.minimum(old + update * (1 + np.abs(old)) * numbers.normal(size=TOKENS_IN_ALL), 0.0)
        now = rounded(new)
        yield rounded(old if stale else new), now, before
        old, before = new, now


@pytest.mark.parametrize("noise", [1e-7, 1e-3])
@pytest.mark.parametrize("update", [0.0, 0.3, 1.0, 30.0])
def test_a_thousand_sound_transfers_raise_no_alarm(update: float, noise: float) -> None:
    """Whatever the updates, in sizes of the rounding; without any, the engine is as near to the one as to the other."""
    dtype = "float32" if noise < 1e-5 else "bfloat16"
    learned: list[float] = []
    for engine, now, before in history(update * noise, noise, seed=1):
        limit = tolerance(learned if len(learned) == CANARIES else (), dtype, quantized=False)
        finding = check(Canary(((),), (tuple(now),), (tuple(before),)), [Scored(tuple(engine))], limit)
        assert finding.problem is None
        if len(learned) < CANARIES:
            learned.append(finding.difference)


@pytest.mark.parametrize(("update", "least"), [(2.0, 0.05), (3.0, 0.9), (5.0, 1.0)])
def test_old_weights_are_found_below_the_tolerance(update: float, least: float) -> None:
    """Share of transfers after which an engine that kept its old weights is found, by the size of updates in sizes of
    the rounding."""
    noise, found, within = 1e-3, 0, 0
    for engine, now, before in history(update * noise, noise, seed=2, stale=True):
        found += is_stale(engine, now, before)
        within += difference(engine, now) < MARGIN * 1.6 * noise
    assert found >= least * SYNCS
    assert within == SYNCS, "the tolerance alone would find none"


def test_the_tolerance_is_learned_within_bounds() -> None:
    for dtype, (floor, ceiling) in BOUNDS.items():
        assert tolerance((), dtype, quantized=False) == ceiling
        assert tolerance([0.0] * CANARIES, dtype, quantized=False) == floor
        assert tolerance([1.0] * CANARIES, dtype, quantized=False) == ceiling
        assert tolerance([0.0, floor, 0.0], dtype, quantized=False) == pytest.approx(MARGIN * floor)
    assert tolerance((), "bfloat16", quantized=True) > tolerance((), "bfloat16", quantized=False)


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=20), st.floats(1e-3, 10))
def test_the_difference_is_that_of_its_definition(log_probs: list[float], shift: float) -> None:
    a = np.array(log_probs)
    assert difference(log_probs, log_probs) == 0
    assert difference(a + shift, a) == pytest.approx(np.mean(shift / (1 + np.abs(a))))
    assert difference([*log_probs, np.nan], [*log_probs, -1.0]) == np.inf


def test_each_problem_has_its_words() -> None:
    text = tuple(range(4))
    numbers = np.random.default_rng(0)
    now, before = (tuple(-numbers.exponential(1.0, 64)) for _ in range(2))
    canary = Canary((text,), (now,), (before,))
    assert check(canary, [Scored(now)], 1e-3).problem is None
    assert "still has the weights from before" in (check(canary, [Scored(before)], 1e-3).problem or "")
    other = tuple(value - 1 for value in now)
    assert "has other weights" in (check(canary, [Scored(other)], 1e-3).problem or "")
    cached = Scored(now, (1, 2), (-1.0, -2.0), (-1.0, -2.5))
    assert "prefix cache" in (check(canary, [cached], 1e-3).problem or "")
    assert check(Canary((text,), (now,), now and (now,)), [Scored(now)], 1e-3).problem is None, "an update was skipped"
