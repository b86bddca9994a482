"""The rewards of turns, from what an environment says to what the losses read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ratchet.infra.workers.calls import Call, Context
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.role_engines import Engines
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import RunConfig, parse_config
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import TRAJECTORY, parts_of
from ratchet.tasks.stages.advantages import ADVANTAGES, AdvantagesConfig
from ratchet.tasks.stages.score import SCORE, ScoreConfig

POLICY, ENVIRONMENT = "policy", "environment"
TURNS: dict[str, Any] = {
    "turns": [
        [{"role": POLICY, "content": "a"}, {"role": ENVIRONMENT, "content": "X"}, {"role": POLICY, "content": "bc"}],
        [{"role": POLICY, "content": "de"}, {"role": ENVIRONMENT, "content": "X"}, {"role": POLICY, "content": "f"}],
    ],
    "turn_ends": [[1, 4], [2, 4]],
    "turn_rewards": [[1.0, 2.0], [-4.0, 0.0]],
}
GENERATED: dict[str, Any] = {
    "trajectory_id": ["it000000-p00000-s00", "it000000-p00000-s01"],
    "prompt_id": ["it000000-p00000"] * 2,
    "prompt": [""] * 2,
    "prompt_ids": [[1], [1]],
    "by_expert": [False] * 2,
    "response_mask": [[1, 0, 1, 1], [1, 1, 0, 1]],
    "rollout_log_probs": [[-1.0] * 4] * 2,
    "finish_reason": ["stop", "length"],
    "data_source": ["games"] * 2,
    "messages": ["[]"] * 2,
    "ground_truth_is_json": [False] * 2,
    "extra_info": ["{}"] * 2,
    "response": ["aXbc", "deXf"],
    "environment_reward": [3.0, -4.0],
    **TURNS,
}
SUMMED = {"turn_rewards": [None, None]}
"""The reward is of the whole conversation, as an agent returns it."""


def config_of(**changes: Any) -> RunConfig:
    tree = {
        "model": {"path": "model"},
        "data": {"train": "prompts", "prompts_per_iteration": 1},
        "rollout": {"n": 2, "max_response_tokens": 4, "environment": "calculator"},
        "reward": {"function": None},
        "actor": {"mini_batch_trajectories": 2},
        "critic": {"mini_batch_trajectories": 2},
    }
    return parse_config(tree, "here").with_values({key.replace("__", "."): value for key, value in changes.items()})


def read(stage: Any, batch: TrajectoryBatch) -> TrajectoryBatch:
    """What the stage gets of a batch: only what it declares, and null where it has nothing."""
    names = [name for columns in stage.reads.values() for name in columns]
    table = batch.table.select([name for name in batch.columns if name in ("trajectory_id", *names)])
    for name in stage.reads["generate"]:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), TRAJECTORY[name].type))
    return TrajectoryBatch(table)


def scored(config: RunConfig, **changes: Any) -> TrajectoryBatch:
    """Trajectories with the columns of `score`."""
    batch = TrajectoryBatch.of(GENERATED | changes)
    call = Call(0, "score", 0, ScoreConfig.of(config))
    resources = Resources(config)
    output = SCORE.compute(Context(call, read(SCORE, batch), Engines(config, ()), resources))
    resources.close()
    return TrajectoryBatch.join([batch, output.batch.cast({})])


def advantages(config: RunConfig, batch: TrajectoryBatch, **columns: Any) -> dict[str, list[Any]]:
    """The rows of the stage `advantages` for scored trajectories."""
    whole = {name: batch.array(name) for name in batch.columns} | columns
    call = Call(0, "advantages", 0, AdvantagesConfig.of(config))
    context = Context(call, read(ADVANTAGES, TrajectoryBatch.of(whole)), Engines(config, ()), Resources(config))
    return ADVANTAGES.compute(context).batch.table.to_pydict()


def test_the_reward_of_a_turn_stands_at_its_last_token() -> None:
    batch = scored(config_of())
    assert batch.list("token_scores") == [[1, 0, 0, 2], [0, -4, 0, 0]]
    assert batch.list("score") == batch.list("environment_reward") == [3, -4]


def test_a_reward_knows_how_the_rendered_prompt_ends() -> None:
    """Whose template opens the thought (DeepSeek-R1's)."""
    ends = ["?" * 300 + "<|Assistant|><think>\n", "<|Assistant|>"]
    batch = scored(
        config_of(
            reward__function={"format": 1.0, "tests.rewards_of_responses:tail_length": 1.0}, rollout__environment=None
        ),
        prompt=ends,
        response=["so</think><answer>4</answer>"] * 2,
        environment_reward=[None, None],
        turns=[None, None],
        **SUMMED,
    )
    assert [parts_of(parts)["format"] for parts in batch.list("reward_parts")] == [1.0, 0.0]
    assert [parts_of(parts)["tests.rewards_of_responses:tail_length"] for parts in batch.list("reward_parts")] == [
        200,
        13,
    ]


def test_what_a_rule_gives_besides_stands_at_the_last_token() -> None:
    config = config_of(reward__function="tests.rewards:letters")
    batch = scored(config)
    rules = [parts_of(parts)["rule"] for parts in batch.list("reward_parts")]
    assert batch.list("score") == [3 + rules[0], -4 + rules[1]]
    assert batch.list("token_scores") == [[1, 0, 0, 2], [0, -4, 0, 0]]
    rewards = advantages(config.with_values({"algorithm.advantage": "grpo"}), batch)["token_rewards"]
    assert rewards == [[1, 0, 0, 2 + rules[0]], [0, -4, 0, rules[1]]]


def test_a_process_reward_and_the_rewards_of_turns_add_up() -> None:
    config = config_of(reward__model={"path": "judge", "kind": "process", "weight": 2.0})
    steps = {"model_score": [0.75, 1.0], "model_token_scores": [[0.25, 0, 0.5, 0], [0, 0, 0, 1]]}
    batch = scored(config, **steps)
    assert batch.list("token_scores") == [[1.5, 0, 1, 2], [0, -4, 0, 2]]
    assert batch.list("score") == [4.5, -2]


def test_a_trajectory_that_counts_nothing_has_no_rewards_of_turns() -> None:
    failing = config_of(reward__function="tests.rewards:hostile", reward__on_error="zero")
    assert scored(config_of(), rollout_error=["it raised", None]).list("token_scores") == [[0] * 4, [0, -4, 0, 0]]
    batch = scored(failing, response=["raise", "deXf"])
    assert batch.list("reward_error")[0] is not None and batch.list("reward_error")[1] is None
    assert batch.list("token_scores") == [[0] * 4, [0, -4, 0, 0]]
    assert batch.list("score") == [0, -3]


def test_a_turn_that_is_empty_or_unanswered_has_no_token_of_its_own() -> None:
    """The first trajectory's second turn has no token, the other's ends with the response."""
    empty = {"turn_ends": [[1, 2, 4], [2, 4]], "turn_rewards": [[1.0, 0.5, 2.0], [-4.0, 0.0]]}
    config = config_of(algorithm__advantage="grpo")
    batch = scored(config, environment_reward=[3.5, -4.0], **empty)
    assert batch.list("token_scores") == [[1, 0, 0, 2], [0, -4, 0, 0]]
    assert advantages(config, batch)["token_rewards"] == [[1, 0, 0, 2.5], [0, -4, 0, 0]], "the sum is the score"


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_an_estimator_of_outcomes_knows_no_places(estimator: str) -> None:
    config = config_of(algorithm__advantage=estimator)
    placed, summed = (advantages(config, scored(config, **changes)) for changes in ({}, SUMMED))
    assert placed["token_rewards"] != summed["token_rewards"]
    for name in ("advantages", "returns"):
        assert placed[name] == summed[name]


@pytest.mark.parametrize(
    ("gamma", "lam", "placed", "summed"),
    [
        # the reward of a turn reaches no token after it, and its distance to the tokens before it counts
        (1.0, 1.0, [[3, 0, 2, 2], [-4, -4, 0, 0]], [[3, 0, 3, 3], [-4, -4, 0, -4]]),
        (0.5, 1.0, [[1.5, 0, 1, 2], [-2, -4, 0, 0]], [[0.75, 0, 1.5, 3], [-1, -2, 0, -4]]),
        # without a critic that knows more, lambda discounts as gamma does
        (1.0, 0.5, [[1.5, 0, 1, 2], [-2, -4, 0, 0]], [[0.75, 0, 1.5, 3], [-1, -2, 0, -4]]),
        (1.0, 0.0, [[1, 0, 0, 2], [0, -4, 0, 0]], [[0, 0, 0, 3], [0, 0, 0, -4]]),
    ],
)
def test_gae_discounts_from_the_token_that_ended_the_turn(
    gamma: float, lam: float, placed: list[list[float]], summed: list[list[float]]
) -> None:
    config = config_of(algorithm__advantage={"type": "gae", "gamma": gamma, "lam": lam, "whiten": False})
    values = {"values": [[0.0] * 4] * 2}
    assert advantages(config, scored(config), **values)["advantages"] == placed
    assert advantages(config, scored(config, **SUMMED), **values)["advantages"] == summed


def test_turn_gae_reads_the_critic_where_a_turn_begins() -> None:
    """The rewards of the turns are 1, 2 and -4, 0; the values before them 4, 2 and 8, 2."""
    config = config_of(algorithm__advantage={"type": "turn_gae", "gamma": 0.5, "lam": 0.5, "whiten": False})
    rows = advantages(config, scored(config), values=[[4.0, 77, 2, 77], [8.0, 77, 77, 2]])
    # delta: 1 + 1 - 4, 2 - 2 and -4 + 1 - 8, 0 - 2
    assert rows["advantages"] == [[-2, 0, 0, 0], [-11.5, -11.5, 0, -2]]
    assert rows["returns"] == [[2, 0, 2, 2], [-3.5, -3.5, 0, 0]]
    # the same, but the environment said nothing between the turns
    silent = scored(config, response_mask=[[1] * 4] * 2)
    rows = advantages(config, silent, values=[[4.0, 2, 77, 77], [8.0, 77, 2, 77]])
    assert rows["advantages"] == [[-2, 0, 0, 0], [-11.5, -11.5, -2, -2]]
    assert rows["returns"] == [[2, 2, 2, 2], [-3.5, -3.5, 0, 0]]


@pytest.mark.parametrize(
    ("said", "steps"),
    [
        ("X", [[3.5, 0, 1, 1], [-3.5, -3.5, 0, -1]]),  # returns 3, 2 and -4, 0
        ("Y", [[3.5, 0, 0, 0], [-3.5, -3.5, 0, 0]]),  # only the first turns follow the same: the prompt
        ("", [[3.5, 0, 0, 0], [-3.5, -3.5, 0, 0]]),  # nothing is not the prompt
    ],
)
def test_gigpo_compares_turns_that_follow_the_same_observation(said: str, steps: list[list[float]]) -> None:
    config = config_of(algorithm__advantage={"type": "gigpo", "gamma": 1.0})
    turns = [TURNS["turns"][0], [dict(turn) for turn in TURNS["turns"][1]]]
    turns[1][1]["content"] = said
    rows = advantages(config, scored(config, turns=turns))
    episodes = [[3.5, 0, 3.5, 3.5], [-3.5, -3.5, 0, -3.5]]
    expected = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(episodes, steps, strict=True)]
    assert rows["advantages"] == expected


@pytest.mark.parametrize("estimator", ["gigpo", "turn_gae"])
def test_an_estimator_of_turns_wants_turns(estimator: str) -> None:
    message = f"algorithm.advantage {estimator} is for turns, but there is no rollout.environment or rollout.agent that"
    with pytest.raises(UserError, match=message):
        config_of(algorithm__advantage=estimator, rollout__environment=None, reward__function="countdown")
