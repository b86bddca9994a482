"""The stage `advantages`: from the columns of other stages to what the losses read, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ratchet.infra.progress import Event, Note, listening
from ratchet.infra.workers.calls import Call, Context
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.role_engines import Engines
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import parse_config
from ratchet.rlhf.errors import UserError
from ratchet.tasks.stages.advantages import AdvantagesConfig, advantages

COLUMNS: dict[str, Any] = {
    "trajectory_id": ["it000000-p00000-s00", "it000000-p00000-s01"],
    "prompt_id": ["it000000-p00000"] * 2,
    "prompt_ids": [[1], [1]],
    "by_expert": [False] * 2,
    "response_mask": [[1, 1, 1], [1, 0]],
    "rollout_log_probs": [[-1.0, -1.0, -1.0], [-2.0, -2.0]],
    "finish_reason": ["stop", "length"],
    "score": [3.0, 1.0],
    "reward_parts": [[("form", 1.0), ("extra", 5.0)], [("form", 0.0)]],
    "reward_error": [None, None],
    "token_scores": [None, None],
}
REF = {"ref_log_probs": [[-1.5, -1.0, -1.0], [-3.0, -2.0]]}
ENTROPY = {"entropy": [[1.0] * 3, [1.0] * 2]}


def computed(
    algorithm: dict[str, Any], controllers: dict[str, float] | None = None, **columns: Any
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The stage's rows and small outputs."""
    tree = {
        "model": {"path": "model"},
        "data": {"train": "prompts", "prompts_per_iteration": 1},
        "rollout": {"n": 2, "max_response_tokens": 4},
        "actor": {"mini_batch_trajectories": 2},
        "critic": {"mini_batch_trajectories": 2},
        "algorithm": {"advantage": "dr_grpo"} | algorithm,
    }
    config = parse_config(tree, "here")
    call = Call(0, "advantages", 0, AdvantagesConfig.of(config), controllers=controllers or {})
    batch = TrajectoryBatch.of(COLUMNS | columns)
    output = advantages(Context(call, batch, Engines(config, ()), Resources(config)))
    return output.batch.table.to_pydict(), output.summary.model_dump()


def test_the_score_stands_at_the_last_token_that_the_model_wrote() -> None:
    rows, outputs = computed({})
    assert rows["token_rewards"] == [[0, 0, 3], [1, 0]]
    assert rows["advantages"] == [[1, 1, 1], [-1, 0]]
    assert rows["loss_mask"] == [[1, 1, 1], [1, 0]]
    assert rows["rollout_is_weights"] == [None, None]
    assert outputs["controllers"] == {}
    assert outputs["metrics"]["response_length/clip_ratio"] == 0.5


def test_the_part_of_the_score_that_lies_on_tokens_stays_there() -> None:
    rows, outputs = computed({}, token_scores=[[0.5, 0, 0.25], [0, 0]])
    assert rows["token_rewards"] == [[0.5, 0, 2.5], [1, 0]]
    assert outputs["metrics"]["critic/rewards/max"] == 3.0


def test_kl_is_taken_off_the_rewards() -> None:
    kl = {"in_reward": 0.5}
    rows, outputs = computed({"kl": kl}, **REF)
    assert rows["token_rewards"] == [[-0.25, 0, 3], [0.5, 0]]
    assert outputs["metrics"]["actor/ref_kl"] == pytest.approx(1.5 / 4)
    assert outputs["metrics"]["actor/reward_kl_penalty"] == pytest.approx((0.5 / 3 + 1) / 2)
    assert outputs["metrics"]["actor/reward_kl_penalty_coeff"] == 0.5
    # from the trainer's log-probs, where there are any: here they are the reference's
    rows, _ = computed({"kl": kl}, **REF, **ENTROPY, old_log_probs=REF["ref_log_probs"])
    assert rows["token_rewards"] == [[0, 0, 3], [1, 0]]


def test_an_adaptive_coefficient_goes_on_from_where_it_stood_and_a_fixed_one_is_the_configs() -> None:
    fixed = {"in_reward": 0.5}
    adaptive = fixed | {"controller": {"type": "adaptive", "target": 0.1, "horizon": 4}}
    rows, outputs = computed({"kl": adaptive}, {"kl_in_reward": 0.25}, **REF)
    assert rows["token_rewards"][0] == [-0.125, 0, 3]
    assert outputs["controllers"] == {"kl_in_reward": pytest.approx(0.25 * (1 + 0.2 * 2 / 4))}
    rows, outputs = computed({"kl": fixed}, {"kl_in_reward": 0.25}, **REF)
    assert rows["token_rewards"][0] == [-0.25, 0, 3]
    assert outputs["controllers"] == {}


