"""Finding a reward, and what it may return."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import parse_config
from rlhf.errors import NotFinite, UserError
from rlhf.rewards import check_rewards, load_reward, reward_digest, score


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
        ("nonsense", "No module named 'rlhf.rewards.nonsense'; name a built-in"),
        ("", "name a built-in"),
        ("no.such.module:f", "No module named 'no'"),
        ("a_users_reward:width", "has no attribute 'width'"),
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


def test_a_function_is_called_by_name_in_whatever_order_it_takes_them() -> None:
    def reward(solution_str: str, ground_truth: Any, *, extra_info: Any, data_source: str = "none") -> float:
        assert (data_source, solution_str) == ("gsm8k", "text")
        return float(ground_truth["target"] + extra_info["a"][0])

    assert score(reward, "gsm8k", "text", {"target": 1}, {"a": [2]}).score == 3.0
    check_rewards([f"{__name__}:takes_names"], {}, allow_code=False)
    with pytest.raises(UserError, match="takes_others cannot be called as compute_score"):
        check_rewards([f"{__name__}:takes_others"], {}, allow_code=False)


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
