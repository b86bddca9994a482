"""Environments of gymnasium: played as texts, and restored from JSON in the state in which they were."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet.flows.commands.app import app
from ratchet.rlhf.environments.gymnasium import Environment, made, prompts
from ratchet.rlhf.environments.gymnasium_state import Attributes, NotStorable
from ratchet.rlhf.errors import UserError
from ratchet.testing import check_environment
from tests.extras import needs

pytestmark = needs("gymnasium")
CLASSIC = ("FrozenLake", "Taxi", "CliffWalking", "Blackjack")
CONTROL = ("CartPole", "Acrobot", "MountainCar", "Pendulum")


def newest(name: str) -> str:
    """The id of the newest version that the installed package has."""
    from gymnasium import registry

    return f"{name}-v{max(int(spec.version or 0) for spec in registry.values() if spec.name == name)}"


def begun(name: str, **options: Any) -> Environment:
    """An environment after its reset, as a run begins it."""
    [row] = prompts(name, options, range(7, 8), None).to_pylist()
    environment = Environment(name, options)
    environment.reset(row["prompt"], None, row["extra_info"])
    return environment


def restored(name: str, state: str, **options: Any) -> Environment:
    environment = Environment(name, options)
    environment.restore(state)
    return environment


def play(environment: Environment, turns: list[str]) -> list[tuple[Any, float]]:
    answers = [environment.step(turn, "key") for turn in turns]
    return [(answer.content, answer.reward) for answer in answers]


@pytest.mark.parametrize("name", CLASSIC)
def test_a_restored_environment_goes_on_as_the_first_would(name: str) -> None:
    """Also from a state that it was restored in, and with the same random numbers."""
    import gymnasium

    options: dict[str, Any] = {"sab": True} if name == "Blackjack" else {}
    name = newest(name)
    space = gymnasium.make(name, **options).action_space
    space.seed(3)
    turns = [f"so I take {space.sample()}" for _ in range(4)]
    first = begun(name, **options)
    second = first
    for turn in turns:
        state = second.snapshot()
        assert "changed" in json.loads(state) and "actions" not in json.loads(state)
        assert len(state) < 1500, "only what has changed"
        second = restored(name, state, **options)
        assert play(first, [turn]) == play(second, [turn])
        assert first.snapshot() == second.snapshot()


@pytest.mark.parametrize("name", CONTROL)
def test_attributes_hold_arrays_and_random_numbers(name: str) -> None:
    import gymnasium

    first, second, other = (gymnasium.make(newest(name), disable_env_checker=True) for _ in range(3))
    space = other.action_space  # one that has drawn is another state
    space.seed(1)
    first.reset(seed=5)
    kept = Attributes(first)
    for _ in range(10):
        first.step(space.sample())
        first.unwrapped.np_random.random()
    text = json.dumps(kept.changed())
    second.reset(seed=5)
    again = Attributes(second)
    assert again.digest == kept.digest
    again.set(json.loads(text))
    assert again.changed() == kept.changed()
    first.action_space.seed(1)
    with pytest.raises(NotStorable, match="action_space has changed, and cannot be stored"):
        kept.changed()
    for _ in range(10):
        action = space.sample()
        for one, another in zip(first.step(action)[:4], second.step(action)[:4], strict=True):
            assert (one == another).all() if hasattr(one, "all") else one == another
        assert first.unwrapped.np_random.random() == second.unwrapped.np_random.random()


def test_the_limit_of_steps_and_the_wrappers_belong_to_the_state(tmp_path: Any) -> None:
    options = {"folder": str(tmp_path / "steps")}
    first = begun("tests.word_game:Lake-v0", **options)
    answers = play(first, ["ab", "abc"])
    second = restored("tests.word_game:Lake-v0", first.snapshot(), **options)
    assert len((tmp_path / "steps").read_text().splitlines()) == 2, "no step is made again"
    assert all(content is not None for content, _ in answers)
    ends = [content is None for content, _ in play(second, ["ab", "abc", "ab"])]
    assert ends == [False, False, True], "the fifth step is the last"


@pytest.mark.parametrize(
    "inside", ["attributes", "an object", "two attributes", "a set", "a function", "an object later"]
)
def test_what_json_cannot_hold_is_played_again(inside: str) -> None:
    name = "tests.word_game:Draws-v0"
    first = begun(name, inside=inside)
    play(first, ["a", "b"])
    state = first.snapshot()
    assert ("actions" in json.loads(state)) == (inside != "attributes")
    second = restored(name, state, inside=inside)
    third = restored(name, second.snapshot(), inside=inside)
    expected = play(first, ["c", "d"])
    assert play(second, ["c", "d"]) == play(third, ["c", "d"]) == expected


def test_a_reset_that_leads_elsewhere_is_noticed() -> None:
    name = "tests.word_game:Draws-v0"
    first = begun(name, inside="the process")
    play(first, ["a"])
    with pytest.raises(ValueError, match="does not begin as before with the seed 7"):
        restored(name, first.snapshot(), inside="the process")


def test_a_state_that_can_no_longer_be_stored_after_a_restore_is_an_error() -> None:
    name = "tests.word_game:Draws-v0"
    first = begun(name, inside="an object later")
    second = restored(name, first.snapshot(), inside="an object later")
    play(second, ["a"])
    with pytest.raises(ValueError, match=r"can no longer be stored: a types.SimpleNamespace cannot be stored"):
        second.snapshot()
    with pytest.raises(NotStorable):
        Attributes(second._made)


def test_numbers_are_actions_and_other_answers_are_none() -> None:
    played = check_environment(
        "gymnasium",
        ["I go to 9.", "nowhere", "first 1, then 2", "-1", "7" * 5000],
        {"messages": [{"role": "user", "content": "0"}], "extra_info": {"seed": 3}},
        environment=newest("FrozenLake"),
        arguments={"is_slippery": False},
    )
    error = [{"role": "user", "content": "error: an answer is a number from 0 to 3"}]
    assert [observation.content for observation in played[:2]] == [error, error]
    assert played[2].content == [{"role": "user", "content": "1"}], "to the right"
    assert played[3].content == [{"role": "user", "content": "5"}] or played[3].content is None, "down, into a hole"


def test_a_prompt_without_the_first_observation_is_refused() -> None:
    environment = Environment("tests.word_game:Echo-v0")
    with pytest.raises(UserError, match=r"begins with 'seed 8' for the seed 8, .*: `ratchet data gymnasium"):
        environment.reset([{"role": "user", "content": "play"}], None, {"seed": 8})
    environment.reset([{"role": "user", "content": "play: seed 8"}], None, {"seed": 8})


def test_what_has_no_texts_is_refused() -> None:
    for name, says in (
        ("tests.word_game:Numbers-v0", r"has the space Box\(.*only Text, Discrete"),
        (newest("CartPole"), r"has the space Box\("),
        ("Nothing-v0", r"doesn't exist.*is it installed \(extra gymnasium\)\?"),
    ):
        with pytest.raises(UserError, match=f"^rollout.environment gymnasium:{name}.*{says}") as refused:
            made(name, {})
        assert "\n" not in str(refused.value)


def test_prompts_hold_the_first_observation(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    file = str(tmp_path / "in" / "lakes.parquet")
    app(
        ["data", "gymnasium", newest("FrozenLake"), file, "map_name=8x8", "--size", "3", "--seed", "4"],
        standalone_mode=False,
    )
    rows = pq.read_table(file).to_pylist()
    assert [row["extra_info"]["seed"] for row in rows] == [4, 5, 6]
    said = "Each answer is a number from 0 to 3.\n0"
    assert rows[0]["prompt"] == [{"role": "user", "content": said}]
    [row] = prompts("tests.word_game:Echo-v0", {}, range(9, 10), "Say something.").to_pylist()
    assert row["prompt"] == [{"role": "user", "content": "Say something.\nseed 9"}]