def test_long_responses_are_punished_and_so_is_a_long_greedy_one() -> None:
    penalty = {"overlong_penalty": {"buffer_tokens": 2, "factor": 0.5}}
    rows, outputs = computed(penalty)
    assert rows["token_rewards"] == [[0, 0, 2.75], [1, 0]]
    assert outputs["metrics"]["critic/score/mean"] == 2
    assert outputs["metrics"]["critic/overlong_penalty/mean"] == -0.125
    rows, _ = computed({"advantage": "remax", **penalty}, greedy_score=[2.0, 2.0], greedy_tokens=[4, 4])
    assert rows["advantages"] == [[2.75 - 1.5] * 3, [1 - 1.5, 0]]


def test_scores_are_clipped_but_shown_as_they_are() -> None:
    rows, outputs = computed({"advantage": {"type": "dr_grpo", "clip_rewards": 2}})
    assert rows["advantages"] == [[0.5] * 3, [-0.5, 0]]
    assert outputs["metrics"]["critic/score/max"] == 3


def test_flat_groups_leave_the_losses() -> None:
    rows, outputs = computed({"advantage": {"type": "dr_grpo", "drop_zero_std_groups": True}}, score=[1.0, 1.0])
    assert rows["loss_mask"] == [[0, 0, 0], [0, 0]]
    assert outputs["metrics"]["actor/loss_tokens_share"] == 0


def test_parts_that_every_response_has_can_be_compared() -> None:
    gdpo = {"type": "gdpo", "parts": ["form", "score"], "norm_by_std": False, "whiten": False}
    rows, _ = computed({"advantage": gdpo})
    assert rows["advantages"] == [[1.5] * 3, [-1.5, 0]]
    with pytest.raises(UserError, match="names extra, but the reward gives every trajectory only score, form"):
        computed({"advantage": gdpo | {"parts": ["extra"]}})


def test_rollout_correction_weighs_and_rejects() -> None:
    old = {"old_log_probs": [[-1.0, -1.0 + np.log(4), -1.0], [-2.0 - np.log(8), -2.0]]} | ENTROPY
    correction = {"weights": {"upper": 3}, "rejection": [{"statistic": "token_k1", "lower": 0.2, "upper": 4}]}
    rows, outputs = computed({"rollout_correction": correction}, **old)
    assert np.concatenate(rows["rollout_is_weights"]) == pytest.approx([1, 3, 1, 1 / 8, 0])
    assert rows["loss_mask"] == [[1, 1, 1], [0, 0]]  # the rollout was eight times as likely to say that token
    assert rows["advantages"] == [[1, 1, 1], [-1, 0]]
    metrics = outputs["metrics"]
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == pytest.approx(0.25)
    assert metrics["rollout_corr/rollout_is_max"] == 3
    assert metrics["rollout_corr/kl"] == pytest.approx((np.log(8) - np.log(4)) / 4)
    plain, outputs = computed({}, **old)
    assert plain["rollout_is_weights"] == [None, None]
    assert "rollout_corr/chi2_token" in outputs["metrics"]


FIVE: dict[str, Any] = {
    "trajectory_id": [*(f"it000000-p00000-s{sample:02d}" for sample in range(4)), "it000000-p00001-s02"],
    "prompt_id": ["it000000-p00000"] * 4 + ["it000000-p00001"],
    "prompt_ids": [[1]] * 5,
    "by_expert": [False] * 5,
    "response_mask": [[1, 1]] * 5,
    "rollout_log_probs": [[-1.0, -1.0]] * 5,
    "finish_reason": ["stop"] * 5,
    "score": [-5.2, -4.8, -5.1, -4.9, -5.0],
    "reward_parts": [[("form", score)] for score in (-5.2, -4.8, -5.1, -4.9, -5.0)],
    "reward_error": [None] * 5,
    "token_scores": [None] * 5,
}
"""A whole group, and what `reward.on_error: drop` has left of another."""
FOUR = {name: column[:4] for name, column in FIVE.items()}

