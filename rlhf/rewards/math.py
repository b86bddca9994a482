"""Mathematics in LaTeX, compared by the math-verify library (extra `math`): ``\\frac12`` is ``0.5``.

The last ``\\boxed{...}`` is read, or else the LaTeX that math-verify finds, or else the last number. It is parsed as
LaTeX alone: math-verify's own way with plain expressions would evaluate them as Python. Input that could keep a
computer algebra system busy forever (towers of powers, factorials, endless digits) is refused beforehand: 0.0, unless
it is the text of the ground truth.
"""

import re
from math import inf, log2
from typing import Any

from ratchet.rlhf.rewards.functions import continued
from ratchet.rlhf.rewards.gsm8k import NUMBER

TAIL = 1_000
"""Length of the end of the response that is read, in characters."""
SECONDS = 3
"""Time limit for parsing, and for comparing."""

MAX_DIGITS = 30
MAX_DEPTH = 32
MAX_BITS = 2.0**20
"""Bits of the largest number that an answer may evaluate to: a moment's work."""

_TOKEN = re.compile(r"[0-9]+|\\[a-zA-Z]+|\\.|\*\*|\S", re.DOTALL)
_BAR = re.compile(r"\\(left|right|[lrm]?[vV]ert|[lr](floor|ceil|brace|angle)|mid|quad|qquad)$")
"""Commands that are not terms, but stand beside them."""
_DOLLAR = re.compile(r"(?<!\\)\$")
_BOXED = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(rf"{NUMBER.pattern}|\\[a-zA-Z]+(?:\{{[^{{}}]*\}})*", re.ASCII)
"""Content of a box without braces, outside of a formula; within one, it is the rest of the formula."""
_FORMULA = re.compile(r"(?:\\(?![)\]]).|[^\\$\n])*")
_SPACING = re.compile(r"\\[,;:! ]|[\s$]")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, prompt_tail: str = ""
) -> float:
    """Returns 1.0 or 0.0."""
    from math_verify import LatexExtractionConfig, parse, verify

    latex, wanted = [LatexExtractionConfig()], check_truth(ground_truth)
    is_marked = _DOLLAR.search(wanted) or wanted.startswith("\\boxed")
    truth = parse(wanted if is_marked else f"${' '.join(wanted.split())}$", latex) if bits(wanted) <= MAX_BITS else None
    if truth == []:
        raise ValueError(f"math-verify does not understand the ground truth {ground_truth!r}")
    text = continued(solution_str, prompt_tail, "\\boxed{")[-TAIL - len(wanted) :]
    answer = boxed(text) or text[-TAIL:]
    is_equal = _plain(answer) == _plain(wanted)
    if not is_equal and not re.search(r"\$|\\[(\[b]", answer) and (numbers := NUMBER.findall(answer)):
        answer = f"${numbers[-1].strip()}$"
        is_equal = _plain(answer) == _plain(wanted)
    if is_equal:
        return 1.0
    if truth is None or "\x00" in answer or len(answer) > TAIL or bits(answer) > MAX_BITS:
        return 0.0
    found = parse(answer, latex, parsing_timeout=SECONDS)
    return float(verify(truth, found, timeout_seconds=SECONDS, allow_set_relation_comp=True))


def check_truth(ground_truth: Any) -> str:
    """Returns the answer in a ground truth: its box, or all of it. Raises ValueError if no response can match it."""
    wanted = boxed(str(ground_truth)) or str(ground_truth)
    if not _plain(wanted):
        raise ValueError(f"the ground truth {ground_truth!r} has no answer")
    return wanted


def right_answer(ground_truth: Any, **_: Any) -> str:
    """Returns a response that gets 1.0, for the trial before a run."""
    wanted = check_truth(ground_truth)
    return wanted if wanted.startswith("\\boxed") else f"\\boxed{{{wanted.strip().strip('$')}}}"


def _plain(latex: str) -> str:
    """Returns the content of a box or a formula, without spaces."""
    inside = latex[len("\\boxed{") : -1] if latex.startswith("\\boxed{") else latex
    return _SPACING.sub("", inside).rstrip(".")


