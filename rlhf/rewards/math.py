"""Mathematics in LaTeX, compared by the math-verify library (extra `math`): ``\\frac12`` is ``0.5``.

The answer is the last ``\\boxed{...}``, or else the LaTeX that math-verify finds, or else the last number. It is parsed
only as LaTeX, because math-verify would evaluate plain expressions as Python. Answers that could keep a computer
algebra system busy forever (towers of powers, factorials, endless digits) score 0.0 without being parsed.
"""

import re
from math import inf, log2
from typing import Any

from rlhf.rewards.gsm8k import NUMBER

TAIL = 1_000
"""Number of characters at the end of the response that are read."""
SECONDS = 3
"""Time limit of parsing, and again of comparing, in seconds."""

MAX_DIGITS = 30
MAX_DEPTH = 32
MAX_BITS = 2.0**20
"""Bits of the largest number that an answer may contain or evaluate to."""

_TOKEN = re.compile(r"[0-9]+|\\[a-zA-Z]+|\\.|\*\*|\S", re.DOTALL)
_BAR = re.compile(r"\\(left|right|[lrm]?[vV]ert|[lr](floor|ceil|brace|angle)|mid|quad|qquad)$")
"""Commands that are delimiters or spaces, not terms."""
_DOLLAR = re.compile(r"(?<!\\)\$")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 if the answer equals the ground truth, else 0.0.

    Args:
        data_source: unused.
        solution_str: text of the response.
        ground_truth: LaTeX, with or without ``$`` and ``\\boxed``.
        extra_info: unused.

    Raises:
        ValueError: math-verify cannot parse the ground truth.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig()]
    ground_truth = str(ground_truth)
    marked = _DOLLAR.search(ground_truth) or "\\boxed" in ground_truth
    truth = parse(ground_truth if marked else f"${' '.join(ground_truth.split())}$", latex)
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
    """The last ``\\boxed{...}``, with the command itself; None if there is none or its braces are not closed."""
    start = text.rfind("\\boxed{")
    depth = 0
    for position in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start : position + 1]
    return None


def bits(latex: str) -> float:
    """Estimate log2 of the largest number that occurs when an expression is evaluated.

    The estimate is an upper bound if powers, roots, factorials and binomials have their usual notation. It is infinite
    if the expression is nested too deeply or has too many digits. A sum or a product has at most the bits of its parts
    together; :math:`a^b` has the bits of a times :math:`2^{bits(b)}`.
    """
    tokens = _TOKEN.findall(latex)
    tokens.reverse()  # so that pop() returns the next token
    total = 0.0
    while tokens:
        total += _bits(tokens, 0)
    return total


def _bits(tokens: list[str], depth: int) -> float:
    """Bits of the tokens up to a closing bracket, which is consumed as well."""
    before, last = 0.0, 0.0  # powers and factorials apply to the last term; after a bar or a space, to everything
    while tokens:
        token = tokens.pop()
        if token in ("}", ")", "]"):
            break
        if token in ("^", "**"):
            last = _power(last or before, _operand(tokens, depth))
        elif token == "!":
            last = _power(last or before, last or before)
        elif token in ("{", "["):  # an argument of the term before it
            last += _group(tokens, depth)
        else:
            before, last = before + last, _group(tokens, depth) if token == "(" else _term(token, tokens, depth)
    return before + last


def _term(token: str, tokens: list[str], depth: int) -> float:
    if token == "\\sqrt" and tokens and tokens[-1] == "[":  # x^(1 / index): the index may be a small fraction
        tokens.pop()
        index = _group(tokens, depth)
        return _power(_operand(tokens, depth), index)
    if token == "\\Gamma":
        return _power(number := _operand(tokens, depth), number)
    if token in ("\\binom", "\\dbinom", "\\tbinom"):
        return _power(1.0, _operand(tokens, depth))
    if token.isdecimal():
        return inf if len(token) > MAX_DIGITS else log2(max(int(token), 2))
    return 1.0 if token.isalpha() or (token[0] == "\\" and token[1:].isalpha() and not _BAR.match(token)) else 0.0


def _operand(tokens: list[str], depth: int) -> float:
    """Bits of the next term or group, with the signs and spaces before it, its arguments and its powers."""
    operand_bits = 0.0
    while tokens and operand_bits == 0.0 and tokens[-1] not in ("}", ")", "]"):
        token = tokens.pop()
        operand_bits = _group(tokens, depth) if token in ("{", "(", "[") else _term(token, tokens, depth)
    while tokens and tokens[-1] in ("{", "["):
        tokens.pop()
        operand_bits += _group(tokens, depth)
    if tokens and tokens[-1] in ("^", "**"):
        tokens.pop()
        operand_bits = _power(operand_bits, _operand(tokens, depth + 1))
    return operand_bits


def _group(tokens: list[str], depth: int) -> float:
    return inf if depth >= MAX_DEPTH else max(1.0, _bits(tokens, depth + 1))


def _power(base: float, exponent: float) -> float:
    return base * 2.0**exponent if exponent < 64 else inf
