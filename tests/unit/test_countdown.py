"""Countdown: the reward reads answers as the grammar says, and the data agrees with the reward."""

import contextlib
import itertools
import json
import operator
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.rlhf.data import countdown_dataset as data
from ratchet.rlhf.data.countdown_dataset import Problem
from ratchet.rlhf.rewards.countdown import MAX_DEPTH, MAX_DIGITS, MAX_LENGTH, Malformed, compute_score, evaluate, parse

WELL_FORMED_BUT_WRONG = {"score": 0.0, "well_formed": 1.0}
MALFORMED = {"score": 0.0, "well_formed": 0.0}
RIGHT = {"score": 1.0, "well_formed": 1.0}


def score(response: str, target: int = 24, numbers: tuple[int, ...] = (3, 7, 15)) -> dict[str, float]:
    return compute_score("countdown", response, {"target": target, "numbers": list(numbers)})


def answer(expression: str, target: int = 24, numbers: tuple[int, ...] = (3, 7, 15)) -> dict[str, float]:
    return score(f"<answer>{expression}</answer>", target, numbers)


@dataclass(frozen=True)
class Tree:
    """The oracle: an expression that knows its own value, and spells itself without a parser."""

    symbol: str
    left: "Tree | int"
    right: "Tree | int"

    def value(self) -> Fraction:
        apply: Any = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[self.symbol]
        return Fraction(apply(value(self.left), value(self.right)))


def value(tree: Tree | int) -> Fraction:
    return Fraction(tree) if isinstance(tree, int) else tree.value()


def leaves(tree: Tree | int) -> list[int]:
    return [tree] if isinstance(tree, int) else leaves(tree.left) + leaves(tree.right)


def spell(tree: Tree | int, rng: random.Random, needs: str = "") -> str:
    """Spell with every parenthesis that convention needs, some that it does not, and random white space."""

    def space() -> str:
        return rng.choice(["", "", " ", "  ", "\n", "\t"])

    if isinstance(tree, int):
        text, bare = str(tree), True
    else:
        left_needs = "+-" if tree.symbol in "*/" else ""
        right_needs = {"+": "", "-": "+-", "*": "+-", "/": "+-*/"}[tree.symbol]
        symbol = rng.choice({"*": "*×", "/": "/÷"}.get(tree.symbol, tree.symbol))
        text = spell(tree.left, rng, left_needs) + space() + symbol + space() + spell(tree.right, rng, right_needs)
        bare = tree.symbol not in needs
    if not bare or rng.random() < 0.15:
        text = f"({space()}{text}{space()})"
    return text


trees: st.SearchStrategy[Tree | int] = st.recursive(
    st.integers(0, 99),
    lambda smaller: st.builds(Tree, st.sampled_from("+-*/"), smaller, smaller),
    max_leaves=7,
)


@settings(deadline=None)
@given(trees, st.randoms(use_true_random=False))
def test_value_agrees_with_the_tree_that_was_spelled(tree: Tree | int, rng: random.Random) -> None:
    parsed = parse(spell(tree, rng))
    assert parsed.numbers == sorted(leaves(tree))
    try:
        expected = value(tree)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(parsed)
    else:
        assert evaluate(parsed) == expected


@settings(deadline=None)
@given(trees, st.randoms(use_true_random=False), st.integers(-1, 1))
def test_score_is_right_exactly_when_the_tree_reaches_the_target(
    tree: Tree | int, rng: random.Random, off: int
) -> None:
    try:
        reached: Fraction | None = value(tree)
    except ZeroDivisionError:
        reached = None
    target = int(reached or 0) + off
    result = answer(spell(tree, rng), target, tuple(leaves(tree)))
    assert result == {"score": float(reached == target), "well_formed": 1.0}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("8-4-2", 2),
        ("8-(4-2)", 6),
        ("16/4/2", 2),
        ("16/(4/2)", 8),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("8/4*2", 4),
        ("1/3+2/3", 1),
        ("-3+7", 4),
        ("-3*7", -21),
        ("-2-3", -5),
        ("+3-7", -4),
        ("10*(-3+7)", 40),
        ("-(3-7)", 4),
        ("12÷4×3", 9),
        ("007", 7),
    ],
)
def test_precedence_and_associativity(expression: str, expected: int) -> None:
    assert evaluate(parse(expression)) == expected


