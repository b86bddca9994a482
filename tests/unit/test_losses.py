"""Objectives of the actor and the critic: by hand, against recorded cases, and what holds for all of them."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms import PolicyLoss, PPOClip
from rlhf.algorithms.kl import Estimator
from rlhf.algorithms.masked import Aggregation, Totals
from rlhf.algorithms.objectives import ActorObjective, CriticObjective, Objective, SupervisedObjective
from tests.oracles import Case, cases
from tests.padded import GARBAGE, Batch, batches, members, padded, properties, rows, spoiled


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
    found, metrics = ppo(log_probs, row(-1), row(advantage), row(1), Totals(1, 1))
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
    ],
)
def test_aggregation_by_hand(how: Aggregation, expected: float) -> None:
    """The ratio is 1, so that a token's loss is minus its advantage."""
    zeros, totals = torch.zeros_like(LOSSES), Totals.of(MASK)
    assert totals == Totals(tokens=4, sequences=2)
    found, _ = PPOClip(aggregate=how)(zeros, zeros, -LOSSES, MASK, totals)
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
    loss, metrics = objective(outputs, batch, Totals(2, 1))
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
    loss, _ = objective({"log_probs": log_probs}, {"loss_mask": row(1, 1), "advantages": row(3, -5)}, Totals(2, 1))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == 1
    assert torch.equal(gradient, row(-1.5, 2.5))


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
    loss, metrics = CriticObjective(cliprange)({"values": values}, batch, Totals(1, 1))
    (gradient,) = torch.autograd.grad(loss, values)
    assert loss.item() == pytest.approx(error**2 / 2)
    assert gradient.item() == pytest.approx(slope)
    assert metrics["critic/vf_clipfrac"].item() == pytest.approx(clipped)
    assert metrics["critic/vpred_mean"].item() == pytest.approx(predicted)


def test_supervised_loss_is_the_mean_negative_log_likelihood() -> None:
    loss, _ = SupervisedObjective()({"log_probs": row(-1, -2, -99)}, {"loss_mask": row(1, 1, 0)}, Totals(2, 1))
    assert loss.item() == 1.5


@pytest.mark.parametrize(
    "case", [case for case in cases("policy_loss", "vanilla") if "norm" not in case.values[0].params["loss_agg_mode"]]
)
def test_recorded_policy_losses(case: Case) -> None:
    limits = {name: case.params[name] for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    log_probs, mask = case.inputs["log_probs"].requires_grad_(), case.inputs["response_mask"]
    ppo = PPOClip(aggregate=case.params["loss_agg_mode"], **limits)
    loss, metrics = ppo(log_probs, case.inputs["old_log_probs"], case.inputs["advantages"], mask, Totals.of(mask))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    case.check({"loss": loss, "grad": gradient, **metrics})


@pytest.mark.parametrize("case", cases("value_loss", "clipped"))
def test_recorded_value_losses(case: Case) -> None:
    mask = case.inputs["response_mask"]
    batch = {"loss_mask": mask, "returns": case.inputs["returns"], "values": case.inputs["values"]}
    objective = CriticObjective(case.params["cliprange_value"], case.params["loss_agg_mode"])
    loss, metrics = objective({"values": case.inputs["values_pred"]}, batch, Totals.of(mask))
    case.check({"loss": loss, "clipfrac": metrics["critic/vf_clipfrac"]})


def _objectives() -> list[Any]:
    """Every policy loss with every aggregation, KL estimators and entropy in turn; the critic's; the supervised one."""
    found: dict[str, Objective] = {"sft": SupervisedObjective()}
    estimators = get_args(Estimator)
    for how in get_args(Aggregation):
        found[f"critic-{how}"] = CriticObjective(0.5, how)
        for index, kind in enumerate(members(PolicyLoss)):
            loss = kind.model_validate({"aggregate": how})
            estimator = estimators[(len(found) + index) % len(estimators)]
            tag = loss.type  # type: ignore[attr-defined]
            found[f"{tag}-{how}"] = ActorObjective(loss, None, "k1", 0.0, on_policy=False)  # type: ignore[arg-type]
            found[f"{tag}-{how}-{estimator}-entropy"] = ActorObjective(loss, 0.3, estimator, 0.1, on_policy=True)  # type: ignore[arg-type]
    return [pytest.param(objective, id=name) for name, objective in found.items()]


objectives = pytest.mark.parametrize("objective", _objectives())


def compute(objective: Objective, batch: Batch, totals: Totals | None = None) -> dict[str, Tensor]:
    """The loss, its gradient in each output, and the metrics; shares of `totals` where they are given."""
    outputs = {name: batch[name].clone().requires_grad_() for name in objective.outputs}
    columns = {name: batch["mask" if name == "loss_mask" else name] for name in objective.columns}
    loss, metrics = objective(outputs, columns, totals or Totals.of(batch["mask"]))
    gradients = torch.autograd.grad(loss, tuple(outputs.values()))
    return {"loss": loss, **dict(zip(outputs, gradients, strict=True)), **metrics}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@objectives
@properties
@given(batches(), st.sampled_from(GARBAGE), st.integers(0, 3))
def test_masked_positions_never_matter(objective: Objective, batch: Batch, garbage: float, wider: int) -> None:
    found = compute(objective, batch)
    assert all(value.isfinite().all() for value in found.values())
    assert all((found[name][batch["mask"] == 0] == 0).all() for name in objective.outputs)
    assert_same(compute(objective, spoiled(batch, garbage)), found)
    wide = {name: torch.nn.functional.pad(x, (0, wider)) if x.dim() == 2 else x for name, x in found.items()}
    assert_same(compute(objective, padded(batch, wider)), wide)


@objectives
@properties
@given(batches(), st.data())
def test_order_and_micro_batches_never_matter(objective: Objective, batch: Batch, data: st.DataObject) -> None:
    """Rows in any order and in any pieces: the shares add up to the whole."""
    whole, count = compute(objective, batch), len(batch["mask"])
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)) if count > 1 else st.just(set())))
    pieces = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]
    totals = Totals.of(batch["mask"])
    summed = {name: torch.zeros_like(value) for name, value in whole.items()}
    for piece in pieces:
        for name, value in compute(objective, rows(batch, piece), totals).items():
            if name in objective.outputs:
                summed[name][piece] = value
            else:
                summed[name] = summed[name] + value
    assert_same(summed, whole)
