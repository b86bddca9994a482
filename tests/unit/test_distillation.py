"""Divergences of a policy from its teacher, over the teacher's most likely tokens and one bucket for all others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ratchet.rlhf.algorithms.distillation import Distillation, Divergence
from ratchet.rlhf.models.token_outputs import log_probs_of_top
from ratchet.rlhf.rollout.scoring_servers import NO_MASS, ROUNDING, tail_of
from ratchet.rlhf.rollout.server_engine import TopTokens

LOSSES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jsd")


def full(kind: str, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """The divergence over the whole vocabulary, of log-probs in float64."""
    p, q = teacher.exp(), student.exp()
    if kind == "forward_kl":
        return (p * (teacher - student)).sum(-1)
    if kind == "reverse_kl":
        return (q * (student - teacher)).sum(-1)
    mixture = beta * p + (1 - beta) * q
    return (beta * p * (p / mixture).log() + (1 - beta) * q * (q / mixture).log()).sum(-1)


def over_top(loss: Distillation, logits: Tensor, teacher: Tensor, k: int) -> Tensor:
    """The divergence over the teacher's k most likely tokens, as the engine and the objective compute it."""
    ids = teacher.topk(k).indices
    nothing = torch.zeros(len(ids), dtype=torch.long)
    _, _, top, tail = log_probs_of_top(logits * 1.0, nothing, ids, 1.0, entropy=False)
    _, _, teacher_top, teacher_tail = log_probs_of_top(teacher.float() * 1.0, nothing, ids, 1.0, entropy=False)
    return loss.of_tokens(top[None], tail[None], teacher_top[None], teacher_tail[None])[0]


