"""Checks that a rollout engine has the weights that it should have: it scores fixed texts, as the trainer does.

New weights that never reach an engine, or reach it in part, ruin a run quietly: it generates, scores and learns, with
another policy than the one that is updated. So the engine scores the same texts after each transfer of weights. With
:math:`t_i` the trainer's log-prob of token i, :math:`t'_i` the one before the last update, and :math:`r_i` the
engine's, all at temperature 1:

- The *difference* is :math:`\\frac1n \\sum_i |r_i - t_i| / (1 + |t_i|)`. It is relative, because the rounding of a
  log-prob grows with it. More than the tolerance means other weights. The first differences teach the
  tolerance: `MARGIN` times the largest of them, but at least the floor and at most the ceiling of the type
  (`BOUNDS`). Until then it is the ceiling.
- The engine has *stale* weights if it agrees with the trainer of before: if :math:`|r_i - t'_i| < |r_i - t_i|` for more
  than half of the tokens, by `CERTAIN` standard deviations of a fair coin. With the right weights it is half of them at
  most, however rounding is distributed, and half only if rounding hides the update. This sign test finds updates far
  below the tolerance.
- The engine also draws a few tokens after each text, whose log-probs it then computes again without its prefix cache.
  If the two differ by more than the tolerance, the *cache* holds what other weights computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ratchet.rlhf.rollout.engine import Scored

TEXTS = 8
TOKENS = 64
"""Length of a text, or less if the engine has no room for it."""
DRAWN = 8
"""Number of tokens that the engine draws after each text."""
MARGIN = 5.0
CERTAIN = 7.0
BOUNDS = {"float32": (2e-6, 2e-3), "float16": (2e-4, 5e-2), "bfloat16": (1e-3, 1e-1)}
"""The smallest and the largest tolerance by the type of the weights."""
QUANTIZED = (2e-2, 4e-1)
"""The same for engines that round the weights to 8 bits."""


@dataclass(frozen=True)
class Canary:
    """The trainer's side of a check."""

    texts: tuple[tuple[int, ...], ...]
    """Token ids."""
    log_probs: tuple[tuple[float, ...], ...]
    """The trainer's log-probs of each text's tokens but the first, in nats."""
    before: tuple[tuple[float, ...], ...] | None = None
    """The same before the last update; None: unknown."""


@dataclass(frozen=True)
class Finding:
    """The result of a check of one engine."""

    difference: float
    cache_difference: float
    """The same measure between the log-probs of the drawn tokens with and without the prefix cache."""
    tolerance: float
    problem: str | None
    """What is wrong with the engine's weights, as the end of a sentence that begins with the engine; None: nothing."""


def tolerance(learned: Sequence[float], dtype: str, *, quantized: bool) -> float:
    """Returns the difference above which an engine has other weights.

    Args:
        learned: differences of the first checks that passed; empty: there are not enough.
        dtype: type of the weights, such as ``bfloat16``.
        quantized: True if the engine rounds the weights further.
    """
    floor, ceiling = QUANTIZED if quantized else BOUNDS[dtype]
    return min(max(MARGIN * max(learned), floor), ceiling) if learned else ceiling


def difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the mean difference of log-probs `a` from `b`, relative to 1 + abs(b); infinite if one is not finite."""
    ours, theirs = np.asarray(a, float), np.asarray(b, float)
    relative = np.abs(ours - theirs) / (1 + np.abs(theirs))
    return float(relative.mean()) if np.isfinite(relative).all() else math.inf


def is_stale(engine: Sequence[float], now: Sequence[float], before: Sequence[float]) -> bool:
    """Returns True if an engine's log-probs are those of the weights before the last update, beyond doubt."""
    r, t, earlier = (np.asarray(values, float) for values in (engine, now, before))
    nearer = np.sign(np.abs(r - t) - np.abs(r - earlier))  # 1: to the log-probs of before
    return bool(nearer.sum() > CERTAIN * math.sqrt(len(nearer)))


def check(canary: Canary, scored: Sequence[Scored], limit: float) -> Finding:
    """Compares an engine's scores of the canary's texts with the trainer's.

    Args:
        scored: one per text.
        limit: see `tolerance`.
    """
    engine = [log_prob for text in scored for log_prob in text.log_probs]
    trainer = [log_prob for text in canary.log_probs for log_prob in text]
    found = difference(engine, trainer)
    cached = [log_prob for text in scored for log_prob in text.drawn_log_probs]
    again = [log_prob for text in scored for log_prob in text.again]
    cache = difference(cached, again) if again else 0.0
    before = None if canary.before is None else [log_prob for text in canary.before for log_prob in text]
    problem = None
    if before is not None and before != trainer and is_stale(engine, trainer, before):
        problem = "still has the weights from before the last update"
    elif found > limit:
        problem = (
            f"has other weights: on {len(scored)} fixed texts its log-probs differ from the trainer's by {found:.2g}"
        )
        problem += f" (relative to 1 + their size), and {limit:.2g} is usual"
    elif cache > limit:
        problem = (
            "has a prefix cache of other weights: log-probs after cached texts differ from those computed again by "
            f"{cache:.2g}, and {limit:.2g} is usual"
        )
    return Finding(found, cache, limit, problem)
