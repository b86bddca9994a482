"""Advantage estimators: by hand, and what holds for all of them."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ratchet.rlhf.algorithms.advantages import (
    EGPO,
    GAE,
    GDPO,
    GFPO,
    GPG,
    GRPO,
    OPO,
    RAFT,
    RLOO,
    VAPO,
    Advantage,
    AdvantageEstimator,
    DrGRPO,
    GiGPO,
    GroupEstimator,
    GRPOPassK,
    MaxRL,
    NoAdvantage,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    TurnGAE,
    VinePPO,
)
from ratchet.rlhf.algorithms.base import Algorithm
from ratchet.rlhf.algorithms.distillation import Distillation
from ratchet.rlhf.algorithms.groups import Groups
from ratchet.rlhf.errors import UserError
from tests.padded import GARBAGE, Batch, batches, members, padded, properties, rows, spoiled
from tests.tiers import sampled


def tensor(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# gamma = lambda = 1/2, so that delta = r + V'/2 - V and A = delta + A'/4. In the first trajectory the second token is
# tool output: the third follows the first. The second trajectory ends after two tokens.
GAE_REWARDS = tensor([1, 99, 0, 4], [0, 2, 99, 99])
GAE_VALUES = tensor([1, 77, 2, 1], [3, 1, 77, 77])
GAE_MASK = tensor([1, 0, 1, 1], [1, 1, 0, 0])
GAE_ADVANTAGES = tensor([0.8125, 0, -0.75, 3], [-2.25, 1, 0, 0])
GAE_RETURNS = tensor([1.8125, 0, 1.25, 4], [0.75, 2, 0, 0])


def test_gae_by_hand() -> None:
    advantages, returns = GAE(gamma=0.5, lam=0.5, whiten=False)(GAE_REWARDS, GAE_MASK, values=GAE_VALUES)
    assert torch.equal(advantages, GAE_ADVANTAGES)
    assert torch.equal(returns, GAE_RETURNS)


def test_gae_gamma_and_lambda_each_have_their_place() -> None:
    rewards, values, mask = tensor([0, 0, 1]), tensor([0, 2, 4]), tensor([1, 1, 1])
    # A2 = 1 - 4 = -3;  A1 = (4 g - 2) - 3 g l;  A0 = 2 g + g l A1
    advantages, _ = GAE(gamma=0.5, lam=0.25, whiten=False)(rewards, mask, values=values)
    assert torch.equal(advantages, tensor([1 + 0.125 * -0.375, 0 - 0.375, -3]))


def test_gae_whitens_advantages_but_not_returns() -> None:
    advantages, returns = GAE(gamma=0.5, lam=0.5)(GAE_REWARDS, GAE_MASK, values=GAE_VALUES)
    plain = GAE_ADVANTAGES[GAE_MASK > 0].tolist()
    deviation = (statistics.variance(plain) + 1e-8) ** 0.5
    expected = tensor(*[(a - statistics.mean(plain)) / deviation for a in plain])
    torch.testing.assert_close(advantages[GAE_MASK > 0], expected, rtol=1e-12, atol=0)
    assert (advantages[GAE_MASK == 0] == 0).all()
    assert torch.equal(returns, GAE_RETURNS)


def test_the_critic_may_have_a_lambda_of_its_own() -> None:
    advantages, returns = GAE(gamma=0.5, lam=0.5, critic_lam=1, whiten=False)(GAE_REWARDS, GAE_MASK, values=GAE_VALUES)
    assert torch.equal(advantages, GAE_ADVANTAGES)
    assert torch.equal(returns, tensor([2, 0, 2, 4], [1, 2, 0, 0])), "the rewards-to-go: 1 + 4 / 4, 4 / 2, 4; 2 / 2, 2"


def test_vapo_by_hand() -> None:
    """With alpha 1/2, lambda is 1 - 2 / 3 for three tokens, and 0 for two and one."""
    rewards, mask = tensor([0, 0, 9], [0, 9, 99], [9, 99, 99]), tensor([1, 1, 1], [1, 1, 0], [1, 0, 0])
    values = tensor([3, 0, 6], [1, 2, 77], [4, 77, 77])
    advantages, returns = VAPO(alpha=0.5, whiten=False)(rewards, mask, values=values)
    # deltas -3, 6, 3; 1, 7; 5
    expected = tensor([-3 + 7 / 3, 7, 3], [1, 7, 0], [5, 0, 0])
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)
    assert torch.equal(returns, tensor([9, 9, 9], [9, 9, 0], [9, 0, 0]))


@properties
@given(batches(), st.floats(0.05, 2))
def test_vapo_is_gae_with_a_lambda_for_each_length(batch: Batch, alpha: float) -> None:
    found = estimate(VAPO, batch, alpha=alpha, gamma=0.9, critic_lam=0.8, whiten=False)
    for row, length in enumerate(batch["mask"].sum(-1).tolist()):
        lam = max(0.0, 1 - 1 / (alpha * length)) if length else 0.0
        plain = estimate(GAE, rows(batch, [row]), lam=lam, gamma=0.9, critic_lam=0.8, whiten=False)
        torch.testing.assert_close(found[:, [row]], plain, rtol=1e-9, atol=1e-9)


GRPO_REWARDS = tensor([0, 1, 99], [3, 0, 99], [0, 4, 0], [4, 0, 99], [1, 2, 3])
GRPO_MASK = tensor([1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1])
GRPO_GROUPS = torch.tensor([5, 5, 9, 9, 7])


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_grpo_by_hand(norm_by_std: bool) -> None:
    """Group 5 scores 1 and 3 (mean 2, deviation sqrt 2); group 9 does not spread; group 7 is one trajectory
    of 6, which has nothing to be compared with."""
    spread, alone = 1 / (2**0.5 + 1e-6) if norm_by_std else 1, 0
    advantages, returns = GRPO(norm_by_std=norm_by_std)(GRPO_REWARDS, GRPO_MASK, group_ids=GRPO_GROUPS)
    expected = tensor(-spread, spread, 0, 0, alone)[:, None] * GRPO_MASK
    torch.testing.assert_close(advantages, expected, rtol=1e-14, atol=0)
    assert torch.equal(returns, advantages)


def test_a_group_with_scores_1_and_0_in_egpo() -> None:
    """A is ±0.7071058; the mean entropies are 0.2 and 1.5, of which the second is limited to half of A."""
    rewards, mask = tensor([0, 1, 99], [0, 0, 0]), tensor([1, 1, 0], [1, 1, 1])
    entropy = tensor([0.1, 0.3, 99], [1, 1.5, 2])
    advantages, _ = EGPO()(rewards, mask, group_ids=torch.tensor([4, 4]), entropy=entropy)
    expected = tensor(0.7071058 + 0.4 * 0.2, -0.7071058 + 0.4 * 0.7071058 / 2)[:, None] * mask
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-7)
    half, _ = EGPO(alpha=4, lam=1)(rewards, mask, group_ids=torch.tensor([4, 4]), entropy=entropy)
    expected = tensor(0.7071058 + 0.7071058 / 4, -0.7071058 + 0.7071058 / 4)[:, None] * mask
    torch.testing.assert_close(half, expected, rtol=0, atol=1e-7)


# One trajectory a row; scores by group: (1, 3, 2), (4, 4), (6); lengths 2, 1, 3, 1, 1, 2.
SCORES = [1.0, 3.0, 2.0, 4.0, 4.0, 6.0]
LENGTHS = [2, 1, 3, 1, 1, 2]
GROUPS = torch.tensor([8, 8, 8, 2, 2, 5])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (GRPO(), [-1 / (1 + 1e-6), 1 / (1 + 1e-6), 0, 0, 0, 0]),
        (DrGRPO(), [-1, 1, 0, 0, 0, 0]),
        (RLOO(), [1 - 2.5, 3 - 1.5, 0, 0, 0, 0]),
        (OPO(), [1 - 11 / 6, 3 - 11 / 6, 2 - 11 / 6, 0, 0, 0]),
        (GPG(), [-1, 1, 0, 0, 0, 0]),  # no score is 0
        (RAFT(), [1, 1, 1, 1, 1, 1]),  # of those that `teaches` leaves
        (GRPOPassK(), [0, 1 / (1 + 1e-6), 0, 0, 0, 0]),
        (GRPOPassK(norm_by_std=False), [0, 1, 0, 0, 0, 0]),
        (MaxRL(), [-1 / 2, 1 / 2, 0, 0, 0, 0]),
        (GFPO(norm_by_std=False), [-1, 1, 0, 0, 0, 0]),  # of those that `teaches` leaves
        (ReinforcePlusPlusBaseline(whiten=False), [-1, 1, 0, 0, 0, 0]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_group_estimators_by_hand(estimator: GroupEstimator, expected: list[float]) -> None:
    mask = (torch.arange(3)[None, :] < torch.tensor(LENGTHS)[:, None]).double()
    rewards = mask * tensor(*SCORES)[:, None] / tensor(*LENGTHS)[:, None] + 77 * (1 - mask)
    advantages, returns = estimator(rewards, mask, group_ids=GROUPS)
    torch.testing.assert_close(advantages, tensor(*expected)[:, None] * mask, rtol=1e-12, atol=1e-12)
    assert torch.equal(returns, advantages)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (RAFT(), [0, 1, 0, 1, 0, 1]),  # the first of equal ones
        (RAFT(best=2), [0, 1, 1, 1, 1, 1]),
        (RAFT(min_score=4), [0, 0, 0, 1, 0, 1]),
        (RAFT(drop_zero_std_groups=True), [0, 1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_raft_learns_from_the_best_answers(estimator: RAFT, expected: list[int]) -> None:
    assert estimator.teaches(tensor(*SCORES), tensor(*LENGTHS), GROUPS).int().tolist() == expected


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (GFPO(keep=2), [0, 1, 1, 1, 1, 0]),  # 1/2, 3 and 2/3 of a point per token; the last is alone
        (GFPO(keep=2, metric="length"), [1, 1, 0, 1, 1, 0]),
        (GFPO(keep=2, drop_zero_std_groups=True), [0, 1, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_gfpo_learns_from_efficient_answers(estimator: GFPO, expected: list[int]) -> None:
    assert estimator.teaches(tensor(*SCORES), tensor(*LENGTHS), GROUPS).int().tolist() == expected


def test_max_rl_learns_nothing_from_a_prompt_that_nobody_solved() -> None:
    one, groups = torch.ones(7, 1).double(), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    advantages, _ = MaxRL()(tensor([1], [0], [0], [0], [0], [0], [0]), one, group_ids=groups)
    assert advantages.flatten().tolist() == [3, -1, -1, -1, 0, 0, 0]
    advantages, _ = MaxRL()(tensor([-1], [0], [0], [-3], [1], [1], [1]), one, group_ids=groups)
    assert not advantages.any(), "a mean that is negative, and equal scores"


def test_the_optimal_token_baseline_by_hand() -> None:
    """The energy of a token is 1 - 2/2 + 1/2, but 1 - 1/2 + 1/2 for the second of the first trajectory, which follows
    what the environment says. Only that trajectory has a third token."""
    mask = tensor([1, 0, 1, 1], [1, 1, 0, 0])
    old, squares = tensor([0.5, 9, 0.25, 0.5], [0.5, 0.5, 9, 9]).log(), tensor([0.5] * 4, [0.5] * 4)
    rewards = tensor([1, 99, 0, 4], [0, 2, 99, 99])
    inputs = {"group_ids": torch.tensor([3, 3]), "old_log_probs": old, "sum_pi_squared": squares}
    advantages, returns = OptimalTokenBaseline()(rewards, mask, **inputs)
    assert torch.equal(returns, tensor([5, 0, 4, 4], [2, 2, 0, 0]))
    first, second = (5 + 2) / 2, (4 * 1.5 + 2 * 1) / 2.5
    expected = tensor([5 - first, 0, 4 - second, 4], [2 - first, 2 - second, 0, 0])
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


@properties
@given(st.integers(1, 5), st.integers(2, 5), st.floats(-9, 9), st.integers(0, 99))
def test_equal_returns_are_their_own_optimal_baseline(tokens: int, size: int, score: float, seed: int) -> None:
    """Rounding would otherwise be all that whitening finds."""
    draw = torch.Generator().manual_seed(seed)
    rewards, mask = torch.zeros(size, tokens).double(), torch.ones(size, tokens).double()
    rewards[:, -1] = score
    old, squares = -torch.rand(2, size, tokens, generator=draw).double()
    inputs = {"group_ids": torch.zeros(size).long(), "old_log_probs": old, "sum_pi_squared": -squares}
    assert (OptimalTokenBaseline()(rewards, mask, **inputs)[0] == 0).all()


@properties
@given(batches())
def test_raft_learns_from_no_answer_that_is_worse_than_one_that_it_leaves_out(batch: Batch) -> None:
    scores, groups = (batch["token_rewards"] * batch["mask"]).sum(-1), batch["group_ids"]
    chosen = RAFT(best=2).teaches(scores, batch["mask"].sum(-1), groups)
    for group in groups.unique():
        own = groups == group
        assert int((chosen & own).sum()) == min(2, int(own.sum()))
        left_out = scores[own & ~chosen]
        assert not len(left_out) or scores[own & chosen].min() >= left_out.max()


def test_no_advantage_is_zero() -> None:
    advantages, returns = NoAdvantage()(tensor([1, 2], [3, 4]), tensor([1, 1], [1, 0]))
    assert not advantages.any() and not returns.any()


def test_gpg_scales_by_the_share_of_scores_that_are_zero() -> None:
    advantages, _ = GPG()(tensor([1], [0], [0], [0]), torch.ones(4, 1).double(), group_ids=torch.tensor([0, 0, 1, 1]))
    assert advantages.flatten().tolist() == [4 * 0.5, -4 * 0.5, 0, 0]


def test_reinforce_plus_plus_learns_from_the_final_reward_on_both_sides_of_a_tools_output() -> None:
    """verl's code begins again at a masked token: there the first turn would get nothing."""
    rewards, mask = tensor([0, 0, 0, 0, 8]), tensor([1, 1, 0, 0, 1])
    _, returns = ReinforcePlusPlus(gamma=0.5)(rewards, mask)
    assert returns.tolist() == [[2, 4, 0, 0, 8]], "two tokens of a tool do not discount either"