@pytest.mark.parametrize(
    ("expression", "target", "numbers"),
    [
        ("3*(15-7)", 24, (3, 7, 15)),
        ("(15 - 7) × 3", 24, (3, 7, 15)),
        (" ( ( 15-7 )*3 )\n", 24, (3, 7, 15)),
        ("\t(15\n-\r\n7)*3 = 24 ", 24, (3, 7, 15)),
        ("3*(15-7)=24", 24, (3, 7, 15)),
        ("3*(15-7)=+24", 24, (3, 7, 15)),
        ("+3*(15-7)", 24, (3, 7, 15)),
        ("-7*3+45", 24, (3, 7, 45)),
        ("8/(3-8/3)", 24, (3, 3, 8, 8)),
        ("8÷(3−8/3)".replace("−", "-"), 24, (3, 3, 8, 8)),
        ("1/3*72", 24, (1, 3, 72)),
        ("3-8=-5", -5, (3, 8)),
        ("24", 24, (24,)),
    ],
)
def test_right_answers(expression: str, target: int, numbers: tuple[int, ...]) -> None:
    for order in itertools.permutations(numbers):
        assert answer(expression, target, order) == RIGHT


@pytest.mark.parametrize(
    "expression",
    [
        "3*15-7",
        "24",
        "15+3+7",
        "3*(15-7)+0",
        "15+7+3-1",
        "3*15-7*3",
        "31-7",
        "3*(15-7)=23",
        "3*(15-7)=-24",
        "15+3+7=24",
        "3/(15-15)",
        "15/(7-7)*3",
        "7*0/0",
        "-3*(15-7)",
        "(3)",
    ],
)
def test_wrong_answers_are_still_well_formed(expression: str) -> None:
    assert answer(expression) == WELL_FORMED_BUT_WRONG


def test_division_by_zero_scores_zero() -> None:
    assert answer("5/(3-3)", 5, (3, 3, 5)) == WELL_FORMED_BUT_WRONG
    assert answer("0*(5/0)", 0, (0, 0, 5)) == WELL_FORMED_BUT_WRONG
    assert answer("0/5", 0, (0, 5)) == RIGHT


@pytest.mark.parametrize(
    "response",
    [
        "<answer>1+1</answer> no: <answer>3*(15-7)</answer>",
        "<answer>3*(15-7)</answer> and <answer>1+",
        "</answer><answer>3*(15-7)</answer>",
        "<answer><answer>3*(15-7)</answer>",
        "<answer>3*(15-7)</answer></answer>",
        "a < b <answer>3*(15-7)</answer>\n" + "so it is. " * 1000,
    ],
)
def test_the_last_complete_answer_counts(response: str) -> None:
    assert score(response) == RIGHT


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<answer>3*(15-7)</answer><answer>1+1</answer>", WELL_FORMED_BUT_WRONG),
        ("<answer>3*(15-7)</answer><answer></answer>", MALFORMED),
        ("<answer>3*(15-7)</answer><answer>oops</answer>", MALFORMED),
        ("3*(15-7)", MALFORMED),
        ("<answer>3*(15-7)", MALFORMED),
        ("3*(15-7)</answer>", MALFORMED),
        ("</answer>3*(15-7)<answer>", MALFORMED),
        ("", MALFORMED),
    ],
)
def test_no_earlier_or_incomplete_answer_counts(response: str, expected: dict[str, float]) -> None:
    assert score(response) == expected


