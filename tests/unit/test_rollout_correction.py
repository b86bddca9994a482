"""Rollout correction and reward shaping: by hand, and what always holds."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from ratchet.rlhf.algorithms.reward_shaping import OverlongPenalty
from ratchet.rlhf.algorithms.rollout_correction import (
    ImportanceWeights,
    Rejection,
    RolloutCorrection,
    effective_sample_size,
    off_policy_metrics,
)
from ratchet.rlhf.metrics import Statistic
from tests.padded import GARBAGE, Batch, batches, padded, properties, rows, spoiled
from tests.tiers import sampled


def tensor(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Ratios old / rollout: 2, 1/4 | 8, 1 (and a masked one)
ROLLOUT = tensor([-2, -2, 9], [-3, -3, 9])
OLD = ROLLOUT + tensor([math.log(2), -math.log(4), 9], [math.log(8), 0, 9])
MASK = tensor([1, 1, 0], [1, 1, 0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"upper": 3}, [[2, 0.25, 0], [3, 1, 0]]),
        ({"lower": 0.5, "upper": 3}, [[2, 0, 0], [0, 1, 0]]),
        ({"level": "sequence", "upper": 3}, [[0.5, 0.5, 0], [3, 3, 0]]),
        ({"level": "sequence", "lower": 0.6, "upper": 9}, [[0, 0, 0], [8, 8, 0]]),
        ({"upper": 3, "normalize": True}, [[8 / 6.25, 1 / 6.25, 0], [12 / 6.25, 4 / 6.25, 0]]),
        ({"level": "sequence", "upper": 3, "normalize": True}, [[0.5 / 1.75] * 2 + [0], [3 / 1.75] * 2 + [0]]),
    ],
)
def test_weights_by_hand(options: dict[str, Any], expected: list[list[float]]) -> None:
    weights = ImportanceWeights.model_validate(options)(OLD, ROLLOUT, MASK)
    torch.testing.assert_close(weights, tensor(*expected), rtol=1e-7, atol=1e-12)


def test_weights_that_are_all_zero_stay_so() -> None:
    for level in ("token", "sequence"):
        weights = ImportanceWeights(level=level, lower=0.9, upper=0.95, normalize=True)
        assert (weights(OLD, ROLLOUT, MASK) == 0).all()


def test_weights_metrics_by_hand() -> None:
    found = ImportanceWeights(upper=3).metrics(OLD, ROLLOUT, MASK)
    weights = tensor(2, 0.25, 3, 1)
    expected = {
        "rollout_is_mean": 1.5625,
        "rollout_is_max": 3,
        "rollout_is_min": 0.25,
        "rollout_is_std": weights.std(unbiased=False).item(),
        "rollout_is_ratio_fraction_high": 0.25,
        "rollout_is_ratio_fraction_low": 0.25,
        "rollout_is_eff_sample_size": (weights.mean() ** 2 / weights.square().mean()).item(),
    }
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-6)
    assert effective_sample_size(MASK, MASK).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # k1 bounds rollout / old: 1/2, 4 | 1/8, 1
        ({"statistic": "token_k1", "upper": 2.1}, [[1, 0], [0, 1]]),
        ({"statistic": "token_k1", "lower": 0.1, "upper": 2}, [[1, 0], [1, 1]]),
        ({"statistic": "token_k2", "upper": 1}, [[1, 1], [0, 1]]),  # 0.24, 0.96 | 2.16, 0
        ({"statistic": "token_k3", "upper": 0.5}, [[1, 0], [0, 1]]),  # 0.307, 0.636 | 4.92, 0
        ({"statistic": "seq_sum_k1", "upper": 2.5}, [[1, 1], [0, 0]]),  # 2 | 1/8
        ({"statistic": "seq_mean_k1", "lower": 0.3, "upper": 1.1}, [[0, 0], [1, 1]]),  # sqrt 2 | 8^-1/2
        ({"statistic": "seq_sum_k2", "upper": 1.5}, [[1, 1], [0, 0]]),  # 1.2 | 2.16
        ({"statistic": "seq_mean_k2", "upper": 1.0}, [[1, 1], [0, 0]]),  # 0.6 | 1.08
        ({"statistic": "seq_max_k2", "upper": 0.9}, [[0, 0], [0, 0]]),
        ({"statistic": "seq_sum_k3", "upper": 0.95}, [[1, 1], [0, 0]]),  # 0.943 | 4.92
        ({"statistic": "seq_mean_k3", "upper": 0.48}, [[1, 1], [0, 0]]),
        ({"statistic": "seq_max_k3", "upper": 0.64}, [[1, 1], [0, 0]]),
    ],
)
def test_rejection_by_hand(options: dict[str, Any], expected: list[list[float]]) -> None:
    kept = Rejection.model_validate(options)(OLD, ROLLOUT, MASK)
    assert kept.tolist() == [[*row, 0] for row in expected]


def test_off_policy_metrics_by_hand() -> None:
    found = off_policy_metrics(OLD, ROLLOUT, MASK)
    ratios, logs = tensor(2, 0.25, 8, 1), tensor(2, 0.25, 8, 1).log()
    training = tensor(2 + math.log(2) / 2, 3 - math.log(8) / 2)
    expected = {
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": tensor(2, 3).exp().mean(),
        "rollout_log_ppl": 2.5,
        "kl": -logs.mean(),
        "k3_kl": (ratios - 1 - logs).mean(),
        "log_ppl_diff": (math.log(2) - math.log(8)) / 4,
        "log_ppl_abs_diff": (math.log(2) + math.log(8)) / 4,
        "log_ppl_diff_max": math.log(2) / 2,
        "log_ppl_diff_min": -math.log(8) / 2,
        "ppl_ratio": (2**0.5 + 8**-0.5) / 2,
        "chi2_token": (4 + 1 / 16 + 64 + 1) / 4 - 1,
        "chi2_seq": (1 / 4 + 64) / 2 - 1,
    }
    # the published means divide by the count + 1e-8
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-7
    )


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ImportanceWeights, {"lower": 3, "upper": 2}, "lower 3.0 is above upper 2.0"),
        (Rejection, {"statistic": "token_k1", "lower": 3, "upper": 2}, "lower 3.0 is above upper 2.0"),
        (Rejection, {"statistic": "token_k3", "lower": 1, "upper": 2}, "token_k3 has one side only"),
        (Rejection, {"statistic": "token_k1", "upper": 0.5}, "below 1, set lower too"),
        (RolloutCorrection, {"bypass": True, "weights": {"normalize": True}}, "weights of the whole batch"),
    ],
)
def test_contradictions_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        kind.model_validate(options)


def test_old_log_probs_are_needed_to_compare_with() -> None:
    assert RolloutCorrection().needs == RolloutCorrection(bypass=True).needs == ()
    assert RolloutCorrection(weights=ImportanceWeights()).needs == ("old_log_probs",)
    assert RolloutCorrection(rejection=(Rejection(statistic="token_k1", upper=2),)).needs == ("old_log_probs",)


CORRECTIONS = [
    *(ImportanceWeights(level=level, lower=lower) for level in ("token", "sequence") for lower in (None, 0.5)),
    *(Rejection(statistic=statistic, upper=1.5) for statistic in get_args(Statistic)),
]


@sampled(3)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@properties
@given(batches(), st.sampled_from(GARBAGE), st.integers(0, 3), st.randoms(use_true_random=False))
def test_masked_positions_and_order_never_matter(
    correction: Any, batch: Batch, garbage: float, wider: int, random: Any
) -> None:
    def corrected(given: Batch) -> Tensor:
        found = correction(given["old_log_probs"], given["rollout_log_probs"], given["mask"])
        assert isinstance(found, Tensor)
        return found

    found = corrected(batch)
    assert found.isfinite().all()
    assert (found[batch["mask"] == 0] == 0).all()
    assert torch.equal(corrected(spoiled(batch, garbage)), found)
    torch.testing.assert_close(corrected(padded(batch, wider)), torch.nn.functional.pad(found, (0, wider)))
    order = list(range(len(found)))
    random.shuffle(order)
    torch.testing.assert_close(corrected(rows(batch, order)), found[order])


def test_overlong_penalty_by_hand() -> None:
    penalty = OverlongPenalty(buffer_tokens=4, factor=0.5)
    assert penalty(tensor(3, 16, 17, 18, 20), 20).tolist() == [0, 0, -0.125, -0.25, -0.5]
