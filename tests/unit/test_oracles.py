"""Every recorded case of the published implementations, against the classes of `ratchet.rlhf.algorithms`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from ratchet.rlhf.algorithms import Advantage, Distillation, PolicyLoss
from ratchet.rlhf.algorithms.kl import AdaptiveCoefficient, Estimator, kl_divergence
from ratchet.rlhf.algorithms.masked import LossNormalizers
from ratchet.rlhf.algorithms.objectives import ActorObjective, CriticObjective
from ratchet.rlhf.algorithms.rollout_correction import (
    ImportanceWeights,
    Rejection,
    RolloutCorrection,
    off_policy_metrics,
)
from tests.oracles import RECORDED, Case
from tests.padded import members

OUR_NAMES = {
    "vanilla": "ppo",
    "loss_agg_mode": "aggregate",
    "group_index": "group_ids",
    "reward_baselines": "greedy_scores",
}
"""Where the field's names and the recorded ones differ."""


def ours(name: str) -> str:
    return OUR_NAMES.get(name, name)


def advantage(case: Case) -> dict[str, Tensor]:
    parts = case.inputs.get("reward_parts")
    names = [] if parts is None else [f"part {number}" for number in range(parts.shape[1])]
    more = {"parts": names} if names else {}
    estimator: Any = TypeAdapter(Advantage).validate_python({"type": case.name, **case.params, **more})
    mask = case.inputs["response_mask"]
    rewards = case.inputs.get("token_level_rewards", torch.zeros_like(mask))
    left = {}
    if "loss_mask" in case.outputs:  # an estimator that leaves trajectories out
        scores, lengths = (rewards * mask).sum(-1), mask.sum(-1)
        mask = mask * estimator.teaches(scores, lengths, case.inputs["group_index"])[:, None]
        left = {"loss_mask": mask}
    inputs: dict[str, Any] = {ours(name): value for name, value in case.inputs.items()}
    if parts is not None:
        inputs["reward_parts"] = dict(zip(names, parts.double().unbind(1), strict=True))
    found = estimator(rewards, mask, **{name: inputs[name] for name in estimator.needs})
    return dict(zip(("advantages", "returns"), found, strict=True)) | left


def policy_loss(case: Case) -> dict[str, Tensor]:
    """The recorded parameters are those of all losses: each takes its own."""
    loss_of: Any = TypeAdapter(PolicyLoss)
    kind = {member.model_fields["type"].default: member for member in members(PolicyLoss)}[ours(case.name)]
    given = {ours(name): value for name, value in case.params.items()}
    loss_function = loss_of.validate_python(
        {"type": ours(case.name), **{name: value for name, value in given.items() if name in kind.model_fields}}
    )
    log_probs, mask = case.inputs["log_probs"].clone().requires_grad_(), case.inputs["response_mask"]
    old, advantages = case.inputs["old_log_probs"], case.inputs["advantages"]
    loss, metrics = loss_function(log_probs, old, advantages, mask, LossNormalizers.of(mask))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return {"loss": loss, "grad": gradient, **metrics}


def bypass(case: Case) -> dict[str, Tensor]:
    """verl's `bypass_mode`, whose loss compares the current log-probs with the rollout's."""
    params = case.params
    loss_type = {"reinforce": "gpg", "ppo_clip": "ppo"}[case.name]
    clips = {name: value for name, value in params.items() if name.startswith("clip_")} if loss_type == "ppo" else {}
    policy_loss: Any = TypeAdapter(PolicyLoss).validate_python(
        {"type": loss_type, "aggregate": params["loss_agg_mode"], **clips}
    )
    weights = None
    if params["rollout_is"] is not None:
        weights = {"level": params["rollout_is"], **thresholds(params["rollout_is_threshold"])}
    rejection = []
    if params["rollout_rs"] is not None:
        pairs = zip(params["rollout_rs"].split(","), params["rollout_rs_threshold"].split(","), strict=True)
        rejection = [{"statistic": statistic, **thresholds(bounds)} for statistic, bounds in pairs]
    correction = RolloutCorrection.model_validate({"bypass": True, "weights": weights, "rejection": rejection})
    objective = ActorObjective(policy_loss, None, "k1", 0.0, on_policy=False, correction=correction)
    log_probs, mask = case.inputs["log_probs"].clone().requires_grad_(), case.inputs["response_mask"]
    batch = {
        "loss_mask": mask,
        "advantages": case.inputs["advantages"],
        "old_log_probs": case.inputs["rollout_log_probs"],
    }
    loss, _ = objective({"log_probs": log_probs}, batch, LossNormalizers.of(mask))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return {"loss": loss, "grad": gradient}


