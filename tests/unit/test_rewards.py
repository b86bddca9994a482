"""Finding a reward, and what it may return."""

from __future__ import annotations

import math
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratchet.rlhf.config import RewardConfig, parse_config
from ratchet.rlhf.errors import NotFinite, RatchetError, UserError
from ratchet.rlhf.rewards import auto
from ratchet.rlhf.rewards.functions import Reward, Score, Trajectory
from ratchet.rlhf.rewards.registry import check_rewards, load_reward, reward_digest
from tests.scoring import pool_of, trajectory


def score(function: Any, *values: Any, **more: Any) -> Score:
    """The score that a function gives to a response; raises the error if there is none."""
    return scores(function, trajectory(*values, **more))[0]


def scores(function: Any, *group: Trajectory) -> list[Score]:
    outcomes = Reward("a", function).score(group)
    for outcome in outcomes:
        if isinstance(outcome, RatchetError):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, Score)]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "a_users_reward.py"
    path.write_text(
        "LIMIT = 3\n\ndef length(solution_str, ground_truth, **_):\n    return min(len(solution_str), LIMIT)\n"
    )
    return path


def test_builtin_and_users_rewards_are_found(package: Path) -> None:
    assert score(load_reward("constant"), "any", "text", "", None).score == 1.0
    assert score(load_reward("a_users_reward:length"), "any", "four", "", None).score == 3.0
    other = package.with_name("alone.py")
    other.write_text("def compute_score(solution_str, **_):\n    return 7\n")
    assert score(load_reward(str(other)), "any", "four", "", None).score == 7.0, "a file alone: its compute_score"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nonsense", "No module named 'ratchet.rlhf.rewards.nonsense'; name a built-in"),
        ("", "name a built-in"),
        ("no.such.module:f", "No module named 'no'"),
        ("a_users_reward:width", "a_users_reward has no width: name a function"),
        ("a_users_reward:LIMIT", "reward.function a_users_reward:LIMIT is not a function or a class"),
        (":f", "Empty module name"),
        (".relative:f", "relative"),
    ],
)
def test_what_is_no_reward_is_said_in_one_line(package: Path, name: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        load_reward(name)
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"reward.function {name}")
    assert "\n" not in str(refused.value)


def test_a_dict_holds_the_score_and_named_parts() -> None:
    given = {"score": 1, "format": True, "length": 0.5}
    more = {7: 1.0, "text": "no", "huge": 10**400}
    assert score(lambda **_: {**given, **more}, "gsm8k", "text", "42", None).parts == {"format": 1.0, "length": 0.5}
    found = score(lambda **_: given, "gsm8k", "text", "42", None)
    assert (found.score, found.parts) == (1.0, {"format": 1.0, "length": 0.5})
    assert given == {"score": 1, "format": True, "length": 0.5}, "the reward's own dict is left as it was"
    assert score(lambda **_: 2, "gsm8k", "text", "42", None).parts == {}