RIGHT_SPELLING = "3*(15-7)"
HOSTILE = [
    *(
        "9**9**9",
        "3**(15-7)",
        "2^3",
        "15%7",
        "15//7",
        "3(15-7)",
        "(15-7)3",
        "3 15 7",
        "3*1 5-7",
        "3*(15-7",
        "3*15-7)",
    ),
    *(
        "",
        " ",
        "()",
        "(",
        ")",
        "+",
        "-",
        "=",
        "=24",
        "3*(15-7)=",
        "3*(15-7)==24",
        "3*(15-7)=24=24",
        "24=3*(15-7)",
    ),
    *(
        "3*(15-7)=24.0",
        "3*(15-7)=48/2",
        "3*(15-7)=(24)",
        "3*(15-7)=--24",
        "3*(15-7)=twenty-four",
        "3*(15-7)≈24",
    ),
    *("--3*(15-7)", "++3", "3*-7", "3*+7", "15--7", "*3", "/3", "3+", "3*/7", "3*()7", "(-)3"),
    *(
        "3.0*(15-7)",
        "3e0*(15-7)",
        "0x3*(15-7)",
        "1_5",
        "3,7,15",
        "3j",
        "inf",
        "nan",
        "True",
        "None",
        "3*(x-7)",
    ),
    *("٣*(15-7)", "３*(15-7)", "³*(15-7)", "Ⅲ*(15-7)", "𝟑*(15-7)", "①5", "3*(15−7)", "3⋅(15-7)", "3∗(15-7)"),
    *(
        "3\u00a0*(15-7)",
        "3\u200b*(15-7)",
        "\ufeff3*(15-7)",
        "3*(15-7)\u2028",
        "\x003*(15-7)",
        "\ud8003",
        "3*(15-7)\\n",
    ),
    *(
        "__import__('os')",
        "__import__('os').system('true')",
        "exec('1')",
        "lambda:24",
        "[3]",
        "{3}",
        "3;7",
        "3 if 7 else 15",
    ),
    *(
        "$3*(15-7)$",
        "\\frac{3}{7}",
        "```3*(15-7)```",
        "<b>3*(15-7)</b>",
        "3*(15-7)#",
        "3*(15-7)//",
        "'3*(15-7)'",
        "%s%n",
    ),
    *(
        "(" * 20_000 + "3" + ")" * 20_000,
        "(" * 20_000,
        ")" * 20_000,
        "-" * 20_000 + "3",
        "(-" * 20_000,
        "-(" * 100 + "3",
    ),
    *("9" * 1_000_000, "9" * 5000, "9" * (MAX_DIGITS + 1), "3*(15-7)=" + "0" * 5000 + "24", "9" * 500 + "*9"),
    *(
        "1+" * 500_000 + "1",
        "1*" * 20_000,
        " " * 1_000_000,
        "3 " * 200_000,
        "1/" * 100_000 + "1",
        "=" * 100_000,
    ),
    "(" * (MAX_DEPTH + 1) + RIGHT_SPELLING + ")" * (MAX_DEPTH + 1),
    RIGHT_SPELLING + " " * MAX_LENGTH,
    *(
        RIGHT_SPELLING[:i] + junk + RIGHT_SPELLING[i:]
        for i in range(9)
        for junk in ("**", "a", "×*", "\u0663", "()", "=")
    ),
    *(
        "<answer>" * 100_000,
        "</answer>" * 100_000,
        "<answer" * 100_000,
        "</answer" * 100_000,
        "<answer></answer>" * 9,
    ),
]


def test_there_are_many_hostile_answers() -> None:
    assert len(set(HOSTILE)) >= 150


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_are_refused_at_once(hostile: str) -> None:
    start = time.perf_counter()
    results = [answer(hostile), score(hostile), score("<answer>" + hostile), score(hostile + "</answer>")]
    assert time.perf_counter() - start < 1
    assert results == [MALFORMED] * 4


