"""Objectives of the actor and the critic: by hand, and what holds for all of them."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ratchet.rlhf.algorithms import PolicyLoss, PPOClip
from ratchet.rlhf.algorithms.base import Algorithm
from ratchet.rlhf.algorithms.kl import Estimator
from ratchet.rlhf.algorithms.masked import Aggregation, LossNormalizers
from ratchet.rlhf.algorithms.objectives import ActorObjective, CriticObjective, Objective, SupervisedObjective
from ratchet.rlhf.algorithms.policy_losses import (
    CISPO,
    DPPOKL,
    DPPOTV,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    VESPO,
    ClipCov,
    GPGLoss,
    KLCov,
    TokenLoss,
)
from ratchet.rlhf.algorithms.rollout_correction import ImportanceWeights, Rejection, RolloutCorrection
from tests.padded import GARBAGE, Batch, batches, members, padded, properties, rows, spoiled
from tests.tiers import sampled


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped", "clipped_lower"),
    [
        # slope is the loss's derivative in log pi: -ratio A where the plain surrogate holds, 0 where a limit does
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.5, 2.0, -1.3 * 2, 0, 1, 0),  # above: a gain is cut at 1 + 0.3
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # below: a loss is not
        (0.95, -2.0, 1.9, 1.9, 0, 0),
        (0.5, -2.0, 0.9 * 2, 0, 1, 0),  # below: a gain is cut at 1 - 0.1
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # above: a loss is not, up to the dual clip
        (4.0, -2.0, 2.5 * 2, 0, 0, 1),
        (4.0, 2.0, -1.3 * 2, 0, 1, 0),  # the dual clip leaves positive advantages alone
        (math.exp(30), -2.0, 5.0, 0, 0, 1),
        (math.exp(-30), 2.0, -2 * math.exp(-20), 0, 0, 0),  # the log-ratio ends at -20
    ],
)
def test_ppo_clip_by_hand(
    ratio: float, advantage: float, loss: float, slope: float, clipped: int, clipped_lower: int
) -> None:
    log_probs = row(math.log(ratio) - 1).requires_grad_()
    ppo = PPOClip(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.5)
    found, metrics = ppo(log_probs, row(-1), row(advantage), row(1), LossNormalizers(1, 1, 1))
    (gradient,) = torch.autograd.grad(found, log_probs)
    assert found.item() == pytest.approx(loss, rel=1e-12)
    assert gradient.item() == pytest.approx(slope, rel=1e-12)
    assert metrics["pg_clipfrac"].item() == pytest.approx(clipped, abs=1e-7)
    assert metrics["pg_clipfrac_lower"].item() == pytest.approx(clipped_lower, abs=1e-7)
    assert metrics["ppo_kl"].item() == pytest.approx(-min(max(math.log(ratio), -20), 20), abs=1e-6)


# Per-token losses 1, 2, 3 | 4 (and a masked one) | no token at all.
LOSSES = torch.tensor([[1, 2, 3], [4, 99, 0], [99, 0, 0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10),
        ("seq-mean-token-sum", (6 + 4) / 2),  # a trajectory without a token counts nowhere
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 2 / 3),
    ],
)
def test_aggregation_by_hand(how: Aggregation, expected: float) -> None:
    """The ratio is 1, so that a token's loss is minus its advantage."""
    zeros, normalizers = torch.zeros_like(LOSSES), LossNormalizers.of(MASK)
    assert normalizers == LossNormalizers(tokens=4, sequences=2, horizon=3)
    found, _ = PPOClip(aggregate=how)(zeros, zeros, -LOSSES, MASK, normalizers)
    assert found.item() == pytest.approx(expected, rel=1e-7)


def test_actor_objective_adds_entropy_and_kl_by_hand() -> None:
    objective = ActorObjective(PPOClip(), kl_in_loss=0.5, kl_estimator="k2", entropy_coef=0.25, on_policy=False)
    outputs = {"log_probs": row(-1, -1, 7), "entropy": row(2, 4, 99)}
    batch = {
        "loss_mask": row(1, 1, 0),
        "advantages": row(1, 3, 99),
        "old_log_probs": row(-1, -1, 99),
        "ref_log_probs": row(-3, -1, 99),
    }
    loss, metrics = objective(outputs, batch, LossNormalizers(2, 1, 2))
    # policy -(1 + 3) / 2; entropy (2 + 4) / 2; KL (2^2 / 2 + 0) / 2
    assert loss.item() == pytest.approx(-2 - 0.25 * 3 + 0.5 * 1)
    expected = {"pg_loss": -2, "entropy_loss": 3, "kl_loss": 1, "pg_clipfrac": 0, "pg_clipfrac_lower": 0, "ppo_kl": 0}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {f"actor/{name}": value for name, value in expected.items()}
    )


