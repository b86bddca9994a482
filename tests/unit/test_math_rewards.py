"""GSM8K and mathematics: every spelling of a right answer, and nothing for anything else."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from ratchet.rlhf.rewards import auto, countdown, format, gsm8k, length
from ratchet.rlhf.rewards import math as latex


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("#### 42", "42"),
        ("so 6 * 7 = 42\n#### 42", "42"),
        ("####42", "42"),
        ("#### $42", "42"),
        ("#### 42.00", "42"),
        ("#### 42.", "42"),
        ("#### 1,234", "1234"),
        ("#### 1,234,567.50", "1234567.5"),
        ("#### -7", "-7"),
        ("#### \u22127", "-7"),
        ("#### $-7", "-7"),
        ("#### **42**", "42"),
        ("#### \\boxed{42}", "42"),
        ("#### 0.5", ".5"),
        ("#### 41\nno:\n#### 42", "42"),
        ("#### 42 dollars", "42"),
        ("#### 42%", "42"),
        ("#### 18", "Janet sells 9 eggs.\n#### 18"),
    ],
)
def test_gsm8k_strict(response: str, truth: str) -> None:
    assert gsm8k.compute_score("gsm8k", response, truth, method="strict") == {"score": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("answer:\n- 42", "42"),
        ("total - 42 apples", "42"),
        ("it is -- 42", "42"),
        ("item-42", "42"),
        ("5 - 3", "3"),
        ("x = - 42", "-42"),
        ("(- 42)", "-42"),
        ("#### - 42", "-42"),
        ("\\boxed{- 42}", "-42"),
        ("_-42_", "-42"),
        ("10-3", "3"),
        ("it is -42", "-42"),
        ("(-42)", "-42"),
        ("x=-$42", "-42"),
        ("\\boxed{1{,}234}", "1234"),
        ("\\boxed{32,\\!348}", "32348"),
        ("$ 1,234,567.50", "1234567.5"),
    ],
)
def test_gsm8k_tells_signs_from_dashes_and_knows_separators(response: str, truth: str) -> None:
    assert gsm8k.compute_score("gsm8k", response, truth)["score"] == 1.0


@pytest.mark.parametrize("response", ["The answer is 42.", "42", "$42.00!", "at first 7, then 42", "**42**", "= 42,"])
def test_gsm8k_flexible(response: str) -> None:
    assert gsm8k.compute_score("gsm8k", response, "42") == {"score": 1.0, "format": 0.0}
    assert gsm8k.compute_score("gsm8k", response, "42", method="strict")["score"] == 0.0


@pytest.mark.parametrize(
    "response",
    ["", "####", "#### forty-two", "#### 4 2", "#### 42\n#### 43", "#### 420", "#### 4,2", "#### 142", "-42"],
)
def test_gsm8k_wrong(response: str) -> None:
    assert gsm8k.compute_score("gsm8k", response, "42", method="strict")["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5"),
        ("\\boxed{0.5}", "\\frac12"),
        ("\\boxed{1} no, \\boxed{2}", "2"),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2"),
        ("the answer is $\\sqrt{8}$", "2\\sqrt{2}"),
        ("I get 3, and so 2.", "2"),
        ("\\boxed{(1, 2)}", "(1,2)"),
        ("\\boxed{\\{1, 2\\}}", "\\{2,1\\}"),
        ("\\boxed{x\\le 3}", "(-\\infty,3]"),
        ("\\boxed{(-\\infty,3]}", "x\\le 3"),
        ("\\boxed{x \\ge 3}", "x \\in [3,\\infty)"),
        ("the sum is $\\boxed 4$.", "4"),
        ("so \\boxed 4. (Put it in \\boxed and end.)", "4"),
        ("\\[\\boxed \\frac{1}{2}.\\]", "\\frac12"),
        ("\\boxed{4}", "The roots are $x=2$ and $x=-3$; the sum is $\\boxed 4$."),
        ("\\fbox{4}, and not 5", "4"),
        ("$\\boxed 4$, where $a \\boxedminus b$", "4"),
        ("I get " + "1" * 31 + ".", "1" * 31),
        ("One thing after another, " * 50 + "so it is $\\frac12$", "0.5"),
    ],
)
def test_mathematics(response: str, truth: str) -> None:
    assert latex.compute_score("math", response, truth) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "12x^2y^3",
        "\\frac{x^2}{y^2}",
        "2^3 \\cdot 3^2",
        "a^2b^2c^2 + (a+b)^2(c+d)^3",
        "30^\\circ \\text{ and } 60^\\circ",
        "\\sin^2 x \\cos^2 x",
        "10^{4} \\times 2^{3}",
        "\\begin{pmatrix} x^2 & y^2 \\\\ 1 & z^2 \\end{pmatrix}",
        "e^{x^2}",
        "2^{2^3}",
        "5^{2^{10}}",
        "e^{-\\frac{\\lambda^2 (t_2-t_1)^2}{4}}",
        "e^{-\\frac{(x-\\mu_1)^2}{2\\sigma_1^2}}",
        "\\binom{10}{3} + \\sqrt[3]{x^2}",
        "2^{1010}",
        "x^{1000}",
        "100!",
        "\\$18.90",
        "\\$32,\\!348",
        "\\left(-\\infty, \\frac{3}{5}\\right]",
        "\\binom{2020}{1010}",
    ],
)
def test_an_answer_like_the_truth_is_right(answer: str) -> None:
    """Several powers are no tower of them."""
    assert latex.compute_score("math", f"It is $\\boxed{{{answer}}}$.", answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9}}",
        "9^9^9^9",
        "9**9**9",
        "9^{99999999}",
        "9^\\frac{99999999}{1}",
        "((9^{999})^{999})^{999}",
        "\\left(9^{9999}\\right)^{9999}",
        "{9^{9999}}^{9999}",
        "|9^{9999}|^{9999}",
        "9^{-9^{-9^9}}",
        "99999!",
        "((9!)!)!",
        "9!!!!",
        "2^{20!}",
        "|999999999|!",
        "999999999\\,!",
        "\\lfloor 999999999\\rfloor!",
        "\\left\\lfloor 9^{9999}\\right\\rfloor^{9999}",
        "9^\\,99999999",
        "\\Gamma(999999999)",
        "\\binom{99999999}{49999999}",
        "\\sqrt[\\frac{1}{99999999}]{9}",
        "1" * 31,
        "\\sqrt{" * 40 + "2" + "}" * 40,
        "(" * 900 + "1" + ")" * 900,
    ],
)
def test_what_would_have_no_end_is_not_begun(answer: str) -> None:
    assert latex.bits(answer) > latex.MAX_BITS
    assert latex.compute_score("math", f"\\boxed{{{answer}}}", "42") == 0.0


@pytest.mark.parametrize("truth", ["1" * 31, "2^{2^{20}}", "9^{9^{9}}", "\\binom{99999999}{49999999}", "(" * 40 + "x"])
def test_the_text_of_the_truth_is_right_however_much_it_would_be_to_compute(truth: str) -> None:
    assert latex.bits(truth) > latex.MAX_BITS or truth == "2^{2^{20}}"
    for answer in (f"\\boxed{{ {truth} }}", f"It is $\\boxed{{{truth}}}$.", f"$\\boxed {truth}$", truth):
        assert latex.compute_score("math", answer, truth) == 1.0
    assert latex.compute_score("math", "\\boxed{3}", truth) == 0.0


def test_a_box_that_holds_a_long_truth_is_read_whole() -> None:
    truth = "1" * (latex.TAIL + 1)
    assert latex.compute_score("math", f"so it is \\boxed{{{truth}}}", truth) == 1.0


def test_a_box_that_has_no_end_is_none() -> None:
    assert latex.boxed("\\boxed{1}, no: \\boxed{2") is None
    assert latex.boxed("\\boxed{1} (in a \\boxed)") == "\\boxed{1}"


@pytest.mark.parametrize(
    ("reward", "truth", "why"),
    [
        (gsm8k, "a dozen", "is not a number"),
        (latex, " ", "has no answer"),
        (latex, "The answer is $\\boxed{}$.", "has no answer"),
    ],
)
def test_a_truth_that_no_response_can_have_is_an_error(reward: Any, truth: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        reward.check_truth(truth)
    with pytest.raises(ValueError, match=why):
        reward.compute_score("any", "4", truth)


def test_gsm8k_compares_numbers_of_any_length() -> None:
    long = "9" * 40
    assert gsm8k.compute_score("gsm8k", f"#### {long}", long) == {"score": 1.0, "format": 1.0}
    assert gsm8k.compute_score("gsm8k", f"#### {long}1", long)["score"] == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "\\boxed{",
        "\\boxed{3}",
        "\\boxed{\\frac{1}{3}}",
        "I don't know",
        "\\boxed{0.5}" + ", I believe" * 100,
    ],
)
def test_mathematics_wrong(response: str) -> None:
    assert latex.compute_score("math", response, "0.5") == 0.0


def hostile() -> list[str]:
    """Answers that no one should take for right: endless, deep, malformed, and code."""
    rng = random.Random(0)
    pieces = ["9**9**9", "9^{9^{9^{9}}}", "99999999!", "((9!)!)!", "\\frac{1}{0}", "__import__('os').system('touch x')"]
    pieces += [
        "exec('1')",
        "open('x','w')",
        "\\input{/etc/passwd}",
        "\\boxed{" * 50,
        "(" * 20_000,
        "{" * 5_000,
        "9" * 9_000,
    ]
    pieces += [
        "\x00",
        "\u202e42",
        "\\boxed{\x00}",
        "1e999999999",
        "0x2a",
        "NaN",
        "inf",
        "\\infty",
        "lambda: 42",
        "2^{10000000}",
    ]
    pieces += ["\\int_0^\\infty e^{-x^2} dx", "\\sum_{n=1}^{99999999} n", "\\prod_{n=1}^{9999999} n", "🦆", "\\" * 999]
    mixed = ["".join(rng.choices(pieces, k=rng.randint(1, 4))) for _ in range(70)]
    return [*pieces, *(f"\\boxed{{{piece[:900]}}}" for piece in pieces), *mixed]


def test_plain_expressions_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify.parser

    def evaluated(text: str) -> None:
        raise AssertionError(f"evaluated: {text}")

    monkeypatch.setattr(math_verify.parser, "parse_expr_cached", evaluated)
    for answer in ("1 + 1", "so it is 4/2", "the answer is: 1+1.", "final answer is 1+1. I hope"):
        latex.compute_score("math", answer, "2")


def test_hostile_answers_score_nothing_and_end_soon(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    answers = hostile()
    assert len(answers) >= 100
    for answer in answers:
        started = time.monotonic()
        found = [
            gsm8k.compute_score("gsm8k", answer, "5318008")["score"],
            latex.compute_score("math", answer, "5318008"),
        ]
        assert found == [0.0, 0.0], answer[:80]
        assert time.monotonic() - started < 10 * latex.SECONDS, f"endless: {answer[:80]}"
    from pathlib import Path

    assert not list(Path(str(tmp_path)).iterdir()), "nothing was run"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>hm</think><answer>42</answer>", 1.0),
        (" <think>a\nb</think>\n <answer>42</answer>\n", 1.0),
        ("<think>hm</think><answer></answer>", 0.0),
        ("<answer>42</answer>", 0.0),
        ("<think>hm</think> so <answer>42</answer>", 0.0),
        ("<think>hm</think><answer>42</answer>!", 0.0),
        ("<answer>42</answer><think>hm</think>", 0.0),
        ("<think><think>hm</think><answer>42</answer>", 0.0),
    ],
)
def test_format(response: str, score: float) -> None:
    assert format.compute_score("any", response, "") == score
    opened = format.compute_score("any", response.strip().removeprefix("<think>"), "", prompt_tail="<think>")
    assert opened == (score if response.strip().startswith("<think>") else 0.0)


@pytest.mark.parametrize(
    ("reward", "prompt_tail", "response", "truth"),
    [
        (format, "<|Assistant|><think>\n", "hm</think><answer>42</answer>", ""),
        (format, "Assistant: <think>", "hm</think>\n<answer>42</answer>", ""),
        (format, "<|im_start|>assistant\n", "<think>hm</think><answer>42</answer>", ""),
        (gsm8k, "#### ", "42", "42"),
        (latex, "The answer is \\boxed{", "3}, and not 5", "3"),
        (countdown, "Assistant: <answer>\n", "3 * (15 - 7)</answer>", {"target": 24, "numbers": [3, 7, 15]}),
    ],
)
def test_what_the_prompt_opens_the_response_need_not(reward: Any, prompt_tail: str, response: str, truth: Any) -> None:
    found = reward.compute_score("any", response, truth, prompt_tail=prompt_tail)
    assert (found if isinstance(found, float) else set(found.values())) in (1.0, {1.0})


@pytest.mark.parametrize(("characters", "score"), [(0, 0.0), (10, 0.0), (12, -0.5), (14, -1.0), (99, -1.0)])
def test_length(characters: int, score: float) -> None:
    found = length.compute_score("any", "x" * characters, "", wanted_characters=10, buffer_characters=4)
    assert found == score


def test_a_built_in_by_source_or_style() -> None:
    assert auto.reward_of("openai/gsm8k", None) == "gsm8k"
    assert auto.reward_of("lighteval/MATH", "rule") == "math"
    assert auto.reward_of("countdown", None) == "countdown"
    assert auto.reward_of("mine", "gsm8k") == "gsm8k"
    assert auto.compute_score("mine", "#### 3", "3", {"reward_style": "gsm8k"})["score"] == 1.0
    assert auto.reward_of("mine", "rule") is None
    with pytest.raises(ValueError, match="no built-in reward for data_source mine"):
        auto.compute_score("mine", "#### 3", "3", {})