def test_reinforce_plus_plus_by_hand() -> None:
    """Rewards-to-go with gamma 1/2; the masked token of the first trajectory is stepped over."""
    rewards, mask = tensor([1, 99, 4], [0, 2, 99]), tensor([1, 0, 1], [1, 1, 0])
    advantages, returns = ReinforcePlusPlus(gamma=0.5, whiten=False)(rewards, mask)
    assert torch.equal(returns, tensor([3, 0, 4], [1, 2, 0]))
    assert torch.equal(advantages, returns)
    whitened, _ = ReinforcePlusPlus(gamma=0.5)(rewards, mask)
    deviation = (statistics.variance([3, 4, 1, 2]) + 1e-8) ** 0.5
    torch.testing.assert_close(whitened, (returns - 2.5) / deviation * mask, rtol=1e-12, atol=0)


def test_remax_by_hand() -> None:
    rewards, mask = tensor([1, 99, 4], [0, 2, 99]), tensor([1, 0, 1], [1, 1, 0])
    advantages, returns = ReMax()(rewards, mask, greedy_scores=tensor(1, -1))
    assert torch.equal(returns, tensor([5, 0, 4], [2, 2, 0]))
    assert torch.equal(advantages, tensor([4, 0, 3], [3, 3, 0]))


# Three turns and two: the tokens of the first trajectory are turn 0, what the environment says (masked), turn 1 twice,
# turn 2; those of the second turn 0 twice, what the environment says, turn 1, and padding.
TURNS = torch.tensor([[0, 1, 1, 1, 2], [0, 0, 1, 1, 0]])
TURN_MASK = tensor([1, 0, 1, 1, 1], [1, 1, 0, 1, 0])
TURN_REWARDS = tensor([1, 99, 0.5, 1.5, 4], [0, -1, 99, 3, 99])