def test_the_bounds_are_the_documented_ones() -> None:
    assert answer("(" * MAX_DEPTH + RIGHT_SPELLING.replace("(", "").replace(")", "") + ")" * MAX_DEPTH, 38) == RIGHT
    assert answer(RIGHT_SPELLING.ljust(MAX_LENGTH)) == RIGHT
    assert answer("+".join(["(1)"] * 2 * MAX_DEPTH), 2 * MAX_DEPTH, (1,) * 2 * MAX_DEPTH) == RIGHT
    assert answer("0" * (MAX_DIGITS - 1) + RIGHT_SPELLING) == RIGHT
    assert answer("*".join(["9" * MAX_DIGITS] * (MAX_LENGTH // (MAX_DIGITS + 1)))) == WELL_FORMED_BUT_WRONG


@settings(deadline=None)
@given(st.text(st.sampled_from("0123457 +-*/×÷()=<>٣²x\n"), max_size=24) | st.text())
def test_no_text_raises_and_what_parses_python_reads_alike(text: str) -> None:
    assert score(text)["score"] == 0.0
    result = answer(text)
    assert set(result) == {"score", "well_formed"} and set(result.values()) <= {0.0, 1.0}
    try:
        parsed = parse(text)
        expected = evaluate(parsed)
    except (Malformed, ZeroDivisionError):
        return
    flat = " ".join(text.split("=")[0].replace("×", "*").replace("÷", "/").split())
    stripped = "".join(c if c.isdigit() else f" {c} " for c in flat).split()
    python = "".join(f"Fraction({int(token)})" if token.isdigit() else token for token in stripped)
    assert eval(python, {"__builtins__": {}, "Fraction": Fraction}) == expected


def test_ground_truth_may_be_json_text() -> None:
    truth = json.dumps({"target": 24, "numbers": [3, 7, 15]})
    assert compute_score("countdown", "<answer>3*(15-7)</answer>", truth, {"index": 0}) == RIGHT


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ({"numbers": [3]}, "target"),
        ({"target": "24", "numbers": [3]}, "target"),
        ({"target": 24.0, "numbers": [3]}, "target"),
        ({"target": True, "numbers": [3]}, "target"),
        ({"target": 24}, "numbers"),
        ({"target": 24, "numbers": []}, "numbers"),
        ({"target": 24, "numbers": 3}, "numbers"),
        ({"target": 24, "numbers": "37"}, "numbers"),
        ({"target": 24, "numbers": [3, "7"]}, "numbers"),
        ({"target": 24, "numbers": [3, -7]}, "numbers"),
        ({"target": 24, "numbers": [3, None]}, "numbers"),
        ([24, [3]], "target and numbers"),
        (None, "target and numbers"),
        ("24", "target and numbers"),
        ("{", "not JSON"),
        ("", "not JSON"),
    ],
)
@pytest.mark.parametrize("response", ["", "<answer>24</answer>"])
def test_a_ground_truth_of_wrong_shape_is_an_error(truth: Any, message: str, response: str) -> None:
    with pytest.raises(ValueError, match=f"ground_truth.*{message}"):
        compute_score("countdown", response, truth)


def minimal_texts(numbers: tuple[int, ...], operators: str) -> dict[str, Fraction | None]:
    """Every text of three operands, by template, unless its parentheses change nothing at generic numbers."""

    def evaluated(text: str, a: int, b: int, c: int) -> Fraction | None:
        names = {"a": Fraction(a), "b": Fraction(b), "c": Fraction(c)}
        try:
            return Fraction(eval(text, {"__builtins__": {}}, names))
        except ZeroDivisionError:
            return None

    texts = {}
    for first, second in itertools.product(operators, repeat=2):
        plain = f"a{first}b{second}c"
        for text in (plain, f"(a{first}b){second}c", f"a{first}(b{second}c)"):
            if text == plain or evaluated(text, 101, 1009, 10007) != evaluated(plain, 101, 1009, 10007):
                for a, b, c in itertools.permutations(numbers):
                    spelled = text.replace("a", str(a)).replace("b", str(b)).replace("c", str(c))
                    texts[spelled] = evaluated(text, a, b, c)
    return texts


@pytest.mark.parametrize("numbers", [(1, 2, 3), (3, 7, 12), (5, 5, 5), (2, 4, 4), (0, 0, 3), (0, 1, 6), (8, 3, 1)])
@pytest.mark.parametrize("operators", ["+-*", "+-*/", "-/", "+"])
def test_solutions_are_all_the_minimal_texts(numbers: tuple[int, ...], operators: str) -> None:
    texts = minimal_texts(numbers, operators)
    for target in range(-10, 40):
        expected = sorted(text for text, reached in texts.items() if reached == target)
        assert data.solutions(numbers, target, operators) == expected


def test_solutions_of_four_operands() -> None:
    assert data.solutions([8, 3, 8, 3], 24, "+-*/") == ["8/(3-8/3)"]
    assert data.solutions([1, 1, 1, 1], 4) == ["(1+1)*(1+1)", "1+1+1+1"]
    assert data.solutions([1, 1, 1, 1], 50) == []
    assert data.solutions([2, 5, 7, 11], 24, "+-*/") == sorted(spelled_by_trees((2, 5, 7, 11), 24))
    assert data.solutions([1, 2, 2, 6], 6, "+-*/") == sorted(spelled_by_trees((1, 2, 2, 6), 6))


def spelled_by_trees(numbers: tuple[int, ...], target: int) -> set[str]:
    """The texts of every tree that reaches the target, without white space or needless parentheses."""

    class Plain(random.Random):
        def random(self) -> float:
            return 1.0

        def choice(self, seq: Any) -> Any:
            return seq[0]

    def every_tree(numbers: tuple[int, ...]) -> list[Tree | int]:
        if len(numbers) == 1:
            return [numbers[0]]
        return [
            Tree(symbol, left, right)
            for i in range(1, len(numbers))
            for left in every_tree(numbers[:i])
            for right in every_tree(numbers[i:])
            for symbol in "+-*/"
        ]

    texts = set()
    for order in set(itertools.permutations(numbers)):
        for tree in every_tree(order):
            with contextlib.suppress(ZeroDivisionError):
                if value(tree) == target:
                    texts.add(spell(tree, Plain()))
    return texts


@pytest.mark.parametrize("operands", [2, 3, 4])
def test_problems_are_distinct_solvable_and_in_range(operands: int) -> None:
    found = data.problems(7, 100, operands, low=2, high=15, max_target=50)
    assert len(set(found)) == len(found) == 100
    for problem in found:
        assert len(problem.numbers) == operands
        assert list(problem.numbers) == sorted(problem.numbers)
        assert 2 <= problem.numbers[0] <= problem.numbers[-1] <= 15
        assert 1 <= problem.target <= 50
        assert data.solutions(problem.numbers, problem.target)


def test_the_problems_that_exist_are_exactly_those_of_brute_force() -> None:
    expected = {
        Problem(numbers, int(reached))
        for numbers in itertools.combinations_with_replacement(range(1, 6), 3)
        for reached in minimal_texts(numbers, "+-*").values()
        if reached is not None and 1 <= reached <= 20
    }
    size: dict[str, Any] = {"operands": 3, "low": 1, "high": 5, "max_target": 20}
    assert set(data.problems(0, len(expected), **size)) == expected
    with pytest.raises(ValueError, match=f"only {len(expected)} exist"):
        data.problems(0, len(expected) + 1, **size)


def test_problems_follow_the_seed() -> None:
    assert data.problems(1, 40) == data.problems(1, 40) == data.problems(1, 80)[:40]
    assert data.problems(1, 40) != data.problems(2, 40)
    assert data.problems(1, 0) == []
    assert data.problems(20, 3) == PINNED


PINNED = [Problem((3, 6, 17), 51), Problem((6, 8, 19), 38), Problem((1, 1, 4), 6)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": -1},
        {"operands": 0},
        {"low": 5, "high": 4},
        {"low": -1},
        {"max_target": 0},
        {"operators": "+^"},
    ],
)
def test_impossible_requests_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        data.problems(**({"seed": 0, "count": 1} | wrong))