COMPARING = [
    *("grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo", "egpo", "max_rl"),
    "optimal_token_baseline",
]
OF_ACTOR = {
    "egpo": {"entropy": [[1.0, 1.0]] * 5},
    "optimal_token_baseline": {
        "old_log_probs": [[-1.0, -2.0]] * 5,
        "entropy": [[1.0, 1.0]] * 5,
        "sum_pi_squared": [[0.5, 0.25]] * 5,
    },
}
"""Columns of old_log_probs that an estimator needs."""


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("estimator", COMPARING)
def test_a_lone_survivor_of_its_prompt_is_left_out(estimator: str, whiten: bool) -> None:
    """As if it had never been generated: neither its own advantage nor those of the others come from it."""
    options = {"type": estimator, "whiten": whiten} | ({"parts": ["form"]} if estimator == "gdpo" else {})
    more = OF_ACTOR.get(estimator, {})
    alone, without = computed({"advantage": options}, **FOUR, **{name: column[:4] for name, column in more.items()})
    rows, outputs = computed({"advantage": options}, **FIVE, **more)
    assert rows["advantages"][4] == rows["returns"][4] == rows["loss_mask"][4] == [0, 0]
    for name in ("advantages", "loss_mask"):
        assert rows[name][:4] == alone[name]
    assert outputs["metrics"]["actor/loss_tokens_share"] == pytest.approx(0.8)
    for name in ("critic/advantages", "critic/returns"):
        for statistic in ("mean", "max", "min"):
            found = outputs["metrics"][f"{name}/{statistic}"]
            assert found == pytest.approx(without["metrics"][f"{name}/{statistic}"]), "metrics neither"


def test_old_log_probs_of_another_advantage_lack_what_this_one_needs() -> None:
    columns = OF_ACTOR["optimal_token_baseline"] | {"sum_pi_squared": [None] * 5}
    with pytest.raises(UserError, match=r"needs sum_pi_squared, .*: fork at old_log_probs"):
        computed({"advantage": "optimal_token_baseline"}, **FIVE, **columns)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_an_estimator_that_compares_nothing_keeps_a_lone_survivor(estimator: str) -> None:
    rows, _ = computed({"advantage": estimator}, **FIVE | {"score": [1.0, 2, 3, 4, 9]}, values=[[0.0, 0.0]] * 5)
    assert rows["loss_mask"] == [[1, 1]] * 5
    assert rows["advantages"][4] != [0, 0]


def test_a_flat_group_that_leaves_the_losses_does_not_enter_whitening() -> None:
    options = {"type": "reinforce_plus_plus", "drop_zero_std_groups": True}
    whole = {name: [*column[:4], column[3]] for name, column in FIVE.items() if name != "prompt_id"}
    whole |= {"trajectory_id": FIVE["trajectory_id"], "prompt_id": FIVE["prompt_id"], "score": [1.0, 2, 3, 4, 500]}
    rows, _ = computed({"advantage": options}, **whole)
    four, _ = computed({"advantage": options}, **FOUR | {"score": [1.0, 2, 3, 4]})
    assert rows["advantages"] == [*four["advantages"], [0, 0]]


def test_where_no_trajectory_has_another_to_be_compared_with_nothing_is_learned_and_it_is_said() -> None:
    two = {name: [column[0], column[4]] for name, column in FIVE.items()}
    said: list[Event] = []
    with listening(said.append):
        rows, outputs = computed({"advantage": "grpo"}, **two)
    assert rows["loss_mask"] == rows["advantages"] == [[0, 0], [0, 0]]
    assert outputs["metrics"]["actor/loss_tokens_share"] == 0
    assert said == [Note("iteration 0 has nothing to learn from: no update changes the weights")]


def test_remax_leaves_out_a_prompt_whose_greedy_answer_has_no_reward() -> None:
    rows, _ = computed({"advantage": "remax"}, **FIVE, greedy_score=[-5.0] * 4 + [None], greedy_tokens=[2] * 5)
    assert rows["advantages"][4] == rows["loss_mask"][4] == [0, 0]
    assert np.array(rows["advantages"][:4]) == pytest.approx(np.array([[-0.2] * 2, [0.2] * 2, [-0.1] * 2, [0.1] * 2]))


def test_of_a_reward_that_failed_and_counts_0_every_part_is_0() -> None:
    gdpo = {"type": "gdpo", "parts": ["form"], "norm_by_std": False, "whiten": False}
    failed = {"score": [3.0, 0.0], "reward_parts": [[("form", 1.0)], []], "reward_error": [None, "it raised"]}
    rows, _ = computed({"advantage": gdpo}, **failed)
    assert rows["advantages"] == [[0.5] * 3, [-0.5, 0]]
    partly = failed | {"reward_parts": [[("form", 1.0)], [("form", 7.0)]]}  # a model's, whose function failed
    rows, _ = computed({"advantage": gdpo}, **partly)
    assert rows["advantages"] == [[0.5] * 3, [-0.5, 0]]
    always = {"score": [0.0, 0.0], "reward_parts": [[], []], "reward_error": ["it raised"] * 2}
    rows, _ = computed({"advantage": gdpo}, **always)
    assert rows["advantages"] == [[0, 0, 0], [0, 0]]