def pair(seed: int, vocabulary: int, tokens: int = 5, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    student, teacher = scale * torch.randn(2, tokens, vocabulary, generator=draw)
    return student.requires_grad_(), teacher


@given(
    divergence=st.sampled_from(LOSSES),
    beta=st.sampled_from([0.1, 0.5, 0.9]),
    vocabulary=st.integers(2, 50),
    k=st.integers(1, 50),
    seed=st.integers(0, 999),
)
def test_a_divergence_lies_between_zero_and_that_of_the_vocabulary(
    divergence: Divergence, beta: float, vocabulary: int, k: int, seed: int
) -> None:
    k = min(k, vocabulary)
    student, teacher = pair(seed, vocabulary)
    loss = Distillation(divergence=divergence, beta=beta)
    found = over_top(loss, student, teacher, k).double()
    whole = full(divergence, student.double().log_softmax(-1), teacher.double().log_softmax(-1), beta)
    assert (found > -1e-6).all() and (found <= whole + 1e-5).all(), (found, whole)
    same = over_top(loss, teacher.clone().requires_grad_(), teacher, k)
    assert same.abs().max() < 1e-6, "equal distributions do not diverge"
    (gradient,) = torch.autograd.grad(
        over_top(loss, probe := teacher.clone().requires_grad_(), teacher, k).sum(), probe
    )
    assert gradient.abs().max() < 1e-5, "and nothing moves them"


@given(
    divergence=st.sampled_from(LOSSES),
    beta=st.sampled_from([0.1, 0.5, 0.9]),
    vocabulary=st.integers(2, 50),
    seed=st.integers(0, 999),
)
def test_with_all_tokens_value_and_gradient_are_those_of_the_vocabulary(
    divergence: Divergence, beta: float, vocabulary: int, seed: int
) -> None:
    student, teacher = pair(seed, vocabulary)
    found = over_top(Distillation(divergence=divergence, beta=beta), student, teacher, vocabulary)
    whole = full(divergence, student.double().log_softmax(-1), teacher.double().log_softmax(-1), beta)
    torch.testing.assert_close(found.double(), whole, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(value.sum(), student)[0] for value in (found, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("divergence", LOSSES)
@pytest.mark.parametrize("k", [1, 4, 12])
def test_the_gradient_is_that_of_finite_differences(divergence: Divergence, k: int) -> None:
    student, teacher = pair(3, vocabulary=12, tokens=2, scale=1.0)
    loss, step = Distillation(divergence=divergence), 1e-2
    (gradient,) = torch.autograd.grad(over_top(loss, student, teacher, k).sum(), student)
    for token, entry in np.ndindex(*student.shape):
        moved = [student.detach().clone() for _ in range(2)]
        moved[0][token, entry] += step
        moved[1][token, entry] -= step
        up, down = (float(over_top(loss, logits, teacher, k).double().sum()) for logits in moved)
        assert gradient[token, entry] == pytest.approx((up - down) / (2 * step), abs=2e-4)


def test_the_limits_of_jsd_are_the_two_kl_divergences() -> None:
    student, teacher = (logits.detach().double().log_softmax(-1) for logits in pair(0, vocabulary=20))
    nothing, tiny = torch.full((1, len(student)), -100.0, dtype=torch.float64), 1e-6
    for beta, limit in ((tiny, "forward_kl"), (1 - tiny, "reverse_kl")):
        loss = Distillation(divergence="jsd", beta=beta)
        found = loss.of_tokens(student[None], nothing, teacher[None], nothing)[0] / tiny
        torch.testing.assert_close(found, full(limit, student, teacher), rtol=1e-3, atol=1e-3)


def test_a_tokens_divergence_may_be_clamped() -> None:
    student, teacher = pair(1, vocabulary=20, tokens=40)
    plain = over_top(Distillation(divergence="forward_kl"), student, teacher, 8)
    clamped = over_top(Distillation(divergence="forward_kl", clamp=2.0), student, teacher, 8)
    assert plain.max() > 2 > plain.min()
    assert torch.equal(clamped, plain.clamp(max=2.0))


@pytest.mark.parametrize("divergence", LOSSES)
def test_64_tokens_of_a_peaked_teacher_have_the_gradient_of_the_vocabulary(divergence: Divergence) -> None:
    """Within 1 %, if the student looks for the answer where the teacher does."""
    draw = torch.Generator().manual_seed(0)
    teacher = 3 * torch.randn(32, 50_000, generator=draw)
    teacher.scatter_add_(-1, torch.randint(50_000, (32, 48), generator=draw), torch.full((32, 48), 16.0))
    student = (teacher + 0.5 * torch.randn(teacher.shape, generator=draw)).requires_grad_()
    assert teacher.softmax(-1).topk(64).values.sum(-1).mean() > 0.99, "it is peaked"
    found = over_top(Distillation(divergence=divergence), student, teacher, 64).sum()
    whole = full(divergence, student.double().log_softmax(-1), teacher.double().log_softmax(-1)).sum()
    gradient, expected = (torch.autograd.grad(value, student)[0] for value in (found, whole))
    assert (gradient - expected).norm() < 0.01 * expected.norm()
    few = over_top(Distillation(divergence=divergence), student, teacher, 4).sum()
    (of_few,) = torch.autograd.grad(few, student)
    assert (of_few - expected).norm() > 0.05 * expected.norm(), "four tokens are too few"


@pytest.mark.parametrize("scale", [1.0, 4.0, 20.0])
@pytest.mark.parametrize("k", [1, 8, 40])
def test_the_rest_of_a_served_teacher_is_that_of_a_teacher_here(scale: float, k: int) -> None:
    """As far as log-probs in float32 tell it: what is left below their rounding is not known."""
    _, teacher = pair(0, vocabulary=40, tokens=30, scale=scale)
    drawn = torch.arange(30)
    own, _, top, tail = log_probs_of_top(teacher * 1.0, drawn, ids := teacher.topk(k).indices, 1.0, entropy=False)
    assert top is not None and tail is not None
    found = tail_of(TopTokens(own.numpy(), ids.int().numpy(), top.numpy()), drawn.tolist(), 40)
    known = tail > np.log(ROUNDING)
    np.testing.assert_allclose(np.exp(found), tail.exp().numpy(), atol=2 * ROUNDING)
    np.testing.assert_allclose(found[known], tail[known].numpy(), atol=1.0)
    assert k < 40 or (found == NO_MASS).all(), "there is no rest"
    is_other = (ids != drawn[:, None]).all(-1)
    assert (found[is_other] >= own[is_other].numpy() - 1e-4).all(), "the drawn token is a part of the rest"