def test_turn_gae_by_hand() -> None:
    """The turns' rewards are 1, 2, 4 and -1, 3. Values before them are 2, 4, 6 and 1, 5; those of other tokens do not
    matter. With gamma and lambda 1/2: delta is 1 + 2 - 2, 2 + 3 - 4, 4 - 6 and -1 + 2.5 - 1, 3 - 5."""
    values = tensor([2, 77, 4, 77, 6], [1, 77, 77, 5, 77])
    advantages, returns = TurnGAE(gamma=0.5, lam=0.5, whiten=False)(TURN_REWARDS, TURN_MASK, values=values, turns=TURNS)
    assert torch.equal(advantages, tensor([1.125, 0, 0.5, 0.5, -2], [0, 0, 0, -2, 0]))
    assert torch.equal(returns, tensor([3.125, 0, 4.5, 4.5, 4], [1, 1, 0, 3, 0]))
    whitened, again = TurnGAE(gamma=0.5, lam=0.5)(TURN_REWARDS, TURN_MASK, values=values, turns=TURNS)
    plain = advantages[TURN_MASK > 0].tolist()
    deviation = (statistics.variance(plain) + 1e-8) ** 0.5
    expected = (advantages - statistics.mean(plain)) / deviation * TURN_MASK
    torch.testing.assert_close(whitened, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(again, returns)


def test_vine_ppo_by_hand() -> None:
    """The turns' rewards and values are those of the test above; the advantages of each trajectory add up to its score
    less the value of its prompt."""
    values = tensor([2, 77, 4, 77, 6], [1, 77, 77, 5, 77])
    advantages, returns = VinePPO(whiten=False)(TURN_REWARDS, TURN_MASK, turn_values=values, turns=TURNS)
    assert torch.equal(advantages, tensor([3, 0, 4, 4, -2], [3, 3, 0, -2, 0]))
    assert torch.equal(returns, tensor([5, 0, 8, 8, 4], [4, 4, 0, 3, 0]))
    whitened, again = VinePPO()(TURN_REWARDS, TURN_MASK, turn_values=values, turns=TURNS)
    plain = advantages[TURN_MASK > 0].tolist()
    deviation = (statistics.variance(plain) + 1e-8) ** 0.5
    expected = (advantages - statistics.mean(plain)) / deviation * TURN_MASK
    torch.testing.assert_close(whitened, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(again, returns)


@properties
@given(batches())
def test_turn_gae_of_turns_of_one_token_is_gae(batch: Batch) -> None:
    batch["turns"] = torch.arange(batch["mask"].shape[1]).expand(batch["mask"].shape)
    options = {"gamma": 0.9, "lam": 0.8, "whiten": False}
    # the same sums of the same numbers, in the same order
    assert torch.equal(estimate(TurnGAE, batch, **options), estimate(GAE, batch, **options))


def test_gigpo_by_hand() -> None:
    """Scores 7 and 2 are 2.5 from their mean. With gamma 1/2, the returns of the turns are 3, 4, 4 and 0.5, 3. The
    first turns follow the prompt, the second ones the same text, and the third one another text."""
    states = torch.tensor([[0, 1, 1, 1, 8], [0, 0, 1, 1, 0]])
    both = {"group_ids": torch.tensor([4, 4]), "turns": TURNS, "states": states}
    advantages, returns = GiGPO(gamma=0.5)(TURN_REWARDS, TURN_MASK, **both)
    assert torch.equal(advantages, tensor([3.75, 0, 3, 3, 2.5], [-3.75, -3.75, 0, -3, 0]))
    assert torch.equal(returns, advantages)
    half, _ = GiGPO(gamma=0.5, step_weight=0.5)(TURN_REWARDS, TURN_MASK, **both)
    assert torch.equal(half, tensor([3.125, 0, 2.75, 2.75, 2.5], [-3.125, -3.125, 0, -2.75, 0]))
    normalized, _ = GiGPO(gamma=0.5, norm_by_std=True, epsilon=1e-12)(TURN_REWARDS, TURN_MASK, **both)
    unit = 1 / 2**0.5  # how far both of a pair are from their mean, in standard deviations
    expected = tensor([2, 0, 2, 2, 1], [-2, -2, 0, -2, 0]) * unit
    torch.testing.assert_close(normalized, expected, rtol=1e-9, atol=0)
    of_other_prompts = both | {"group_ids": torch.tensor([4, 5])}
    assert (GiGPO(gamma=0.5)(TURN_REWARDS, TURN_MASK, **of_other_prompts)[0] == 0).all()


def test_gigpo_compares_turns_of_one_trajectory_that_came_back_to_a_state() -> None:
    rewards, mask = tensor([0, 0, 4], [0, 0, 0]), tensor([1, 1, 1], [1, 0, 0])
    turns, states = torch.tensor([[0, 1, 2], [0, 0, 0]]), torch.tensor([[0, 1, 1], [0, 0, 0]])
    inputs = {"group_ids": torch.tensor([0, 0]), "turns": turns, "states": states}
    advantages, _ = GiGPO(gamma=0.5)(rewards, mask, **inputs)
    # returns 1, 2, 4 and 0: the turn that ended the game did better than the one that did not
    assert torch.equal(advantages, tensor([2 + 0.5, 2 - 1, 2 + 1], [-2 - 0.5, 0, 0]))


def gigpo_of_records(batch: Batch, estimator: GiGPO) -> Tensor:
    """GiGPO as the paper writes it: a list of turns, each with its prompt, its state and its discounted return."""
    records = []
    for row in range(len(batch["mask"])):
        tokens: dict[int, list[int]] = {}
        for at in range(batch["mask"].shape[1]):
            if batch["mask"][row, at] > 0:
                tokens.setdefault(int(batch["turns"][row, at]), []).append(at)
        following = 0.0
        for places in reversed(tokens.values()):
            following = sum(float(batch["token_rewards"][row, at]) for at in places) + estimator.gamma * following
            records.append((row, places, int(batch["group_ids"][row]), int(batch["states"][row, places[0]]), following))
    scores = [float((batch["token_rewards"] * batch["mask"])[row].sum()) for row in range(len(batch["mask"]))]

    def relative(value: float, others: list[float]) -> float:
        deviation = statistics.stdev(others) if len(others) > 1 else 0.0
        return (value - statistics.mean(others)) / (deviation + estimator.epsilon if estimator.norm_by_std else 1)

    result = torch.zeros_like(batch["mask"])
    for row, places, group, state, value in records:
        episodes = [scores[other] for other in range(len(scores)) if batch["group_ids"][other] == group]
        same = [record[4] for record in records if record[2:4] == (group, state)]
        result[row, places] = relative(scores[row], episodes) + estimator.step_weight * relative(value, same)
    return result


@properties
@given(batches(), st.booleans(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.7]))
def test_gigpo_is_the_papers(batch: Batch, norm_by_std: bool, gamma: float, step_weight: float) -> None:
    batch["token_rewards"] = batch["token_rewards"].where(batch["mask"] > 0, 0.0)
    options = {"norm_by_std": norm_by_std, "gamma": gamma, "step_weight": step_weight, "epsilon": 1e-3}
    expected = gigpo_of_records(batch, GiGPO(**options))  # type: ignore[arg-type]
    # both sum the same numbers, in another order
    torch.testing.assert_close(estimate(GiGPO, batch, **options)[0], expected, rtol=1e-9, atol=1e-9)


@properties
@given(batches(), st.booleans())
def test_gigpo_without_the_comparison_of_turns_is_grpo(batch: Batch, norm_by_std: bool) -> None:
    plain = estimate(GRPO, batch, norm_by_std=norm_by_std)
    assert torch.equal(estimate(GiGPO, batch, norm_by_std=norm_by_std, step_weight=0), plain)


def test_gdpo_compares_each_part_in_its_group() -> None:
    mask = torch.ones(4, 1).double()
    parts = {"right": tensor(0, 1, 5, 5), "form": tensor(0, 100, 300, 100), "other": tensor(9, 9, 9, 9)}
    gdpo = GDPO(parts=("right", "form"), weights=(0.75, 0.25), norm_by_std=False, whiten=False)
    inputs = {"group_ids": torch.tensor([0, 0, 1, 1]), "reward_parts": parts}
    advantages, _ = gdpo(mask * 0, mask, **inputs)
    assert advantages.flatten().tolist() == [-0.375 - 12.5, 0.375 + 12.5, 25, -25]
    normalized, _ = GDPO(parts=("form",), whiten=False)(mask * 0, mask, **inputs)
    torch.testing.assert_close(normalized.flatten(), tensor(-1, 1, 1, -1) / 2**0.5, rtol=1e-6, atol=0)
    empty = tensor([1], [1], [1], [0])  # a trajectory without a token has no score, and no part of one
    advantages, _ = gdpo(mask * 0, empty, **inputs)
    assert advantages.flatten().tolist() == [-0.375 - 12.5, 0.375 + 12.5, 0.75 * 2.5 + 0.25 * 150, 0]
    with pytest.raises(UserError, match=r"names shape, but the reward gives every trajectory only right, form, other"):
        GDPO(parts=("shape",))(mask * 0, mask, **inputs)


def test_a_batch_without_a_token_has_no_advantage() -> None:
    nothing = torch.zeros(2, 3).double()
    for kind in members(Advantage):
        columns = ("token_rewards", "mask", "values", "entropy", "old_log_probs", "sum_pi_squared", "turn_values")
        batch = dict.fromkeys(columns, nothing)
        batch |= {"group_ids": torch.tensor([0, 0]), "greedy_scores": tensor(1, 2), "part": tensor(1, 2)}
        batch |= dict.fromkeys(("turns", "states"), nothing.long())
        assert (estimate(kind, batch) == 0).all()


@pytest.mark.parametrize("kind", [GRPO, GAE])
def test_options_of_all(kind: type[AdvantageEstimator]) -> None:
    scores = tensor(-3, 0.5, 9)
    assert kind(clip_rewards=2).clipped(scores).tolist() == [-2, 0.5, 2]
    assert kind().clipped(scores) is scores
    flat = torch.tensor([1, 1, 0])
    lengths = tensor(1, 2, 3)
    found = kind().teaches(tensor(7, 7, 9), lengths, flat)
    assert found.tolist() == [True, True, kind is GAE], "GRPO compares, GAE does not"
    kept = kind(drop_zero_std_groups=True).teaches(tensor(7, 8, 9), lengths, flat)
    assert kept.tolist() == [True, True, False]


estimators = pytest.mark.parametrize("kind", members(Advantage))


def estimate(kind: type[Algorithm], batch: Batch, **changes: object) -> Tensor:
    parts = {"parts": ("part",)} if "parts" in kind.model_fields else {}
    estimator = kind(**parts, **changes)
    inputs: dict[str, Any] = batch | {"reward_parts": {"part": batch["part"]}}
    needs = {name: inputs[name] for name in estimator.needs}
    return torch.stack(estimator(batch["token_rewards"], batch["mask"], **needs))  # type: ignore[operator]


@sampled(4)
@estimators
@properties
@given(batches(), st.sampled_from(GARBAGE), st.integers(0, 3))
def test_masked_positions_never_matter(kind: type[Algorithm], batch: Batch, garbage: float, wider: int) -> None:
    found = estimate(kind, batch)
    assert found.isfinite().all()
    assert (found[:, batch["mask"] == 0] == 0).all()
    assert torch.equal(estimate(kind, spoiled(batch, garbage)), found)
    expected = torch.nn.functional.pad(found, (0, wider))
    torch.testing.assert_close(estimate(kind, padded(batch, wider)), expected, rtol=1e-9, atol=1e-9)


@sampled(4)
@estimators
@properties
@given(batches(), st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_result(kind: type[Algorithm], batch: Batch, random: object) -> None:
    order = list(range(len(batch["mask"])))
    random.shuffle(order)  # type: ignore[attr-defined]
    found, permuted = estimate(kind, batch, whiten=False), estimate(kind, rows(batch, order), whiten=False)
    torch.testing.assert_close(permuted, found[:, order], rtol=1e-9, atol=1e-9)


@sampled(4)
@pytest.mark.parametrize("kind", [kind for kind in members(Advantage) if kind is not GPG])
@properties
@given(batches(), st.floats(-5, 5))
def test_groups_do_not_leak(kind: type[Algorithm], batch: Batch, other: float) -> None:
    """What another group scores, values or doubts changes nothing, unless the batch is whitened.

    GPG is left out: its scale is the batch's share of scores that are not zero.
    """
    here = batch["group_ids"] == batch["group_ids"][0]
    changed = {
        name: x.where(here if x.dim() == 1 else here[:, None], other if x.is_floating_point() else int(abs(other)))
        for name, x in batch.items()
        if name not in ("mask", "group_ids")
    }
    found, expected = estimate(kind, batch | changed, whiten=False), estimate(kind, batch, whiten=False)
    torch.testing.assert_close(found[:, here], expected[:, here], rtol=1e-9, atol=1e-9)


comparing = pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in members(Advantage)
        # RAFT compares before, and the tail of the longest response has no baseline in OptimalTokenBaseline
        if kind is ReinforcePlusPlus or ("group_ids" in kind.needs and kind not in (RAFT, OptimalTokenBaseline))
    ],
)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def scored(scores: list[float], group_ids: list[int], dtype: torch.dtype) -> Batch:
    """A batch of trajectories of one to three tokens, whose scores lie on their last tokens."""
    lengths = torch.tensor([1 + row % 3 for row in range(len(scores))])
    at = torch.arange(3)[None, :]
    values = torch.tensor(scores, dtype=dtype)
    zeros = torch.zeros(len(scores), 3, dtype=torch.int64)
    return {
        "token_rewards": values[:, None] * (at == lengths[:, None] - 1),
        "mask": (at < lengths[:, None]).to(dtype),
        "group_ids": torch.tensor(group_ids),
        "entropy": torch.ones(len(scores), 3, dtype=dtype),
        "old_log_probs": torch.full((len(scores), 3), -1.0, dtype=dtype),
        "sum_pi_squared": torch.full((len(scores), 3), 0.3, dtype=dtype),
        "part": values,
        "turns": zeros,
        "states": zeros,
    }