def test_on_policy_the_ratio_is_one_and_its_gradient_is_the_policy_gradient() -> None:
    objective = ActorObjective(PPOClip(), kl_in_loss=None, kl_estimator="k3", entropy_coef=0, on_policy=True)
    assert objective.columns == ("loss_mask", "advantages")
    assert objective.outputs == ("log_probs",)
    log_probs = row(-1, -2).requires_grad_()
    loss, _ = objective(
        {"log_probs": log_probs}, {"loss_mask": row(1, 1), "advantages": row(3, -5)}, LossNormalizers(2, 1, 2)
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == 1
    assert torch.equal(gradient, row(-1.5, 2.5))


# One row of tokens, for losses whose tokens do not see each other; the last is masked.
OLD = torch.tensor([[0.5, 0.5, 0.2, 0.9, 0.5]], dtype=torch.float64)
NEW = torch.tensor([[0.6, 0.75, 0.35, 0.5, 0.1]], dtype=torch.float64)
ADVANTAGES = row(1, 1, -2, -2, 99)
HERE = row(1, 1, 1, 1, 0)


@pytest.mark.parametrize(
    ("loss", "slopes"),
    [
        # -(d loss / d log pi) / A of each token
        (GPGLoss(), [1, 1, 1, 1]),
        (CISPO(clip_ratio_low=0.3, clip_ratio_high=0.4), [1.2, 1.4, 1.4, 0.7]),
        # positive advantage: within +0.2; negative: within -0.3, and a rise is no reason to stop
        (DPPOTV(clip_ratio_low=0.3, clip_ratio_high=0.2), [1.2, 0, 1.75, 0]),
        (DPPOTV(clip_ratio_low=0.5, clip_ratio_high=0.3, clip_ratio_c=1.4), [1.2, 1.4, 1.4, 5 / 9]),
        # binary divergences: 0.0204, 0.1438; the third rises; 0.3681
        (DPPOKL(clip_ratio_low=0.4, clip_ratio_high=0.02), [0, 0, 1.75, 5 / 9]),
        (DPPOKL(clip_ratio_low=0.3, clip_ratio_high=0.1), [1.2, 0, 1.75, 0]),
        # minus the slope of the squared log-ratio, 2 c log(ratio) / A, also where the first term has none
        (
            DPPOTV(clip_ratio_low=0.3, clip_ratio_high=0.2, kl_coef=0.25),
            [1.2 - math.log(1.2) / 2, -math.log(1.5) / 2, 1.75 + math.log(1.75) / 4, math.log(5 / 9) / 4],
        ),
        # minus the penalty's slope, beta log(ratio) / A
        (
            DRO(dro_beta=0.5),
            [1 - math.log(1.2) / 2, 1 - math.log(1.5) / 2, 1 + math.log(1.75) / 4, 1 + math.log(5 / 9) / 4],
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_slopes_by_hand(loss: TokenLoss, slopes: list[float]) -> None:
    log_probs = NEW.log().requires_grad_()
    summed = loss.model_copy(update={"aggregate": "token-sum"})
    found, _ = summed(log_probs, OLD.log(), ADVANTAGES, HERE, LossNormalizers.of(HERE))
    (gradient,) = torch.autograd.grad(found, log_probs)
    torch.testing.assert_close(gradient, -row(*slopes, 0) * ADVANTAGES, rtol=1e-10, atol=1e-12)


def test_rollout_weights_scale_each_tokens_loss() -> None:
    weights = row(2, 0, 0.5, 1, 99)
    log_probs = NEW.log()
    plain, weighted = (
        GPGLoss(aggregate="token-sum")(
            log_probs, OLD.log(), ADVANTAGES, HERE, LossNormalizers.of(HERE), rollout_is_weights=given
        )[0]
        for given in (None, weights)
    )
    each = -ADVANTAGES * log_probs
    assert plain.item() == pytest.approx(each[0, :4].sum().item())
    assert weighted.item() == pytest.approx((each * weights)[0, :4].sum().item())
    gmpo, _ = GMPO()(
        OLD.log(), OLD.log(), ADVANTAGES, HERE, LossNormalizers.of(HERE), rollout_is_weights=row(1, 4, 1, 4, 99)
    )
    assert gmpo.item() == pytest.approx(2 / 4 * 2)  # mean advantage -1/2; geometric mean of the weights 2
    objective = ActorObjective(GPGLoss(), None, "k1", 0.0, on_policy=False, weighted=True)
    batch = {"loss_mask": HERE, "advantages": ADVANTAGES, "rollout_is_weights": weights}
    loss, _ = objective({"log_probs": log_probs}, batch, LossNormalizers.of(HERE))
    assert loss.item() == pytest.approx(weighted.item() / 4)


def test_the_horizon_is_what_the_objective_says() -> None:
    loss = PPOClip(aggregate="seq-mean-token-sum-norm")
    batch = {"loss_mask": row(1, 1), "advantages": row(3, 5)}
    found = [
        ActorObjective(loss, None, "k1", 0.0, on_policy=True, horizon=horizon)(
            {"log_probs": row(-1, -1)}, batch, LossNormalizers(2, 1, 2)
        )
        for horizon in (None, 16)
    ]
    assert [one[0].item() for one in found] == [-4, -0.5]


def test_sapo_by_hand() -> None:
    """At a ratio of 1 the gate's value is 2 / tau and its slope 1, whatever tau: the plain policy gradient."""
    log_probs = row(-1, -2).requires_grad_()
    found, _ = SAPO(tau_pos=2, tau_neg=4)(log_probs, row(-1, -2), row(3, -5), row(1, 1), LossNormalizers(2, 1, 2))
    (gradient,) = torch.autograd.grad(found, log_probs)
    assert found.item() == pytest.approx((-3 * 2 / 2 + 5 * 2 / 4) / 2)
    torch.testing.assert_close(gradient, row(-3, 5) / 2, rtol=1e-7, atol=0)


def test_vespo_by_hand() -> None:
    """Ratios 2 and 1/4 make a response with W = 1/2, and a third token, which is masked, does not count. With k = 2 and
    lambda = 3 its weight is e^1.5 / 4, with k = 3 and lambda = 2 e / 8. On policy the weight is 1."""
    old, here = row(-3, -2, -2), row(1, 1, 0)
    new = (old + row(math.log(2), -math.log(4), 9)).requires_grad_()
    for advantage, weight in ((3.0, math.exp(1.5) / 4), (-3.0, math.exp(1) / 8)):
        given = advantage * torch.ones_like(old)
        found, metrics = VESPO(aggregate="token-sum")(new, old, given, here, LossNormalizers.of(here))
        (gradient,) = torch.autograd.grad(found, new)
        torch.testing.assert_close(gradient, -weight * given * here, rtol=1e-12, atol=0)
        assert metrics["vespo_weight"].item() == pytest.approx(weight)
    _, metrics = VESPO()(old, old, given, here, LossNormalizers.of(here))
    assert metrics["vespo_weight"].item() == pytest.approx(1)


def test_with_bypass_the_loss_corrects_by_the_current_policy() -> None:
    """Ratios 1.2, 1.5, 1.75, 5/9; the last token is masked. The fourth is rejected, and the third weight truncated."""
    rejection = Rejection(statistic="token_k2", upper=math.log(1.8) ** 2 / 2 - 1e-9)  # 5/9 is as far from 1 as 9/5
    correction = RolloutCorrection(bypass=True, weights=ImportanceWeights(upper=1.6), rejection=(rejection,))
    objective = ActorObjective(GPGLoss(), None, "k1", 0.0, on_policy=False, correction=correction)
    assert objective.columns == ("loss_mask", "advantages", "old_log_probs")
    log_probs = NEW.log().requires_grad_()
    batch = {"loss_mask": HERE, "advantages": ADVANTAGES, "old_log_probs": OLD.log()}
    loss, metrics = objective({"log_probs": log_probs}, batch, LossNormalizers.of(HERE))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, -row(1.2, 1.5, -3.2, 0, 0) / 4, rtol=1e-7, atol=0)
    assert metrics["rollout_corr/rollout_rs_token_k2_masked_fraction"].item() == pytest.approx(1 / 4)
    assert metrics["rollout_corr/rollout_is_mean"].item() == pytest.approx((1.2 + 1.5 + 1.6 + 5 / 9) / 4)


def test_gspo_and_gmpo_see_whole_responses() -> None:
    """Ratios 2 and 1/2 make a sequence whose mean log-ratio is 0; GMPO clips them first, on the advantage's side."""
    old, new, here = row(-2, -2), row(-2 + math.log(2), -2 - math.log(2)), row(1, 1)
    gspo, metrics = GSPO()(new, old, row(3, 3), here, LossNormalizers.of(here))
    assert gspo.item() == pytest.approx(-3)
    assert metrics["pg_clipfrac"].item() == 0
    gmpo, metrics = GMPO(clip_ratio_low=0.1, clip_ratio_high=0.2)(new, old, row(3, 3), here, LossNormalizers.of(here))
    assert gmpo.item() == pytest.approx(-3 * math.exp((0.2 - math.log(2)) / 2))
    assert metrics["pg_clipfrac"].item() == pytest.approx(1)
    gmpo, metrics = GMPO(clip_ratio_low=0.1, clip_ratio_high=0.2)(new, old, row(-3, -3), here, LossNormalizers.of(here))
    assert gmpo.item() == pytest.approx(3 * math.exp((math.log(2) - 0.1) / 2))


# Covariances about the means (A: 1, log pi: -2): 6, 2, 0, 2; the last token is masked.
COV_LOG_PROBS, COV_ADVANTAGES, COV_MASK = row(0, -3, -2, -3, 9), row(4, -1, 2, -1, 99), row(1, 1, 1, 1, 0)


def test_clip_cov_draws_among_the_tokens_of_middling_covariance() -> None:
    loss = ClipCov(clip_cov_ratio=0.3, clip_cov_lb=1, clip_cov_ub=5)  # a share of 4 tokens: one
    arguments = COV_LOG_PROBS, COV_LOG_PROBS, COV_ADVANTAGES, COV_MASK
    assert loss.select(*arguments, noise=row(0.9, 0.1, 0.9, 0.2, 0.9)).tolist() == [[False, False, False, True, False]]
    selected = loss.select(*arguments, noise=row(0, 0.3, 0, 0.2, 0))
    assert selected.tolist() == [[False, True, False, False, False]]
    log_probs = COV_LOG_PROBS.clone().requires_grad_()
    found, metrics = loss(log_probs, *arguments[1:], LossNormalizers.of(COV_MASK), selected=selected)
    (gradient,) = torch.autograd.grad(found, log_probs)
    torch.testing.assert_close(gradient, row(-1, 0, -0.5, 0.25, 0), rtol=1e-12, atol=1e-12)
    assert metrics["pg_clipfrac"].item() == pytest.approx(0.25)
    masked = torch.cat([COV_MASK] + [torch.zeros_like(COV_MASK)] * 3, -1)
    log_probs, advantages = torch.cat([COV_LOG_PROBS] * 4, -1), torch.cat([COV_ADVANTAGES] * 4, -1)
    assert loss.select(log_probs, log_probs, advantages, masked, noise=torch.ones_like(masked)).sum() == 1, (
        "a share of the tokens that count"
    )
    beyond = COV_LOG_PROBS - row(0, 0, 0, 1, 0)  # PPO's clip holds the fourth already
    assert not loss.select(COV_LOG_PROBS, beyond + row(0, 0, 0, 2, 0), *arguments[2:], noise=row(0, 0, 0, 1, 0))[0, 3]


def test_kl_cov_holds_the_tokens_of_largest_covariance() -> None:
    loss = KLCov(kl_cov_ratio=0.3, ppo_kl_coef=0.5)
    old = COV_LOG_PROBS - 0.1
    found, metrics = loss(COV_LOG_PROBS, old, COV_ADVANTAGES, COV_MASK, LossNormalizers.of(COV_MASK))
    assert found.item() == pytest.approx((-math.exp(0.1) * 4 + 0.5 * 0.1) / 4)
    assert metrics["ppo_kl"].item() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("cliprange", "predicted", "error", "slope", "clipped"),
    [
        # the old value is 1; the return is 3
        (0.5, 1.4, 1.6, -1.6, 0),  # within the range
        (0.5, 2.5, 1.5, 0, 1),  # nearer to the return than the range allows: as if it stood at 1.5
        (0.5, 0.0, 3.0, -3.0, 0),  # farther from it: nothing is forgiven
        (0.5, 6.0, 3.0, 3.0, 0),  # overshot by more than the range leaves
        (None, 2.5, 0.5, -0.5, 0),
    ],
)
def test_value_loss_by_hand(
    cliprange: float | None, predicted: float, error: float, slope: float, clipped: int
) -> None:
    values = row(predicted).requires_grad_()
    batch = {"loss_mask": row(1), "returns": row(3), "values": row(1)}
    loss, metrics = CriticObjective(cliprange)({"values": values}, batch, LossNormalizers(1, 1, 1))
    (gradient,) = torch.autograd.grad(loss, values)
    assert loss.item() == pytest.approx(error**2 / 2)
    assert gradient.item() == pytest.approx(slope)
    assert metrics["critic/vf_clipfrac"].item() == pytest.approx(clipped)
    assert metrics["critic/vpred_mean"].item() == pytest.approx(predicted)


def test_supervised_loss_is_the_mean_negative_log_likelihood() -> None:
    loss, _ = SupervisedObjective()(
        {"log_probs": row(-1, -2, -99)}, {"loss_mask": row(1, 1, 0)}, LossNormalizers(2, 1, 2)
    )
    assert loss.item() == 1.5


def _objectives() -> list[Any]:
    """Every policy loss with every aggregation that it has, weights, KL estimators and entropy in turn; the critic's;
    the supervised one."""
    found: dict[str, Objective] = {"sft": SupervisedObjective()}
    estimators = get_args(Estimator)
    for how in get_args(Aggregation):
        found[f"critic-{how}"] = CriticObjective(0.5, how)
        for index, kind in enumerate(members(PolicyLoss)):
            if "aggregate" not in kind.model_fields and how != "seq-mean-token-mean":
                continue
            loss: Any = kind.model_validate({"aggregate": how} if "aggregate" in kind.model_fields else {})
            estimator = estimators[(len(found) + index) % len(estimators)]
            name = f"{loss.type}-{how}"
            found[name] = ActorObjective(loss, None, "k1", 0.0, on_policy=False)
            found[f"{name}-{estimator}-entropy"] = ActorObjective(loss, 0.3, estimator, 0.1, on_policy=True)
            rejected = Rejection(statistic="seq_mean_k2", upper=0.5), Rejection(statistic="token_k1", upper=3)
            weights = None if "old_log_probs" in loss.needs else ImportanceWeights(level="sequence")
            correction = RolloutCorrection(bypass=True, rejection=rejected, weights=weights)
            found[f"{name}-bypass"] = ActorObjective(loss, None, "k1", 0.0, on_policy=False, correction=correction)
            found[f"{name}-weighted"] = ActorObjective(loss, None, "k1", 0.0, on_policy=False, weighted=True)
    return [pytest.param(objective, id=name) for name, objective in found.items()]


objectives = pytest.mark.parametrize("objective", _objectives())


def columns_of(objective: Objective, batch: Batch) -> Batch:
    return {name: batch["mask" if name == "loss_mask" else name] for name in objective.columns}


def selected_by(objective: Objective, batch: Batch) -> Batch:
    """The batch with the tokens that the objective picks of it as a whole, if it does."""
    if objective.selection is None:
        return batch
    return batch | {"selected": objective.selection(batch, columns_of(objective, batch))}


def compute(objective: Objective, batch: Batch, normalizers: LossNormalizers) -> dict[str, Tensor]:
    """The loss, its gradient in each output, and the metrics, as shares of `totals`."""
    outputs = {name: batch[name].clone().requires_grad_() for name in objective.outputs}
    columns = columns_of(objective, batch) | ({"selected": batch["selected"]} if "selected" in batch else {})
    loss, metrics = objective(outputs, columns, normalizers)
    gradients = torch.autograd.grad(loss, tuple(outputs.values()))
    return {"loss": loss, **dict(zip(outputs, gradients, strict=True)), **metrics}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@sampled(24)
@objectives
@settings(properties, max_examples=15)  # of each loss in a dozen objectives
@given(batches(), st.sampled_from(GARBAGE), st.integers(0, 3))
def test_masked_positions_never_matter(objective: Objective, batch: Batch, garbage: float, wider: int) -> None:
    normalizers = LossNormalizers.of(batch["mask"])
    found = compute(objective, selected_by(objective, batch), normalizers)
    assert all(value.isfinite().all() for value in found.values())
    assert all((found[name][batch["mask"] == 0] == 0).all() for name in objective.outputs)
    assert_same(compute(objective, selected_by(objective, spoiled(batch, garbage)), normalizers), found)
    wide = {name: torch.nn.functional.pad(x, (0, wider)) if x.dim() == 2 else x for name, x in found.items()}
    assert_same(compute(objective, selected_by(objective, padded(batch, wider)), normalizers), wide)


@sampled(24)
@objectives
@settings(properties, max_examples=15)
@given(batches(), st.data())
def test_order_and_micro_batches_never_matter(objective: Objective, batch: Batch, data: st.DataObject) -> None:
    """Rows in any order and in any pieces: the shares add up to the whole."""
    normalizers, count = LossNormalizers.of(batch["mask"]), len(batch["mask"])
    batch = selected_by(objective, batch)
    whole = compute(objective, batch, normalizers)
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)) if count > 1 else st.just(set())))
    pieces = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]
    summed = {name: torch.zeros_like(value) for name, value in whole.items()}
    for piece in pieces:
        for name, value in compute(objective, rows(batch, piece), normalizers).items():
            if name in objective.outputs:
                summed[name][piece] = value
            else:
                summed[name] = summed[name] + value
    assert_same(summed, whole)
