"""Countdown problems: reach a target from given numbers, using each exactly once.

A problem is a sorted multiset of numbers and a reachable target. Problems, prompts and sample solutions are pure
functions of a seed. All draws use `random.Random(text).random()`, the only stream that Python guarantees to keep, so
the same seed gives the same bytes on every machine.
"""

import json
import operator
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product, starmap
from math import comb
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

DATA_SOURCE = "countdown"
PROMPT = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number exactly once, "
    "and only + - * / and parentheses. Put the expression in <answer></answer>."
)

Value = int | Fraction

_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3


class Problem(NamedTuple):
    """Sorted numbers, and a target that they can reach."""

    numbers: tuple[int, ...]
    target: int


class _Expression(NamedTuple):
    """The text of an expression, and the precedence of its outermost operator."""

    text: str
    level: int

    def within(self, level: int) -> str:
        return self.text if self.level >= level else f"({self.text})"


def problems(
    seed: int,
    count: int,
    operands: int = 3,
    low: int = 1,
    high: int = 20,
    max_target: int = 100,
    operators: str = "+-*",
    high_product: int | None = None,
) -> list[Problem]:
    """Draws distinct problems uniformly.

    Args:
        count: number of problems; a larger count only adds problems at the end.
        operands: numbers per problem.
        low: minimum number.
        high: maximum number.
        max_target: maximum target; the minimum is 1.
        operators: some of ``+ - * /``.
        high_product: numbers above this occur only in problems that `+` and `-` can solve; None: no such limit.

    Raises:
        ValueError: an argument is out of range, or there are fewer than `count` problems.
    """
    _check_operators(operators)
    if count < 0 or operands < 1 or not 0 <= low <= high or max_target < 1:
        raise ValueError("count must be >= 0, operands and max_target >= 1, and 0 <= low <= high")
    multisets = comb(high - low + operands, operands)
    rng = _rng("problems", seed)
    drawn: list[Problem] = []
    if count == 0:
        return drawn
    for cell in _permutation(multisets * max_target, rng):
        index, target = divmod(cell, max_target)
        problem = Problem(_multiset(index, operands, low), target + 1)
        small = high_product is None or problem.numbers[-1] <= high_product
        if problem.target in _values(problem.numbers, operators if small else "+-"):
            drawn.append(problem)
            if len(drawn) == count:
                return drawn
    raise ValueError(f"{count} problems were requested, but only {len(drawn)} exist")


def split(problems: Sequence[Problem], test: int) -> tuple[list[Problem], list[Problem]]:
    """Splits problems into train and test. The first ones are the test set, so more problems do not change it."""
    if len(set(problems)) != len(problems):
        raise ValueError("the problems to split are not distinct")
    if not 0 <= test <= len(problems):
        raise ValueError(f"{test} test problems were requested, but {len(problems)} exist")
    return list(problems[test:]), list(problems[:test])


def solutions(numbers: Sequence[int], target: int, operators: str = "+-*") -> list[str]:
    """Returns all expressions over the numbers that equal the target exactly, using each number once.

    Returns:
        Sorted expressions without spaces or signs, with necessary parentheses only: `1-(2-3)`, but `1+2-3`.
    """
    _check_operators(operators)
    return sorted(expression.text for expression in _expressions(tuple(sorted(numbers)), target, operators))


def prompt(problem: Problem) -> str:
    """Returns the text of the question, with the numbers in ascending order."""
    numbers = [str(number) for number in problem.numbers]
    listed = " and ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))
    return PROMPT.format(numbers=listed, target=problem.target)


def rows(problems: Sequence[Problem], split: str = "train") -> "pa.Table":
    """Converts problems to a table in verl's prompt layout; `extra_info` stores the split's name."""
    import pyarrow as pa

    schema = pa.schema(
        {
            "data_source": pa.string(),
            "prompt": _messages_type(),
            "ability": pa.string(),
            "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
            "extra_info": pa.struct({"split": pa.string(), "index": pa.int64()}),
        }
    )
    return pa.Table.from_pylist(
        [
            {
                "data_source": DATA_SOURCE,
                "prompt": _messages(problem),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": ground_truth(problem)},
                "extra_info": {"split": split, "index": index},
            }
            for index, problem in enumerate(problems)
        ],
        schema,
    )