def boxed(text: str) -> str | None:
    """Returns the last complete ``\\boxed{...}``; ``\\boxed 4`` and ``\\fbox{4}`` are read as ``\\boxed{4}``."""
    for box in reversed(list(_BOXED.finditer(text))):
        if text[box.end() : box.end() + 1] == "{":
            depth = 0
            for place in range(box.end(), len(text)):
                depth += {"{": 1, "}": -1}.get(text[place], 0)
                if depth == 0:
                    return f"\\boxed{text[box.end() : place + 1]}"
            return None
        if content := _unbraced(text[: box.start()], text[box.end() :]):
            return f"\\boxed{{{content}}}"
    return None


def _unbraced(before: str, after: str) -> str:
    """Returns the content of a box without braces between two texts."""
    is_formula = len(_DOLLAR.findall(before)) % 2 == 1 or any(
        before.rfind(opening) > before.rfind(closing) for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"))
    )
    found = _FORMULA.match(after) if is_formula else _UNBRACED.match(after)
    return "" if found is None else found[0].strip().rstrip(".,;")


def bits(latex: str) -> float:
    """Returns about log2 of the largest number in the evaluation of an expression, and no less where powers, roots,
    factorials and binomials are written as usual; infinite for too deep nesting or too many digits.

    A sum or a product has no more bits than its parts together; :math:`a^b` has those of a, :math:`2^{bits(b)}` times.
    """
    tokens = _TOKEN.findall(latex)
    tokens.reverse()  # the next one is the last
    found = 0.0
    while tokens:
        found += _bits(tokens, 0)
    return found


def _bits(tokens: list[str], depth: int) -> float:
    """Returns the bits of the tokens up to a closing bracket, which is consumed."""
    before, last = 0.0, 0.0  # `last` is the base of a power or a factorial; after a bar or a space, that is everything
    while tokens:
        token = tokens.pop()
        if token in ("}", ")", "]"):
            break
        if token in ("^", "**"):
            last = _power(last or before, _operand(tokens, depth))
        elif token == "!":
            last = _power(last or before, last or before)
        elif token in ("{", "["):  # an argument of the command before
            last += _group(tokens, depth)
        else:
            before, last = before + last, _group(tokens, depth) if token == "(" else _term(token, tokens, depth)
    return before + last


def _term(token: str, tokens: list[str], depth: int) -> float:
    if token == "\\sqrt" and tokens and tokens[-1] == "[":  # a power of 1 / index
        tokens.pop()
        index = _group(tokens, depth)
        return _power(_operand(tokens, depth), index)
    if token == "\\Gamma":
        return _power(number := _operand(tokens, depth), number)
    if token in ("\\binom", "\\dbinom", "\\tbinom"):
        return _power(1.0, _argument(tokens, depth))
    if token.isdecimal():
        return inf if len(token) > MAX_DIGITS else log2(max(int(token), 2))
    return 1.0 if token.isalpha() or (token[0] == "\\" and token[1:].isalpha() and not _BAR.match(token)) else 0.0


def _operand(tokens: list[str], depth: int) -> float:
    """Returns the bits of the next term or group, with signs and spaces before it, its arguments, and its powers."""
    found = 0.0
    while tokens and found == 0.0 and tokens[-1] not in ("}", ")", "]"):
        token = tokens.pop()
        found = _group(tokens, depth) if token in ("{", "(", "[") else _term(token, tokens, depth)
    while tokens and tokens[-1] in ("{", "["):
        tokens.pop()
        found += _group(tokens, depth)
    if tokens and tokens[-1] in ("^", "**"):
        tokens.pop()
        found = _power(found, _operand(tokens, depth + 1))
    return found


def _argument(tokens: list[str], depth: int) -> float:
    """Returns the bits of a command's first argument."""
    if tokens[-1:] != ["{"]:
        return _operand(tokens, depth)
    tokens.pop()
    return _group(tokens, depth)


def _group(tokens: list[str], depth: int) -> float:
    return inf if depth >= MAX_DEPTH else max(1.0, _bits(tokens, depth + 1))


def _power(base: float, exponent: float) -> float:
    return base * 2.0**exponent if exponent < 64 else inf
