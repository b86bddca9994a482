"""A calculator: the policy writes ``<tool>12 * (3 + 4)</tool>`` and reads ``<result>84</result>``.

The expression is parsed (integers, ``+ - * / ( )``), never evaluated as code. Arithmetic is exact; a value that is not
an integer is written as a decimal. Anything else gives ``<result>error</result>``. A turn without a call ends the
trajectory.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ratchet.rlhf.data.formats import Messages
from ratchet.rlhf.environments.environment import Observation
from ratchet.rlhf.rewards.countdown import Malformed, evaluate, parse

OPEN, CLOSE = "<tool>", "</tool>"


class Environment:
    stop = (CLOSE,)

    def reset(self, messages: Messages, ground_truth: Any, extra_info: Any) -> None:
        """Does nothing: the calculator has no state."""

    def step(self, turn: str) -> Observation:
        start = turn.rfind(OPEN)
        if start < 0 or not turn.rstrip().endswith(CLOSE):
            return Observation(None)
        call = turn[start + len(OPEN) : turn.rindex(CLOSE)]
        return Observation(f"<result>{calculate(call)}</result>")


def calculate(expression: str) -> str:
    try:
        return written(evaluate(parse(expression)))
    except (Malformed, ZeroDivisionError):
        return "error"


def written(value: Fraction) -> str:
    """Formats a value as an integer, or with at most six decimals; exact until it is rounded, however large."""
    millionths = round(value * 10**6)
    whole, part = divmod(abs(millionths), 10**6)
    return f"{'-' if millionths < 0 else ''}{whole}.{part:06d}".rstrip("0").rstrip(".")
