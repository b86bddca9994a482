"""Mathematics in LaTeX, compared by the math-verify library (extra `math`): ``\\frac12`` is ``0.5``.

The last ``\\boxed{...}`` is read, or else the LaTeX that math-verify finds, or else the last number. It is parsed as
LaTeX alone: math-verify's own way with plain expressions would evaluate them as Python. What could make a computer
algebra system work for ever (towers of powers, factorials, endless digits) is refused before it gets there: 0.0.
"""

import re
from math import inf, log2
from typing import Any

from rlhf.rewards.gsm8k import NUMBER

TAIL = 1_000
"""Characters of the response that are read, from its end."""
SECONDS = 3
"""For reading, and for comparing."""

MAX_DIGITS = 30
MAX_DEPTH = 32
MAX_BITS = 2.0**20
"""Of the largest number that an answer may come to: a moment's work."""

_TOKEN = re.compile(r"[0-9]+|\\[a-zA-Z]+|\\.|\*\*|\S", re.DOTALL)
_DOLLAR = re.compile(r"(?<!\\)\$")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 or 0.0."""
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig()]
    ground_truth = str(ground_truth)
    marked = _DOLLAR.search(ground_truth) or "\\boxed" in ground_truth
    truth = parse(ground_truth if marked else f"\\boxed{{{ground_truth}}}", latex)
    if not truth:
        raise ValueError(f"math-verify does not understand the ground truth {ground_truth!r}")
    text = solution_str[-TAIL:]
    answer = boxed(text) or text
    if not re.search(r"\$|\\[(\[b]", answer) and (numbers := NUMBER.findall(answer)):
        answer = f"${numbers[-1].strip()}$"
    if "\x00" in answer or bits(answer) > MAX_BITS:
        return 0.0
    return float(verify(truth, parse(answer, latex, parsing_timeout=SECONDS), timeout_seconds=SECONDS))


def boxed(text: str) -> str | None:
    """The last complete ``\\boxed{...}``, itself included."""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start : place + 1]
    return None


def bits(latex: str) -> float:
    """At least log2 of every number that an expression comes to, powers and factorials included; infinite for one that
    is nested too deeply or has too many digits.

    A sum or a product has no more bits than its parts together; :math:`a^b` has those of a, :math:`2^{bits(b)}` times.
    """
    tokens = _TOKEN.findall(latex)
    tokens.reverse()  # the next one is the last
    found = 0.0
    while tokens:
        found += _bits(tokens, 0)
    return found


def _bits(tokens: list[str], depth: int) -> float:
    """Of what comes up to a closing bracket, which is taken, too."""
    before, last = 0.0, 0.0  # the last is what a power or a factorial is of
    while tokens:
        token = tokens.pop()
        if token in ("}", ")", "]"):
            break
        if token in ("^", "**"):
            last = _power(last if last else before, _argument(tokens, depth))
        elif token == "!":
            last = _power(last, last)
        elif token in ("{", "["):  # an argument of what comes before
            last += _group(tokens, depth)
        else:
            before, last = before + last, _group(tokens, depth) if token == "(" else _single(token)
    return before + last


def _argument(tokens: list[str], depth: int) -> float:
    """Of an exponent: signs, and one token or group with its arguments, or a power again."""
    found = 0.0
    while tokens and found == 0.0:
        token = tokens.pop()
        found = _group(tokens, depth) if token in ("{", "(", "[") else _single(token)
    while tokens and tokens[-1] in ("{", "["):
        tokens.pop()
        found += _group(tokens, depth)
    if tokens and tokens[-1] in ("^", "**"):
        tokens.pop()
        found = _power(found, _argument(tokens, depth + 1))
    return found


def _group(tokens: list[str], depth: int) -> float:
    return inf if depth >= MAX_DEPTH else max(1.0, _bits(tokens, depth + 1))


def _single(token: str) -> float:
    if token.isdecimal():
        return inf if len(token) > MAX_DIGITS else log2(int(token) + 2)
    return 1.0 if token.isalpha() or token.startswith("\\") else 0.0


def _power(base: float, exponent: float) -> float:
    return base * 2.0**exponent if exponent < 64 else inf
