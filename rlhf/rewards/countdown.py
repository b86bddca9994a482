"""The Countdown reward: 1 if the answer reaches the target, using every given number exactly once.

The last complete `<answer>...</answer>` of the response is read with this grammar:

    answer  := sum [ "=" [sign] integer ]
    sum     := [sign] term { ("+" | "-") term }
    term    := factor { ("*" | "/" | "×" | "÷") factor }
    factor  := integer | "(" sum ")"
    sign    := "+" | "-"
    integer := one or more of the digits 0-9

ASCII white space may stand between tokens. Arithmetic is exact. Nothing is ever evaluated as code, and the length, the
depth and the digits of an answer are bounded, so hostile text is rejected immediately.
"""

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeGuard

from ratchet.rlhf.rewards.functions import continued

MAX_LENGTH = 512
MAX_DEPTH = 32
MAX_DIGITS = 18

OPEN, CLOSE = "<answer>", "</answer>"
NEGATE = "~"
OPERATIONS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "×": operator.mul,
    "/": operator.truediv,
    "÷": operator.truediv,
}

_TOKEN = re.compile(r"[0-9]+|\S", re.ASCII)


class Malformed(ValueError):
    """The text does not match the grammar, or exceeds its bounds."""


class ParsedAnswer(NamedTuple):
    """An expression in postfix order, and the value that its `=` tail claims."""

    postfix: tuple[int | str, ...]
    claim: int | None

    @property
    def numbers(self) -> list[int]:
        return sorted(item for item in self.postfix if isinstance(item, int))


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Mapping[str, Any] | str,
    extra_info: Any = None,
    prompt_tail: str = "",
) -> dict[str, float]:
    """Scores one response; `ground_truth` is `{"target": int, "numbers": [int, ...]}` or its JSON text."""
    target, numbers = _problem(ground_truth)
    try:
        answer = parse(last_answer(continued(solution_str, prompt_tail, OPEN)))
    except Malformed:
        return {"score": 0.0, "well_formed": 0.0}
    return {"score": float(_is_correct(answer, target, numbers)), "well_formed": 1.0}


def last_answer(text: str) -> str:
    """Returns the content of the last complete `<answer>...</answer>`."""
    start = text.rfind(OPEN, 0, max(text.rfind(CLOSE), 0))
    if start < 0:
        raise Malformed("there is no complete answer")
    start += len(OPEN)
    return text[start : text.find(CLOSE, start)]


def parse(text: str) -> ParsedAnswer:
    """Parses the content of an answer; raises Malformed."""
    if len(text) > MAX_LENGTH:
        raise Malformed(f"longer than {MAX_LENGTH} characters")
    return _Parser(text).answer()


def evaluate(answer: ParsedAnswer) -> Fraction:
    """Returns the exact value of a parsed expression; raises ZeroDivisionError."""
    stack: list[Fraction] = []
    for item in answer.postfix:
        if isinstance(item, int):
            stack.append(Fraction(item))
        elif item == NEGATE:
            stack.append(-stack.pop())
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(OPERATIONS[item](left, right))
    return stack.pop()


class _Parser:
    """Recursive descent: one method per rule of the grammar, each appending to `postfix`."""

    def __init__(self, text: str) -> None:
        # reversed, so that the next token is at the end
        self.tokens = _TOKEN.findall(text)[::-1]
        self.postfix: list[int | str] = []
        self.depth = 0

    def take(self, choices: str) -> str:
        """Consumes the next token if it is one of `choices`, else returns the empty string."""
        return self.tokens.pop() if self.tokens and self.tokens[-1] in choices else ""

    def answer(self) -> ParsedAnswer:
        self.sum()
        claim = None
        if self.take("="):
            negative = self.take("+-") == "-"
            claim = -self.integer() if negative else self.integer()
        if self.tokens:
            raise Malformed(f"unexpected {self.tokens[-1]!r}")
        return ParsedAnswer(tuple(self.postfix), claim)

    def sum(self) -> None:
        negative = self.take("+-") == "-"
        self.term()
        if negative:
            self.postfix.append(NEGATE)
        while operation := self.take("+-"):
            self.term()
            self.postfix.append(operation)

    def term(self) -> None:
        self.factor()
        while operation := self.take("*/×÷"):
            self.factor()
            self.postfix.append(operation)

    def factor(self) -> None:
        if not self.take("("):
            self.postfix.append(self.integer())
            return
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Malformed(f"deeper than {MAX_DEPTH} parentheses")
        self.sum()
        if not self.take(")"):
            raise Malformed("a parenthesis is not closed")
        self.depth -= 1

    def integer(self) -> int:
        token = self.tokens.pop() if self.tokens else ""
        if not (token.isascii() and token.isdigit()) or len(token) > MAX_DIGITS:
            raise Malformed(f"expected an integer of at most {MAX_DIGITS} digits")
        return int(token)


def _is_correct(answer: ParsedAnswer, target: int, numbers: Sequence[int]) -> bool:
    if answer.numbers != sorted(numbers):
        return False
    try:
        value = evaluate(answer)
    except ZeroDivisionError:
        return False
    return value == target and answer.claim in (None, target)


def _problem(ground_truth: Mapping[str, Any] | str) -> tuple[int, Sequence[int]]:
    truth: Any = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise ValueError(f"ground_truth is not JSON: {error}") from error
    try:
        target, numbers = truth.get("target"), truth.get("numbers")
    except AttributeError as error:
        raise ValueError(f"ground_truth must be an object with target and numbers, not {truth!r}") from error
    if not _is_integer(target):
        raise ValueError(f"ground_truth['target'] must be an integer, not {target!r}")
    if not isinstance(numbers, list | tuple) or not numbers or not all(_is_integer(n) and n >= 0 for n in numbers):
        raise ValueError(f"ground_truth['numbers'] must be a list of integers from 0 up, not {numbers!r}")
    return target, numbers


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
