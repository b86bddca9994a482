"""Grade-school maths (GSM8K, arXiv 2110.14168): is the final number correct?

`strict` reads the number after the last ``####``, the format of the dataset's solutions; `flexible` falls back to the
last number of the response. Thousands separators, ``$``, ``%`` and a trailing ``.00`` are ignored; values are compared
exactly.
"""

import re
from decimal import Decimal
from typing import Any, Literal

TAIL = 2_000
"""Number of characters at the end of the response that are read."""
MAX_DIGITS = 30

_MINUS = r"[-+\u2212]"
# A sign next to the number, but not a dash between words or the minus of 5-3; or, after = ( { : * # $, with one space.
_SIGN = rf"(?:(?<![A-Za-z0-9+\-\u2212]){_MINUS}|(?<=[=({{:*#$][ \t]){_MINUS}[ \t]|(?<=[=({{:*#$]){_MINUS}[ \t])?"
NUMBER = re.compile(
    rf"{_SIGN}(?:\$\s?{_SIGN})?(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|{_SIGN}\$?\.[0-9]+",
    re.ASCII,
)
_SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[!,;: ])(?=[0-9]{3})")
"""Thousands separators of LaTeX."""
_STRICT = re.compile(r"####[ \t]*(?:[*\\({\[ \t]|boxed)*(" + NUMBER.pattern + ")", re.ASCII)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    method: Literal["strict", "flexible"] = "flexible",
) -> dict[str, float]:
    """Compare the final number of the response with the ground truth.

    Args:
        data_source: unused.
        solution_str: text of the response.
        ground_truth: the number, or a solution that ends with ``#### number``.
        extra_info: unused.
        method: `strict` or `flexible`.

    Returns:
        `score`: 1.0 if the number is correct, else 0.0; `format`: 1.0 if there is a number after ``####``, else 0.0.

    Raises:
        ValueError: the ground truth is not a number.
    """
    truth = _value(str(ground_truth).rpartition("####")[2])
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    text = _SEPARATOR.sub(",", solution_str[-TAIL:])
    strict = _STRICT.findall(text)
    numbers = strict if strict or method == "strict" else NUMBER.findall(text)
    value = _value(numbers[-1]) if numbers else None
    return {"score": float(value is not None and value == truth), "format": float(bool(strict))}


def _value(text: str) -> Decimal | None:
    plain = re.sub(r"[\s$,%]", "", text.replace("\u2212", "-")).rstrip(".")
    if not re.fullmatch(r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", plain, re.ASCII) or len(plain) > MAX_DIGITS:
        return None
    return Decimal(plain)
