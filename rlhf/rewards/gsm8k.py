"""Grade-school maths (GSM8K, arXiv 2110.14168): 1 if the final number is right.

`strict` reads the number after the last ``####``, as the dataset's own solutions end; `flexible` the last number of
all. Thousands separators, ``$``, ``%``, a trailing ``.00`` and the like make no difference; values are compared
exactly.
"""

import re
from decimal import Decimal
from typing import Any, Literal

from ratchet.rlhf.rewards.functions import continued

TAIL = 2_000
"""Length of the end of the response that is read, in characters."""

_MINUS = r"[-+\u2212]"
# at the number, and not a dash between words, nor that of 5-3; or, after a character that precedes values, with a space
_SIGN = rf"(?:(?<![A-Za-z0-9+\-\u2212]){_MINUS}|(?<=[=({{:*#$][ \t]){_MINUS}[ \t]|(?<=[=({{:*#$]){_MINUS}[ \t])?"
NUMBER = re.compile(
    rf"{_SIGN}(?:\$\s?{_SIGN})?(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|{_SIGN}\$?\.[0-9]+",
    re.ASCII,
)
_SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[!,;: ])(?=[0-9]{3})")
"""Thousands separators in LaTeX."""
_STRICT = re.compile(r"####[ \t]*(?:[*\\({\[ \t]|boxed)*(" + NUMBER.pattern + ")", re.ASCII)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    method: Literal["strict", "flexible"] = "flexible",
    prompt_tail: str = "",
) -> dict[str, float]:
    """Returns 1.0 or 0.0; the part `format` is 1.0 if the answer follows ``####``."""
    truth = check_truth(ground_truth)
    text = _SEPARATOR.sub(",", continued(solution_str, prompt_tail, "####")[-TAIL:])
    strict = _STRICT.findall(text)
    found = strict if strict or method == "strict" else NUMBER.findall(text)
    value = _value(found[-1]) if found else None
    return {"score": float(value is not None and value == truth), "format": float(bool(strict))}


def check_truth(ground_truth: Any) -> Decimal:
    """Returns the value of a ground truth; raises ValueError for one that no response can match."""
    truth = _value(str(ground_truth).rpartition("####")[2])
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    return truth


def right_answer(ground_truth: Any, **_: Any) -> str:
    """Returns a response that gets 1.0, for the trial before a run."""
    return f"#### {check_truth(ground_truth)}"


def _value(text: str) -> Decimal | None:
    plain = re.sub(r"[\s$,%]", "", text.replace("\u2212", "-")).rstrip(".")
    if not re.fullmatch(r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", plain, re.ASCII):
        return None
    return Decimal(plain)