WITH_EXPERT: dict[str, Any] = {
    "trajectory_id": [f"it000000-p00000-s{sample:02d}" for sample in range(3)],
    "prompt_id": ["it000000-p00000"] * 3,
    "prompt_ids": [[1]] * 3,
    "response_mask": [[1, 1], [1, 1], [1, 1, 1]],
    "rollout_log_probs": [[-1.0, -2.0], [-3.0, -2.0], [0.0, 0.0, 0.0]],
    "old_log_probs": [[-1.0, -2.0], [-3.0 - np.log(2), -2.0], [-0.5, -4.0, -9.0]],
    "entropy": [[1.0] * 2, [1.0] * 2, [1.0] * 3],
    "by_expert": [False, False, True],
    "finish_reason": ["stop", "length", "stop"],
    "score": [3.0, 1.0, 8.0],
    "reward_parts": [[("form", 1.0)]] * 3,
    "reward_error": [None] * 3,
    "token_scores": [None] * 3,
}
CORRECTION = {
    "weights": {"upper": 2},
    "rejection": [{"statistic": "token_k1", "lower": 0.1, "upper": 1.5}],
}


@pytest.mark.parametrize("correction", [CORRECTION, {}])
def test_an_experts_answer_is_compared_and_weighted_by_its_probability(correction: dict[str, Any]) -> None:
    rows, outputs = computed({"rollout_correction": correction}, **WITH_EXPERT)
    assert rows["advantages"] == [[-1, -1], [-3, -3], [4, 4, 4]]
    probs = np.exp([-0.5, -4.0, -9.0])
    assert rows["rollout_is_weights"][2] == pytest.approx(0.1 * probs / (probs + 0.1) ** 2, rel=1e-6)
    own = [[1, 1], [0.5, 1]] if correction else [[1, 1], [1, 1]]
    assert rows["rollout_is_weights"][:2] == [pytest.approx(weights) for weights in own]
    # the expert's tokens are not rejected, improbable as they are
    assert rows["loss_mask"] == [[1, 1], [0, 1] if correction else [1, 1], [1, 1, 1]]
    metrics = outputs["metrics"]
    assert metrics["rollout_corr/kl"] == pytest.approx(np.log(2) / 4), "of the policy's tokens"
    assert metrics["critic/score/mean"] == 2 and metrics["response_length/mean"] == 2
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["experts/score/mean"] == 8
    assert metrics["experts/log_probs/mean"] == pytest.approx(-13.5 / 3)
    assert metrics["perf/response_tokens"] == 7
    rows, _ = computed({"rollout_correction": correction, "experts": {"gamma": None}}, **WITH_EXPERT)
    assert rows["rollout_is_weights"][2] == pytest.approx(probs, rel=1e-6)


def test_an_experts_answer_is_fine_tuned_on_whatever_its_score() -> None:
    for score in (8.0, -8.0):
        columns = WITH_EXPERT | {"score": [3.0, 1.0, score]}
        rows, outputs = computed({"experts": {"type": "sft", "coef": 0.3}, "rollout_correction": {}}, **columns)
        assert rows["advantages"] == [[1, 1], [-1, -1], [1, 1, 1]], "the policy's answers are compared with each other"
        assert rows["rollout_is_weights"] == [[1, 1], [1, 1], pytest.approx([0.3] * 3)]
        assert rows["loss_mask"] == [[1, 1], [1, 1], [1, 1, 1]]
        assert outputs["metrics"]["critic/advantages/max"] == 1


def test_kl_leaves_an_experts_tokens_alone() -> None:
    columns = WITH_EXPERT | {"ref_log_probs": [[-1.5, -2.0], [-3.0 - np.log(2), -2.0], [-7.0] * 3]}
    rows, outputs = computed({"kl": {"in_reward": 0.5}, "rollout_correction": {}}, **columns)
    assert rows["token_rewards"] == [[-0.25, 3], [0, 1], [0, 0, 8]]
    assert outputs["metrics"]["actor/ref_kl"] == pytest.approx(0.5 / 4)