@sampled(4)
@comparing
@properties
@given(dtypes, st.lists(st.tuples(st.integers(1, 70), st.floats(-1e4, 1e4)), min_size=1, max_size=4), st.booleans())
def test_equal_scores_give_no_advantage(
    kind: type[Algorithm], dtype: torch.dtype, groups: list[tuple[int, float]], whiten: bool
) -> None:
    """What rounding leaves of a score less the mean of scores like it, divided by what it leaves of their deviation,
    would be as large as any advantage."""
    groups = groups[:1] if kind is ReinforcePlusPlus else groups  # which has one group, the batch
    whiten = whiten or kind is ReinforcePlusPlus
    scores = [score for size, score in groups for _ in range(size)]
    batch = scored(scores, [number for number, (size, _) in enumerate(groups) for _ in range(size)], dtype)
    assert (estimate(kind, batch, whiten=whiten)[0] == 0).all()


@properties
@given(dtypes, st.floats(0.125, 8, width=32), st.integers(2, 20))
def test_scores_that_differ_in_their_last_bit_are_compared(dtype: torch.dtype, score: float, size: int) -> None:
    scores = torch.full((size,), score, dtype=dtype)
    scores[0] = torch.nextafter(scores[0].clone(), scores[0] * 0)
    groups = Groups(torch.zeros(size, dtype=torch.int64))
    assert groups.differ(scores).all()
    assert torch.equal(groups.mean(scores), (groups.sum(scores) / size))
    assert torch.equal(
        groups.mean(scores, weights=scores), groups.sum(scores * scores) / groups.sum(scores).clamp(min=1)
    )


@sampled(4)
@estimators
@given(batches(scale=1e30))
@properties
def test_large_finite_inputs_give_finite_output(kind: type[Algorithm], batch: Batch) -> None:
    assert estimate(kind, batch).isfinite().all()


def test_a_teachers_opinion_may_be_clamped() -> None:
    """d is -8, 4 and 3, or at most 5 in size; the mean over the first two is subtracted."""
    drawn, teacher, mask = tensor([-1, -9, -4]), tensor([-9, -5, -1]), tensor([1, 1, 0])
    assert torch.equal(Distillation()(drawn, teacher, mask), tensor([-6, 6, 0]))
    assert torch.equal(Distillation(clamp=5)(drawn, teacher, mask), tensor([-4.5, 4.5, 0]))