def test_train_and_test_are_disjoint() -> None:
    found = data.problems(3, 300)
    train, test = data.split(found, 60)
    assert (len(train), len(test)) == (240, 60)
    assert not set(train) & set(test)
    assert set(train) | set(test) == set(found)
    assert data.split(data.problems(3, 500), 60)[1] == test
    with pytest.raises(ValueError, match="300 exist"):
        data.split(found, 301)
    with pytest.raises(ValueError, match="distinct"):
        data.split([*found, found[0]], 60)


def test_rows_are_a_verl_prompt_data_set() -> None:
    found = data.problems(5, 50, operands=4)
    table = data.rows(found, "test")
    assert [f"{field.name}: {field.type}" for field in table.schema] == [
        "data_source: string",
        "prompt: list<item: struct<role: string, content: string>>",
        "ability: string",
        "reward_model: struct<style: string, ground_truth: string>",
        "extra_info: struct<split: string, index: int64>",
    ]
    for index, (problem, row) in enumerate(zip(found, table.to_pylist(), strict=True)):
        assert (row["data_source"], row["ability"]) == ("countdown", "math")
        assert row["extra_info"] == {"split": "test", "index": index}
        assert json.loads(row["reward_model"]["ground_truth"]) == {
            "target": problem.target,
            "numbers": list(problem.numbers),
        }
        (message,) = row["prompt"]
        assert message["role"] == "user"
        listed = message["content"].removeprefix("Using the numbers ").split(", write")[0]
        assert sorted(map(int, listed.replace(" and ", ", ").split(", "))) == list(problem.numbers)
        assert f"equals {problem.target}. " in message["content"]


