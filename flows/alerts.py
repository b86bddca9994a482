"""Says in which iterations a run shows a known failure of training, by fixed bounds on its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Metrics = Mapping[str, float]

ENTROPY_SHARE = 0.1
"""Share of the first iteration's entropy below which the entropy has collapsed."""
TRUNCATED_SHARE = 0.25
CLIPPED_SHARE = 0.3
MISMATCH = 0.1
"""KL from the rollout to the trainer in nats per token; engines of equal precision are below 0.01."""


@dataclass(frozen=True)
class Alert:
    """Iterations in a row that show a failure."""

    metric: str
    """The metric that shows it."""
    first: int
    last: int
    text: str


@dataclass(frozen=True)
class _Rule:
    metric: str
    text: str
    holds: Callable[[Metrics, Metrics], bool]
    """Whether an iteration shows the failure, given its metrics and those of the first iteration."""


def is_collapsed(metrics: Metrics) -> bool:
    """True if all advantages are 0: the answers to each prompt score alike, and nothing is learned."""
    return metrics.get("critic/advantages/min") == metrics.get("critic/advantages/max") == 0


def _above(name: str, bound: float) -> Callable[[Metrics, Metrics], bool]:
    return lambda metrics, _: metrics.get(name, 0.0) > bound


def _entropy_fell(metrics: Metrics, first: Metrics) -> bool:
    return metrics.get("actor/entropy", float("inf")) < ENTROPY_SHARE * first.get("actor/entropy", 0.0)


RULES = (
    _Rule(
        "critic/score/mean",
        "all advantages are 0: the answers to each prompt score alike, and nothing is learned",
        lambda metrics, _: is_collapsed(metrics),
    ),
    _Rule("actor/entropy", f"the entropy is below {100 * ENTROPY_SHARE:.0f} % of the first iteration's", _entropy_fell),
    _Rule(
        "response_length/clip_ratio",
        f"more than {100 * TRUNCATED_SHARE:.0f} % of the responses are cut off at rollout.max_response_tokens",
        _above("response_length/clip_ratio", TRUNCATED_SHARE),
    ),
    _Rule(
        "actor/pg_clipfrac",
        f"the ratio of more than {100 * CLIPPED_SHARE:.0f} % of the tokens is outside the clip range",
        _above("actor/pg_clipfrac", CLIPPED_SHARE),
    ),
    _Rule(
        "canary/problem",
        "the rollout has other weights than the actor (docs/rollouts.md, Did they arrive?)",
        _above("canary/problem", 0.5),
    ),
    _Rule(
        "rollout_corr/k3_kl",
        f"rollout and trainer differ by more than {MISMATCH} nats per token",
        _above("rollout_corr/k3_kl", MISMATCH),
    ),
)


def alerts_of(rows: Sequence[Metrics]) -> list[Alert]:
    """Returns the failures that iterations show, by rule and in order.

    Args:
        rows: the metrics of iterations in order, each with `iteration`.
    """
    alerts: list[Alert] = []
    for rule in RULES:
        is_open = False
        for row in rows:
            iteration, holds = int(row["iteration"]), rule.holds(row, rows[0])
            if holds and is_open:
                alerts[-1] = Alert(rule.metric, alerts[-1].first, iteration, rule.text)
            elif holds:
                alerts.append(Alert(rule.metric, iteration, iteration, rule.text))
            is_open = holds
    return alerts
