"""Log-probs and entropy of logits, and the gradient that takes over the memory of the logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.rlhf.models import token_outputs
from ratchet.rlhf.models.token_outputs import (
    NO_MASS,
    log_probs_and_entropy,
    log_probs_of_top,
    most_likely,
    sum_pi_squared,
)


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """By torch's own functions."""
    log_pi = (logits.double() / temperature).log_softmax(-1)
    return log_pi.gather(-1, targets[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)


@given(
    tokens=st.integers(0, 9),
    vocabulary=st.integers(1, 40),
    temperature=st.sampled_from([1.0, 0.5, 1.7]),
    entropy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_plain_functions(
    tokens: int, vocabulary: int, temperature: float, entropy: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    leaf = (2 * torch.randn(tokens, vocabulary, generator=draw)).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    weights = torch.randn(2, tokens, generator=draw)
    expected = plain(leaf, targets, temperature)
    (expected_gradient,) = torch.autograd.grad(
        (weights[0] * expected[0]).sum() + (weights[1] * expected[1]).sum() * entropy, leaf
    )

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(token_outputs.BLOCK_BYTES, "cpu", 2 * 4 * vocabulary)  # two tokens at a time
        log_probs, entropies = log_probs_and_entropy(leaf * 1.0, targets, temperature, entropy=entropy)
        loss = (weights[0] * log_probs).sum()
        if entropy:
            assert entropies is not None
            # a difference of terms of up to 20, which float32 rounds to 1e-6
            torch.testing.assert_close(entropies.double(), expected[1], rtol=1e-5, atol=2e-5)
            loss = loss + (weights[1] * entropies).sum()
        else:
            assert entropies is None
        torch.testing.assert_close(log_probs.double(), expected[0], rtol=1e-5, atol=1e-5)
        (gradient,) = torch.autograd.grad(loss, leaf)
    # as much, times weights of up to 3, divided by the temperature
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=5e-5)


@given(tokens=st.integers(0, 9), vocabulary=st.integers(1, 40), temperature=st.sampled_from([1.0, 0.5, 1.7]))
def test_squared_probabilities_are_those_of_plain_functions(tokens: int, vocabulary: int, temperature: float) -> None:
    logits = 9 * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(tokens))
    expected = (logits.double() / temperature).softmax(-1).square().sum(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(token_outputs.BLOCK_BYTES, "cpu", 2 * 4 * vocabulary)  # two tokens at a time
        found = sum_pi_squared(logits, temperature)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_needs_no_memory_of_its_own() -> None:
    leaf = torch.randn(6, 5, requires_grad=True)
    logits = leaf * 1.0
    log_probs, _ = log_probs_and_entropy(logits, torch.zeros(6, dtype=torch.long), 1.0, entropy=False)
    log_probs.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(logits.detach(), leaf.grad)  # leaf * 1.0 has the same gradient


def test_logits_that_another_gradient_needs_are_not_lost_silently() -> None:
    leaf = torch.randn(3, 5, requires_grad=True)
    logits = leaf.exp()  # its backward pass reads its own output
    log_probs, _ = log_probs_and_entropy(logits, torch.zeros(3, dtype=torch.long), 1.0, entropy=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


@pytest.mark.parametrize("entropy", [False, True])
def test_bfloat16_logits_get_rounded_gradients(entropy: bool) -> None:
    leaf = (2 * torch.randn(8, 30, generator=torch.Generator().manual_seed(0))).bfloat16().requires_grad_()
    targets = torch.arange(8)
    values = plain(leaf, targets, 0.8)
    (expected,) = torch.autograd.grad(values[0].sum() + entropy * values[1].sum(), leaf)
    log_probs, entropies = log_probs_and_entropy(leaf * 1.0, targets, 0.8, entropy=entropy)
    assert log_probs.dtype == torch.float32
    loss = log_probs.sum() if entropies is None else log_probs.sum() + entropies.sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=2**-8)  # bfloat16 has 8 bits


@given(
    tokens=st.integers(1, 7),
    vocabulary=st.integers(2, 40),
    k=st.integers(1, 40),
    temperature=st.sampled_from([1.0, 0.5, 1.7]),
    entropy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_log_probs_of_the_most_likely_tokens_and_of_the_rest(
    tokens: int, vocabulary: int, k: int, temperature: float, entropy: bool, seed: int
) -> None:
    k = min(k, vocabulary)
    draw = torch.Generator().manual_seed(seed)
    leaf = (2 * torch.randn(tokens, vocabulary, generator=draw)).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    ids = torch.stack([torch.randperm(vocabulary, generator=draw)[:k] for _ in range(tokens)])
    weights, of_top = torch.randn(3, tokens, generator=draw), torch.randn(tokens, k, generator=draw)
    log_pi = (leaf.double() / temperature).log_softmax(-1)
    rest = log_pi.scatter(-1, ids, -torch.inf).logsumexp(-1) if k < vocabulary else torch.full((tokens,), NO_MASS)
    expected = (*plain(leaf, targets, temperature), log_pi.gather(-1, ids), rest)

    def weighted(
        drawn: torch.Tensor, spread: torch.Tensor | None, top: torch.Tensor, tail: torch.Tensor
    ) -> torch.Tensor:
        of_entropy = 0.0 if spread is None else (weights[1] * spread).sum()
        return (weights[0] * drawn).sum() + (of_top * top).sum() + (weights[2] * tail).sum() + of_entropy

    (expected_gradient,) = torch.autograd.grad(
        weighted(expected[0], expected[1] if entropy else None, *expected[2:]), leaf
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(token_outputs.BLOCK_BYTES, "cpu", 2 * 4 * vocabulary)  # two tokens at a time
        found = log_probs_of_top(leaf * 1.0, targets, ids, temperature, entropy=entropy)
        (gradient,) = torch.autograd.grad(weighted(*found), leaf)
        best = most_likely(leaf.detach(), k)
    for name, value, of_name in zip(("drawn", "entropy", "top", "rest"), found, expected, strict=True):
        if value is None:
            assert name == "entropy" and not entropy
        else:
            torch.testing.assert_close(value.double(), of_name.double(), rtol=1e-5, atol=2e-5, msg=name)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=2e-4)
    assert torch.equal(leaf.gather(-1, best), leaf.sort(-1, descending=True).values[:, :k])


def test_tokens_that_a_model_lacks_have_no_probability_and_no_gradient() -> None:
    leaf = torch.randn(2, 6, requires_grad=True, generator=torch.Generator().manual_seed(0))
    ids, known = torch.tensor([[3, 9, 0], [7, 1, 2]]), torch.tensor([[3, 0], [1, 2]])
    _, _, top, tail = log_probs_of_top(leaf * 1.0, torch.zeros(2, dtype=torch.long), ids, 1.0, entropy=False)
    assert top[0, 1] == NO_MASS and top[1, 0] == NO_MASS
    _, _, of_known, _ = log_probs_of_top(leaf * 1.0, torch.zeros(2, dtype=torch.long), known, 1.0, entropy=False)
    assert torch.equal(top[0, [0, 2]], of_known[0]) and torch.equal(top[1, [1, 2]], of_known[1])
    rest = leaf.log_softmax(-1)[0, [1, 2, 4, 5]].logsumexp(-1)
    torch.testing.assert_close(tail[0], rest)
    (gradient,) = torch.autograd.grad((7 * top[0, 1] + top[0, 0]), leaf)
    (expected,) = torch.autograd.grad(leaf.log_softmax(-1)[0, 3], leaf)
    torch.testing.assert_close(gradient, expected)