def test_prompt_text() -> None:
    assert data.prompt(Problem((3, 7, 12), 24)) == (
        "Using the numbers 3, 7 and 12, write an expression that equals 24. Use each number exactly once, "
        "and only + - * / and parentheses. Put the expression in <answer></answer>."
    )
    assert data.prompt(Problem((5, 5), 25)).startswith("Using the numbers 5 and 5, write")
    assert data.prompt(Problem((5,), 5)).startswith("Using the numbers 5, write")


@pytest.mark.parametrize(("operands", "operators"), [(3, "+-*"), (3, "+-*/"), (4, "+-*")])
def test_every_worked_example_scores_one(operands: int, operators: str) -> None:
    found = data.problems(9, 150, operands, operators=operators)
    examples = data.sft_rows(found, 2, per_problem=3, operators=operators).to_pylist()
    questions = data.rows(found).to_pylist()
    assert len(examples) == 450
    for i, example in enumerate(examples):
        question = questions[i // 3]
        assert example["prompt"] == question["prompt"]
        truth = question["reward_model"]["ground_truth"]
        assert compute_score("countdown", example["response"], truth) == RIGHT


def test_worked_examples_are_drawn_uniformly() -> None:
    problem = Problem((1, 2, 3), 6)
    every = data.solutions(problem.numbers, problem.target)
    draws = data.sft_rows([problem], 0, per_problem=200 * len(every))["response"].to_pylist()
    counts = [draws.count(f"<answer>{text}</answer>") for text in every]
    assert sum(counts) == len(draws)
    assert all(140 < count < 260 for count in counts)


def test_worked_examples_need_a_solution() -> None:
    with pytest.raises(ValueError, match="no solution"):
        data.sft_rows([Problem((1, 1, 1), 99)], 0)


def test_large_numbers_are_never_multiplied() -> None:
    found = data.problems(3, 300, high=20, high_product=10)
    assert any(problem.numbers[-1] > 10 for problem in found)
    assert any(not data.solutions(*problem, "+-") for problem in found)
    for problem in found:
        assert problem.numbers[-1] <= 10 or data.solutions(*problem, "+-")


def test_the_same_seed_gives_the_same_tables() -> None:
    found = data.problems(4, 60)
    assert data.rows(found).equals(data.rows(found))
    assert data.sft_rows(found, 8, 2).equals(data.sft_rows(found, 8, 2))
    assert not data.sft_rows(found, 8, 2).equals(data.sft_rows(found, 9, 2))


def test_another_process_generates_the_same_bytes_without_torch() -> None:
    script = (
        "import sys; from ratchet.rlhf.data import countdown_dataset as data; assert 'torch' not in sys.modules;"
        "assert 'pyarrow' not in sys.modules; found = data.problems(6, 40);"
        "print(found, data.rows(found).to_pylist(), data.sft_rows(found, 1).to_pylist())"
    )
    found = data.problems(6, 40)
    here = f"{found} {data.rows(found).to_pylist()} {data.sft_rows(found, 1).to_pylist()}\n"
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": "123"}
    there = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert there.stdout == here, there.stderr


def test_five_thousand_problems_take_seconds() -> None:
    start = time.perf_counter()
    found = data.problems(0, 5000)
    assert data.sft_rows(found, 0).num_rows == 5000
    assert time.perf_counter() - start < 20
