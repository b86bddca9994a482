"""The check of the rollout's weights, by simulation: what it finds, and that it finds nothing if nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.infra.store.records import CANARIES
from ratchet.rlhf.rollout.canary import (
    BOUNDS,
    MARGIN,
    TEXTS,
    TOKENS,
    Before,
    Canary,
    Finding,
    check,
    difference,
    is_stale,
    tolerance,
)
from ratchet.rlhf.rollout.engine import Scored
from tests.tiers import sampled

TOKENS_IN_ALL = TEXTS * (TOKENS - 1)
SYNCS = 1000


Values = np.ndarray
Checks = Iterator[tuple[Values, Values, Values, Values]]


def history(update: float, noise: float, seed: int, *, stale: bool = False, lean: float = 0.0) -> Checks:
    """Yields log-probs of engine and trainer, and of engine and trainer before, in a run whose policy drifts.

    Rounding has heavy tails (Student's t with 3 degrees of freedom), grows with the log-prob, and is drawn anew after
    each update on both sides. With `stale` the engine keeps the weights from before the last update, each time anew.
    With `lean` the engine's rounding leans to the side from which the policy comes, by so many sizes of the rounding.
    """
    numbers = np.random.default_rng(seed)
    side = np.sign(numbers.normal(size=TOKENS_IN_ALL))

    def rounded(values: Values) -> Values:
        return values + noise * (1 + np.abs(values)) * numbers.standard_t(3, len(values))

    old = -numbers.exponential(2.0, TOKENS_IN_ALL)
    before, engine_before = rounded(old), rounded(old) - lean * noise * side
    for _ in range(SYNCS):
        moved = side if lean else numbers.normal(size=TOKENS_IN_ALL)
        new = np.minimum(old + update * (1 + np.abs(old)) * moved, 0.0)
        now, engine = rounded(new), rounded(old if stale else new) - lean * noise * (1 + np.abs(old)) * side
        yield engine, now, rounded(old) if stale else engine_before, before
        old, before, engine_before = new, now, engine


def finding_of(values: tuple[Values, Values, Values, Values], limit: float) -> Finding:
    engine, now, engine_before, before = (tuple(each.tolist()) for each in values)
    return check(Canary(((),), (now,), Before((before,), {"": (engine_before,)})), "", [Scored(engine)], limit)


@sampled(4)
@pytest.mark.parametrize("lean", [0.0, 3.0])
@pytest.mark.parametrize("noise", [1e-7, 1e-3])
@pytest.mark.parametrize("update", [0.0, 0.3, 1.0, 30.0])
def test_a_thousand_sound_transfers_raise_no_alarm(update: float, noise: float, lean: float) -> None:
    """Whatever the updates, in sizes of the rounding, and even if rounding leans against them."""
    dtype = "float32" if noise < 1e-5 else "bfloat16"
    learned: list[float] = []
    for values in history(update * noise, noise, seed=1, lean=lean):
        limit = tolerance(learned if len(learned) == CANARIES else (), dtype, quantized=False)
        finding = finding_of(values, limit)
        assert finding.problem is None
        if len(learned) < CANARIES:
            learned.append(finding.difference)


@pytest.mark.parametrize(("update", "least"), [(3.0, 0.3), (5.0, 0.98), (8.0, 1.0)])
def test_old_weights_are_found_below_the_tolerance(update: float, least: float) -> None:
    """Share of transfers after which an engine that kept its old weights is found, by the size of updates in sizes of
    the rounding."""
    noise, found, within = 1e-3, 0, 0
    for engine, now, engine_before, before in history(update * noise, noise, seed=2, stale=True):
        found += is_stale(engine, now, engine_before, before)
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
    now, before = (tuple((-numbers.exponential(1.0, 256)).tolist()) for _ in range(2))
    canary = Canary((text,), (now,), Before((before,), {"a": (before,)}))
    assert check(canary, "a", [Scored(now)], 1e-3).problem is None
    assert "still has the weights from before" in (check(canary, "a", [Scored(before)], 1e-3).problem or "")
    assert "has other weights" in (check(canary, "b", [Scored(before)], 1e-3).problem or ""), "another engine"
    other = tuple(value - 1 for value in now)
    assert "has other weights" in (check(canary, "a", [Scored(other)], 1e-3).problem or "")
    cached = Scored(now, (1, 2), (-1.0, -2.0), (-1.0, -2.5))
    assert "prefix cache" in (check(canary, "a", [cached], 1e-3).problem or "")
    skipped = Canary((text,), (now,), Before((now,), {"a": (now,)}))
    assert check(skipped, "a", [Scored(now)], 1e-3).problem is None, "an update was skipped"