def sft_rows(problems: Sequence[Problem], seed: int = 0, per_problem: int = 1, operators: str = "+-*") -> "pa.Table":
    """Makes supervised examples, `prompt` (messages) and `response`, from solutions drawn uniformly."""
    import pyarrow as pa

    examples = []
    for problem in problems:
        correct = solutions(problem.numbers, problem.target, operators)
        if not correct:
            raise ValueError(f"{problem} has no solution with {operators}")
        rng = _rng("solutions", seed, problem)
        for _ in range(per_problem):
            response = f"<answer>{correct[_below(len(correct), rng)]}</answer>"
            examples.append({"prompt": _messages(problem), "response": response})
    return pa.Table.from_pylist(examples, pa.schema({"prompt": _messages_type(), "response": pa.string()}))


def ground_truth(problem: Problem) -> str:
    """Returns the ground truth for the Countdown reward, as JSON text."""
    return json.dumps({"target": problem.target, "numbers": list(problem.numbers)})


def _messages(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt(problem)}]


def _messages_type() -> "pa.DataType":
    import pyarrow as pa

    return pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


def _check_operators(operators: str) -> None:
    if not operators or set(operators) - set(_LEVEL):
        raise ValueError(f"operators must be some of + - * /, not {operators!r}")


def _rng(purpose: str, seed: int, problem: Problem | None = None) -> random.Random:
    return random.Random(f"{purpose}:{seed}:{problem and (list(problem.numbers), problem.target)}")


def _below(n: int, rng: random.Random) -> int:
    return int(rng.random() * n)


def _permutation(n: int, rng: random.Random) -> Iterator[int]:
    """Yields the integers below `n` in random order: Fisher-Yates that stores only the positions it has moved."""
    moved: dict[int, int] = {}
    for i in range(n):
        j = i + _below(n - i, rng)
        first = moved.pop(i, i)
        yield first if i == j else moved.get(j, j)
        if i != j:
            moved[j] = first


def _multiset(index: int, size: int, low: int) -> tuple[int, ...]:
    """Returns the multiset of `size` integers from `low` up with rank `index` in the combinatorial number system."""
    numbers = []
    for k in range(size, 0, -1):
        element = bisect_right(range(index + k), index, key=lambda c: comb(c, k)) - 1
        index -= comb(element, k)
        numbers.append(low + element - (k - 1))
    return tuple(reversed(numbers))


@lru_cache(maxsize=2**15)
def _splits(numbers: tuple[int, ...]) -> frozenset[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the distinct ways to split sorted numbers into a left and a right part, neither empty."""
    positions = range(len(numbers))
    return frozenset(
        (
            tuple(numbers[i] for i in positions if mask >> i & 1),
            tuple(numbers[i] for i in positions if not mask >> i & 1),
        )
        for mask in range(1, 2 ** len(numbers) - 1)
    )


def _quotient(left: Value, right: Value) -> Value:
    return Fraction(left) / right if left % right else int(left // right)


_OPERATIONS: Mapping[str, Callable[[Any, Any], Value]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
}


def _partners(a: Value, symbol: str, target: Value, candidates: frozenset[Value]) -> frozenset[Value]:
    """Returns the candidates `b` for which `a symbol b` is the target."""
    if symbol == "+":
        b = target - a
    elif symbol == "-":
        b = a - target
    elif symbol == "*" and a:
        b = _quotient(target, a)
    elif symbol == "/" and a and target:
        b = _quotient(a, target)
    elif a or target:
        return frozenset()
    else:
        return candidates if symbol == "*" else candidates - {0}
    return frozenset([b]) if b in candidates else frozenset()


@lru_cache(maxsize=2**15)
def _values(numbers: tuple[int, ...], operators: str) -> frozenset[Value]:
    """Returns all values that expressions over sorted numbers can have."""
    if len(numbers) == 1:
        return frozenset(numbers)
    reached: set[Value] = set()
    for left, right in _splits(numbers):
        pairs = list(product(_values(left, operators), _values(right, operators)))
        for symbol in operators:
            defined = [(a, b) for a, b in pairs if b] if symbol == "/" else pairs
            reached.update(starmap(_OPERATIONS[symbol], defined))
    return frozenset(reached)


@lru_cache(maxsize=2**16)
def _expressions(numbers: tuple[int, ...], target: Value, operators: str) -> frozenset[_Expression]:
    """Returns all expressions over sorted numbers with the value `target`, built from the outermost operator inward."""
    if len(numbers) == 1:
        return frozenset([_Expression(str(numbers[0]), _ATOM)] if numbers[0] == target else [])
    return frozenset(
        _Expression(f"{x.within(level)}{symbol}{y.within(level + (symbol in '-/'))}", level)
        for left, right in _splits(numbers)
        for a in _values(left, operators)
        for symbol in operators
        for b in _partners(a, symbol, target, _values(right, operators))
        for level in [_LEVEL[symbol]]
        for x in _expressions(left, a, operators)
        for y in _expressions(right, b, operators)
    )
