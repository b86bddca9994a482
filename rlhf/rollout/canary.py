"""Checks that a rollout engine has the weights that it should have: it scores fixed texts, as the trainer does.

New weights that never reach an engine, or reach it in part, ruin a run quietly: it generates, scores and learns, with
another policy than the one that is updated. So the engine scores the same texts after each transfer of weights. With
:math:`t_i` the trainer's log-prob of token i, :math:`r_i` the engine's, and :math:`t'_i` and :math:`r'_i` those of the
check of other weights before, all at temperature 1:

- The *difference* is :math:`\\frac1n \\sum_i |r_i - t_i| / (1 + |t_i|)`. It is relative, because the rounding of a
  log-prob grows with it. More than the tolerance means other weights. The first differences teach the
  tolerance: `MARGIN` times the largest of them, but at least the floor and at most the ceiling of the type
  (`BOUNDS`). Until then it is the ceiling.
- The engine has *stale* weights if it agrees with the trainer of before, and has not changed. It agrees if
  :math:`|r_i - t'_i| < |r_i - t_i|` for more than half of the tokens, by `CERTAIN` standard deviations of a fair coin.
  Rounding that leans to one side could do that, too, while the policy moves to the other. So the engine's change,
  :math:`r_i - r'_i`, must also be nearer to 0 than to the trainer's, :math:`t_i - t'_i`, for the share `UNCHANGED` of
  the tokens; rounding alone makes it 65 % at most. This finds updates far below the tolerance.
- The engine also draws a few tokens after each text, whose log-probs it then computes again without its prefix cache.
  If the two differ by more than the tolerance, the *cache* holds what other weights computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
UNCHANGED = 0.75
BOUNDS = {"float32": (2e-6, 2e-3), "float16": (2e-4, 5e-2), "bfloat16": (1e-3, 1e-1)}
"""The smallest and the largest tolerance by the type of the weights."""
QUANTIZED = (2e-2, 4e-1)
"""The same for engines that round the weights to 8 bits."""


LogProbs = tuple[tuple[float, ...], ...]
"""Log-probs of each text's tokens but the first, in nats."""


@dataclass(frozen=True)
class Before:
    """The last check of other weights."""

    trainer: LogProbs
    engines: Mapping[str, LogProbs]
    """By name."""


@dataclass(frozen=True)
class Canary:
    """The trainer's side of a check."""

    texts: tuple[tuple[int, ...], ...]
    """Token ids."""
    log_probs: LogProbs
    before: Before | None = None
    """None: there is none of these texts."""


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


def is_stale(
    engine: Sequence[float], trainer: Sequence[float], engine_before: Sequence[float], trainer_before: Sequence[float]
) -> bool:
    """Returns True if an engine's log-probs are those of the weights before the last update, beyond doubt."""
    r, t, r_before, t_before = (
        np.asarray(values, float) for values in (engine, trainer, engine_before, trainer_before)
    )
    nearer = np.sign(np.abs(r - t) - np.abs(r - t_before))  # 1: to the log-probs of before
    agrees = nearer.sum() > CERTAIN * math.sqrt(len(nearer))
    unchanged = np.abs(r - r_before) < np.abs((r - r_before) - (t - t_before))
    return bool(agrees and unchanged.mean() > UNCHANGED)


def check(canary: Canary, name: str, scored: Sequence[Scored], limit: float) -> Finding:
    """Compares an engine's scores of the canary's texts with the trainer's.

    Args:
        name: name of the engine.
        scored: one per text.
        limit: see `tolerance`.
    """
    engine, trainer = _flat([text.log_probs for text in scored]), _flat(canary.log_probs)
    found = difference(engine, trainer)
    again = _flat([text.again for text in scored])
    cache = difference(_flat([text.drawn_log_probs for text in scored]), again) if again else 0.0
    before = canary.before
    problem = None
    if (
        before is not None
        and before.trainer != canary.log_probs
        and name in before.engines
        and is_stale(engine, trainer, _flat(before.engines[name]), _flat(before.trainer))
    ):
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


def _flat(texts: Sequence[Sequence[float]]) -> list[float]:
    return [log_prob for text in texts for log_prob in text]