def value_loss(case: Case) -> dict[str, Tensor]:
    mask = case.inputs["response_mask"]
    batch = {"loss_mask": mask, "returns": case.inputs["returns"], "values": case.inputs["values"]}
    objective = CriticObjective(case.params["cliprange_value"], case.params["loss_agg_mode"])
    predicted = case.inputs["values_pred"].clone().requires_grad_()
    loss, metrics = objective({"values": predicted}, batch, LossNormalizers.of(mask))
    (gradient,) = torch.autograd.grad(loss, predicted)
    return {"loss": loss, "grad": gradient, "clipfrac": metrics["critic/vf_clipfrac"]}


def kl(case: Case) -> dict[str, Tensor]:
    estimator = TypeAdapter(Estimator).validate_python(case.name)
    log_probs = case.inputs["log_probs"].clone().requires_grad_()
    found = kl_divergence(log_probs, case.inputs["ref_log_probs"], estimator)
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    return {"kl": found, "grad": gradient}


def kl_controller(case: Case) -> dict[str, Tensor]:
    assert case.name == "adaptive"
    controller = AdaptiveCoefficient(target=case.params["target"], horizon=case.params["horizon"])
    coefficient, found = case.params["init"], []
    for measured in case.inputs["kl"].tolist():
        coefficient = controller(coefficient, measured, case.params["n_steps"])
        found.append(coefficient)
    return {"coef": torch.tensor(found, dtype=torch.float64)}


def thresholds(recorded: float | str) -> dict[str, float]:
    """Recorded as a number, or as text: `upper` or `lower_upper`."""
    *lower, upper = map(float, str(recorded).split("_"))
    return {"upper": upper, **({"lower": lower[0]} if lower else {})}


def log_probs_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.inputs["old_log_probs"], case.inputs["rollout_log_probs"], case.inputs["response_mask"]


def rollout_is(case: Case) -> dict[str, Tensor]:
    weights = ImportanceWeights.model_validate({"level": case.name, **thresholds(case.params["threshold"])})
    return {"weights": weights(*log_probs_of(case))}


def rollout_rs(case: Case) -> dict[str, Tensor]:
    rejection = Rejection.model_validate({"statistic": case.name, **thresholds(case.params["threshold"])})
    return {"response_mask": rejection(*log_probs_of(case))}


def offpolicy_metrics(case: Case) -> dict[str, Tensor]:
    assert case.name == "all"
    return off_policy_metrics(*log_probs_of(case))


def distillation(case: Case) -> dict[str, Tensor]:
    """TRL's GKD with the reverse KL (beta 1) is what the policy gradient does on average over the drawn token."""
    assert case.name == "gkd" and case.params["beta"] == 1
    temperature, mask = case.params["temperature"], case.inputs["response_mask"]
    logits = case.inputs["student_logits"].clone().requires_grad_()
    log_probs = (logits / temperature).log_softmax(-1)
    teacher = (case.inputs["teacher_logits"] / temperature).log_softmax(-1)
    drawn = log_probs.flatten(1)  # each token of the vocabulary at each place is one that may be drawn
    every = mask.repeat_interleave(log_probs.shape[-1], 1)
    advantages = Distillation()(drawn.detach(), teacher.flatten(1), every)
    average = drawn.detach().exp() * advantages / mask.sum()
    (gradient,) = torch.autograd.grad(-(average * drawn).sum(), logits)
    divergence = drawn.detach().exp() * (drawn.detach() - teacher.flatten(1)) * every / mask.sum()
    return {"loss": divergence.sum(), "grad": gradient}


KINDS = {
    function.__name__: function
    for function in (
        advantage,
        policy_loss,
        bypass,
        value_loss,
        kl,
        kl_controller,
        rollout_is,
        rollout_rs,
        offpolicy_metrics,
        distillation,
    )
}


@pytest.mark.parametrize("case", RECORDED, ids=str)
def test_recorded_case(case: Case) -> None:
    assert case.kind in KINDS, f"no test knows the kind {case.kind}"
    case.check(KINDS[case.kind](case))