@pytest.mark.parametrize(
    "half",
    [
        Fraction(1, 2),
        Decimal("0.5"),
        np.float16(0.5),
        np.array(0.5),
        torch.tensor(0.5),
        torch.tensor(0.5, dtype=torch.bfloat16),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_numbers_of_every_library_are_numbers(half: Any) -> None:
    given = {"score": half, "half": half, "right": np.bool_(True), "count": np.int8(3), "tensor": torch.tensor(True)}
    found = score(lambda **_: given)
    assert found == Score(0.5, {"half": 0.5, "right": 1.0, "count": 3.0, "tensor": 1.0})
    assert score(lambda **_: np.bool_(True)) == Score(1.0, {})


def test_several_numbers_are_no_score() -> None:
    for several in (torch.tensor([1.0, 2.0]), np.array([1.0, 2.0])):
        assert score(lambda **_: {"score": 1.0, "parts": several}).parts == {}  # noqa: B023
        with pytest.raises(UserError, match="return a number, or a dict with `score`"):
            score(lambda **_: several)  # noqa: B023


def test_a_part_that_is_left_out_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "labels.py"
    path.write_text(
        "def compute_score(solution_str, **_):\n"
        "    return {'score': 1, 'kind': solution_str, 'ratio': float('nan'), 'right': True}\n"
    )
    notes: list[str] = []
    pool = pool_of({str(path): 1.0}, note=notes.append)
    for _ in range(2):
        assert [found.parts for found in pool.score([trajectory("any", text) for text in ("good", "bad")])] == [
            {"right": 1.0}
        ] * 2
    pool.close()
    assert notes == [
        f"reward.function {path}: the part kind is left out where it is no finite number ('good')",
        f"reward.function {path}: the part ratio is left out where it is no finite number (nan)",
    ]


def test_a_function_is_called_by_name_in_whatever_order_it_takes_them() -> None:
    def reward(solution_str: str, ground_truth: Any, *, extra_info: Any, data_source: str = "none") -> float:
        assert (data_source, solution_str) == ("gsm8k", "text")
        return float(ground_truth["target"] + extra_info["a"][0])

    assert score(reward, "gsm8k", "text", {"target": 1}, {"a": [2]}).score == 3.0
    check_rewards(RewardConfig(function=f"{__name__}:takes_names"))
    with pytest.raises(UserError, match="takes_others cannot be called as compute_score"):
        check_rewards(RewardConfig(function=f"{__name__}:takes_others"))


def takes_names(*, extra_info: Any, solution_str: str, **others: Any) -> float:
    return 0.0


def takes_others(source: str, answer: str, truth: str, extra: Any = None) -> float:
    return 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("as_dict", [True, False])
def test_what_is_not_finite_is_refused(value: float, as_dict: bool) -> None:
    with pytest.raises(NotFinite, match=rf"gsm8k.* {value}$"):
        score(lambda **_: {"score": value} if as_dict else value, "gsm8k", "text", "42", None)


@pytest.mark.parametrize("value", [None, "high", {}, {"reward": 1.0}, {"score": None}, 10**400])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"return a number, or a dict with `score`"):
        score(lambda **_: value, "gsm8k", "text", "42", None)


def test_options_of_one_function_need_no_name() -> None:
    tree: dict[str, Any] = {"model": "m", "data": {"train": "t"}}
    for options in ({"method": "strict"}, {"gsm8k": {"method": "strict"}}):
        config = parse_config(tree | {"reward": {"function": "gsm8k", "options": options}}, "config")
        assert config.reward.options == {"gsm8k": {"method": "strict"}}
        assert config.with_values({}).reward == config.reward


def test_changed_code_is_another_reward() -> None:
    assert reward_digest(["constant"]) == reward_digest(["constant"]) != reward_digest(["countdown"])


TRL = """
def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def accuracy(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(content == expected) for content, expected in zip(contents, solution, strict=True)]

def few(completions, solution):
    return [float(len(solution))]

def sometimes(prompts, completions, ground_truth, **kwargs):
    return [1.0 if truth == completion else None for completion, truth in zip(completions, ground_truth, strict=True)]

async def later(completions, **kwargs):
    return [2.0 for _ in completions]

def one_number(completions, **kwargs):
    return 1.0

def by_tokens(completions, completion_ids):
    assert all(len(ids) == len(text) for ids, text in zip(completion_ids, completions, strict=True))
    return [float(sum(ids)) for ids in completion_ids]

def all_of_it(completions, **kwargs):
    return [float(len(ids)) for ids in kwargs["completion_ids"]]

def late(completions, trainer_state, log_metric, **kwargs):
    return [0.0 for _ in completions]

def never(completions, trainer_state=None, log_extra=None, **kwargs):
    return [float(trainer_state is log_extra is None) for _ in completions]
"""
CHAT = [{"role": "user", "content": "1 + 1?"}]


@pytest.fixture
def trl(tmp_path: Path) -> Path:
    path = tmp_path / "trl_rewards.py"
    path.write_text(TRL)
    return path


def test_rewards_of_trls_signature(trl: Path) -> None:
    """Completions are texts or messages, as the dataset's prompts are, and every column is a list."""
    for name, prompt, expected in (
        ("lengths", "1 + 1?", 3.0),
        ("accuracy", CHAT, 1.0),
        ("few", CHAT, 1.0),
        ("sometimes", "1 + 1?", 1.0),
        ("later", "1 + 1?", 2.0),
    ):
        function = load_reward(f"{trl}:{name}")
        check_rewards(RewardConfig(function=f"{trl}:{name}"))
        assert score(function, "any", "two", "two", {"solution": "two"}, prompt=prompt).score == expected, name  # type: ignore[arg-type]


def test_what_is_wrong_with_a_reward_of_trls_signature(trl: Path) -> None:
    with pytest.raises(UserError, match="needs the column solution, which the dataset does not have"):
        score(load_reward(f"{trl}:accuracy"), "any", "two", "two", {"level": 3}, prompt=CHAT)
    with pytest.raises(UserError, match=r"returned 1\.0: return a list with a number for each completion"):
        score(load_reward(f"{trl}:one_number"), "any", "two", "two", {}, prompt=CHAT)
    with pytest.raises(UserError, match=r"has depth, which reward.function .*few does not take"):
        check_rewards(RewardConfig(function=f"{trl}:few", options={f"{trl}:few": {"depth": 1}}))


def test_what_trl_passes_besides_columns(trl: Path) -> None:
    """The tokens too; not what only its trainer has."""
    pool = pool_of({f"{trl}:by_tokens": 1.0, f"{trl}:all_of_it": 1.0, f"{trl}:never": 1.0})
    try:
        [found] = pool.score([trajectory("any", "ab", prompt="Which?")])
    finally:
        pool.close()
    assert found == Score(97 + 98 + 2 + 1, {f"{trl}:by_tokens": 97 + 98, f"{trl}:all_of_it": 2, f"{trl}:never": 1})
    with pytest.raises(UserError) as refused:
        check_rewards(RewardConfig(function=f"{trl}:late"))
    assert str(refused.value) == (
        f"reward.function {trl}:late requires trainer_state and log_metric, which only TRL passes: write "
        "trainer_state=None, log_metric=None, and do without it where it is None"
    )
    check_rewards(RewardConfig(function=f"{trl}:never"))


def test_a_reward_that_does_not_judge_a_response_leaves_it_to_the_others(trl: Path) -> None:
    """TRL's functions return None for it."""
    mixed = pool_of({f"{trl}:sometimes": 1.0, "constant": 0.5})
    alone = pool_of({f"{trl}:sometimes": 1.0})
    rows = [trajectory("any", response, "two", {}, "1 + 1?") for response in ("two", "three")]
    try:
        right, other = mixed.score(rows)
        refused = alone.score(rows)[1]
    finally:
        mixed.close()
        alone.close()
    assert right == Score(1.5, {f"{trl}:sometimes": 1.0, "constant": 1.0})
    assert other == Score(0.5, {"constant": 1.0})
    assert "gave None to a response that no other reward judges" in str(refused)


GROUPS = """
def compute_scores(group):
    order = sorted(group, key=lambda trajectory: len(trajectory.solution_str))
    return [order.index(trajectory) for trajectory in group]

def with_parts(group, factor):
    return [{"score": factor * len(group), "a": 1.0} for _ in group]

def entries(group):
    return [None, KeyError("gone"), "high", 1.0][:len(group)]

def short(group):
    return [1.0]

def needs_more(group, model):
    return [0.0 for _ in group]

def dialogue(solution_str, ground_truth, turns, metadata, prompt, data_source=None, extra_info=None):
    assert [turn["role"] for turn in turns] == ["policy"] and prompt == "Which?"
    return metadata["response_length"] + metadata["iteration"]

def best_of_all(completions, ground_truth, level, **columns):
    assert level == [1] * len(completions) and columns["prompts"] == ["Which?"] * len(completions)
    return [float(completion == max(completions, key=len)) for completion in completions]
"""


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    path = tmp_path / "group_rewards.py"
    path.write_text(GROUPS)
    return path


def test_a_reward_of_a_group(groups: Path) -> None:
    """A file alone: its compute_scores; each prompt's responses are a group, wherever they are."""
    pool = pool_of({str(groups): 1.0, f"{groups}:with_parts": 0.5}, {f"{groups}:with_parts": {"factor": 2}}, workers=2)
    rows = [("aaa", "p0"), ("b", "p1"), ("a", "p0"), ("aa", "p0"), ("bb", "p1")]
    found = pool.score([trajectory("any", text, prompt_id=prompt) for text, prompt in rows])
    pool.close()
    ranks, sizes = [2, 0, 0, 1, 1], [3, 2, 3, 3, 2]
    name = f"{groups}:with_parts"
    assert found == [
        Score(rank + size, {str(groups): rank, name: 2.0 * size, f"{name}/a": 1.0})
        for rank, size in zip(ranks, sizes, strict=True)
    ]


def test_an_entry_is_what_became_of_its_response(groups: Path) -> None:
    pool = pool_of({f"{groups}:entries": 1.0})
    found = pool.score([trajectory("any", text) for text in ("a", "b", "c", "d")])
    pool.close()
    assert found[3] == Score(1.0, {})
    expected = ("gave None to", "KeyError: 'gone' (data_source any, response 'b')", "'high'")
    for outcome, says in zip(found[:3], expected, strict=True):
        assert says in str(outcome)
    with pytest.raises(
        UserError, match=r"returned \[1\.0\]: return a list with a number for each trajectory of the group"
    ):
        scores(load_reward(f"{groups}:short"), trajectory(), trajectory())


def test_turns_and_metadata_go_to_who_asks_for_them(groups: Path) -> None:
    assert score(load_reward(f"{groups}:dialogue"), "any", "four", prompt="Which?").score == 4 + 3
    check_rewards(RewardConfig(function=f"{groups}:dialogue"))
    with_option = Reward("a", load_reward(f"{groups}:dialogue"), {"metadata": {"response_length": 1, "iteration": 0}})
    assert with_option.score([trajectory("any", "four", prompt="Which?")]) == [Score(1.0, {})], "an option comes first"


def test_trls_rewards_see_the_responses_to_a_prompt_together(groups: Path) -> None:
    group = [trajectory("any", text, "t", {"level": 1}, "Which?") for text in ("a", "aaa", "aa")]
    assert [found.score for found in scores(load_reward(f"{groups}:best_of_all"), *group)] == [0.0, 1.0, 0.0]


def test_where_a_reward_of_a_group_does_not_fit(groups: Path) -> None:
    check_rewards(RewardConfig(function=str(groups)))
    check_rewards(RewardConfig(function=f"{groups}:best_of_all"), greedy="remax")
    with pytest.raises(UserError, match=r"advantage remax scores greedy answers, each of which is alone: choose"):
        check_rewards(RewardConfig(function=str(groups)), greedy="remax")
    with pytest.raises(
        UserError, match=r"compute_scores\(group=, \*\*reward.options\): missing a required argument: 'model'"
    ):
        check_rewards(RewardConfig(function=f"{groups}:needs_more"))
    check_rewards(RewardConfig(function=f"{groups}:needs_more", options={"model": "m"}))


WRAPPED = {
    "truth, answer": "answer == truth == 'two'",  # neither in the order of the others
    "truth, response": "(response, truth) == ('two', 'two')",
    "text": "text == 'two'",
    "a, b": "(a, b) == ('two', 'two')",
    "extra, dataset, *, label, prediction": "(extra['x'], dataset, label, prediction) == (7, 'any', 'two', 'two')",
    "question, answer": "(question, answer) == ('Which?', 'two')",
    "response, ground_truth, x": "(response, ground_truth, x['x']) == ('two', 'two', 7)",
    "out, data_source, ground_truth, extra_info, x": "(out, x) == ('two', 7)",
    "text, /, truth=None": "(text, truth) == ('two', 'two')",
    "*texts": "texts == ('two', 'two')",
    "solution_string, groundtruth": "solution_string == groundtruth == 'two'",
    "text, factor": "(text, factor) == ('two', 3)",
}


@pytest.mark.parametrize("parameters", WRAPPED)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_another_signature_is_refused_with_a_wrapper_that_works(tmp_path: Path, parameters: str, kind: str) -> None:
    path = tmp_path / "mine.py"
    source = f"{kind} f({parameters}):\n    return float({WRAPPED[parameters]})\n"
    path.write_text(source)
    options = {"factor": 3} if "factor" in parameters else {}
    with pytest.raises(UserError, match="nor as TRL's") as refused:
        check_rewards(RewardConfig(function=f"{path}:f", options=options))
    assert "\n" not in str(refused.value)
    wrapper = str(refused.value).split("`")[1]
    name = str(refused.value).rpartition("reward.function: ")[2]
    path.write_text(f"{source}\n{wrapper}\n")
    for module in [module for module in sys.modules if module.startswith("mine_")]:
        del sys.modules[module]
    check_rewards(RewardConfig(function=name, options=options))
    answer = trajectory("any", "two", "two", {"x": 7}, "Which?")
    assert Reward(name, load_reward(name), options).score([answer]) == [Score(1.0, {})]


def test_a_name_that_is_nearly_right_is_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(solution_string, truth):\n    return 0.0\n")
    with pytest.raises(UserError, match=r": did you mean solution_str instead of solution_string\? Rename it, or wrap"):
        check_rewards(RewardConfig(function=f"{path}:f"))


def test_auto_refuses_a_source_that_it_does_not_know() -> None:
    """It names the source, and each remedy is one."""
    assert parse_config({"model": "m", "data": {"train": "t"}}, "here").reward.function == "auto"
    problem = auto.problem_of("riddles", None)
    assert problem is not None
    assert "no built-in reward for data_source riddles" in problem
    check_rewards(RewardConfig(function=problem.split("built-in (reward.function: ")[1].partition(")")[0]))
    for style in problem.rpartition("(")[2].rstrip(")").split(", "):
        assert auto.problem_of("riddles", style) is None
