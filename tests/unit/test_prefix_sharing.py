"""Attention over shared prompts is that over whole sequences, forwards and backwards.

Everything is float64, where a rounding is 1e-16: 1e-10 leaves room for sums of a few hundred terms, and for nothing
else.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, GraniteConfig, GraniteForCausalLM

from ratchet.infra.execution.preflight.inputs import check_inputs
from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models import prefix_sharing, segments
from ratchet.rlhf.models.kv_cache import CachedPrompts, in_place
from ratchet.rlhf.models.loading import load_actor
from ratchet.rlhf.models.prefix_sharing import SharedPrompts
from ratchet.rlhf.models.segments import Segments
from tests import tiny
from tests.padded import properties
from tests.tiny import model_folder

HEADS, DIM = 4, 8
Group = tuple[int, list[int]]
GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 20), min_size=1, max_size=5)), max_size=5)


def row_of(
    groups: list[Group], kind: type[SharedPrompts] | type[Segments] = SharedPrompts
) -> tuple[SharedPrompts | Segments, list[list[int]]]:
    """The layout of prompts with the given lengths of responses, and each sequence's indices in the row."""
    prompts = np.array([prompt for prompt, _ in groups])
    responses = np.array([length for _, lengths in groups for length in lengths])
    prompt_of = np.repeat(np.arange(len(groups)), [len(lengths) for _, lengths in groups])
    ends, response_ends = np.cumsum(prompts), prompts.sum() + np.cumsum(responses)
    sequences = [
        [
            *range(ends[prompt] - prompts[prompt], ends[prompt]),
            *range(response_ends[number] - responses[number], response_ends[number]),
        ]
        for number, prompt in enumerate(prompt_of)
    ]
    return kind.of(prompts, responses, prompt_of), sequences


@properties
@given(
    GROUPS.filter(bool),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([SharedPrompts, Segments]),
    st.sampled_from([1, 64, 2**24]),
    st.integers(0, 1000),
)
def test_attention_is_that_over_whole_sequences(
    groups: list[Group], key_heads: int, kind: type[SharedPrompts] | type[Segments], mask_elements: int, seed: int
) -> None:
    """However small the masks are that pieces of it may have."""
    shared, sequences = row_of(groups, kind)
    tokens = sum(prompt + sum(responses) for prompt, responses in groups)
    random = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn((1, heads, tokens, DIM), generator=random, dtype=torch.float64, requires_grad=True)

    query, key, value = inputs = (draw(HEADS), draw(key_heads), draw(key_heads))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MASK_ELEMENTS", mask_elements)
        attended, _ = prefix_sharing._attention(torch.nn.Module(), query, key, value, None, shared=shared, scaling=0.3)
    assert attended.shape == (1, tokens, HEADS, DIM)
    weights = torch.randn(attended.shape, generator=random, dtype=torch.float64)
    expected_sum = torch.zeros((), dtype=torch.float64)
    seen: set[int] = set()
    for sequence in sequences:
        whole = scaled_dot_product_attention(
            *(heads[:, :, sequence] for heads in inputs), is_causal=True, scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        torch.testing.assert_close(attended[:, sequence], whole, rtol=0, atol=1e-10)
        new = [place for place, token in enumerate(sequence) if token not in seen]  # a prompt's tokens count once
        expected_sum = expected_sum + (whole[:, new] * weights[:, [sequence[place] for place in new]]).sum()
        seen.update(sequence)
    actual = torch.autograd.grad((attended * weights).sum(), inputs)
    for gradient, expected in zip(actual, torch.autograd.grad(expected_sum, inputs), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [32_768, 65_536])
def test_a_mask_of_a_long_row_is_refused_before_a_start(tmp_path: Path, size: int) -> None:
    """Of a model that attends within a window."""
    tiny.workspace(tmp_path)
    config = tiny.config(tmp_path, actor__packing=True, actor__micro_batch_tokens=size)
    check_inputs(config)
    path = Path(config.model.path) / "config.json"
    window = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    window |= {"model_type": "qwen2", "use_sliding_window": True}  # Llama knows no windows
    path.write_text(json.dumps(json.loads(path.read_text()) | window))
    with pytest.raises(UserError, match=MASKED) if size > 32_768 else nullcontext():
        check_inputs(config)


MASKED = (
    r"^actor.packing true makes rows of actor.micro_batch_tokens = 65536 tokens, for which the layers of "
    r"the actor and the reference need a mask of 65536 x 65536 positions: lower actor.micro_batch_tokens to 32768, "
    r"or set actor.packing false"
)


@properties
@given(GROUPS.filter(bool))
def test_padding_at_most_doubles_a_length(groups: list[Group]) -> None:
    """So a long response does not make attention compute, and mask, as much for the short ones."""
    shared, _ = row_of(groups)
    assert isinstance(shared, SharedPrompts)
    for block in shared.blocks:
        real = [len(set(indices.tolist()) - {0}) for indices in block.queries]
        assert all(2 * (length + 1) >= block.queries.shape[1] for length in real)
        if block.visible is None:
            continue
        before = block.visible[:, 0, 0, : block.keys.shape[1] - block.queries.shape[1]].sum(1)
        assert all(2 * int(length) >= block.keys.shape[1] - block.queries.shape[1] for length in before)


def test_a_model_without_shared_prompts_is_unchanged(tmp_path: Path) -> None:
    """A rollout engine may use the same model, with a cache and with padding."""
    model = load_actor(ModelConfig(path=str(model_folder(tmp_path))))
    ids = torch.arange(3, 15).view(2, 6)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        before = [model(ids).logits, model(ids, attention_mask=padding).logits[padding.bool()]]
        assert prefix_sharing.adopt(model)
        assert torch.equal(model(ids).logits, before[0])
        assert torch.equal(model(ids, attention_mask=padding).logits[padding.bool()], before[1])
        generated = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert generated.shape == (2, 14)


def test_a_model_without_shared_prompts_keeps_its_scale() -> None:
    """Granite's is not that of its heads."""
    config = GraniteConfig(
        vocab_size=78,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_multiplier=3.0,
        initializer_range=0.3,
    )
    model = GraniteForCausalLM(config).eval()
    ids = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        before = model(ids).logits
        assert prefix_sharing.adopt(model)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_another_attention_stays(tmp_path: Path, attention: str) -> None:
    model = load_actor(ModelConfig(path=str(model_folder(tmp_path))))
    model.set_attn_implementation(attention)
    assert not prefix_sharing.adopt(model)
    assert model.config._attn_implementation == attention


def test_a_model_that_reads_more_than_its_attention_is_refused(tmp_path: Path) -> None:
    """Here each token's embedding is added to that of the token before, in the row."""
    model = load_actor(ModelConfig(path=str(model_folder(tmp_path))))

    def mixed(module: torch.nn.Module, inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings + embeddings.roll(1, dims=1)

    model.get_input_embeddings().register_forward_hook(mixed)
    assert not prefix_sharing.adopt(model)


@pytest.mark.parametrize(
    ("changes", "supported"),
    [({}, True), ({"sliding_window": 8}, False), ({"layer_types": ["full_attention", "sliding_attention"]}, False)],
)
def test_only_full_attention_shares_prompts(tmp_path: Path, changes: dict[str, object], supported: bool) -> None:
    model = load_actor(ModelConfig(path=str(model_folder(tmp_path))))
    for name, value in changes.items():
        setattr(model.config, name, value)
    assert prefix_sharing.adopt(model) == supported


@properties
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
    st.randoms(use_true_random=False),
)
def test_a_new_token_attends_to_its_prompt_and_to_its_response(
    groups: list[tuple[int, int]], time: int, key_heads: int, random: Random
) -> None:
    """Also after some responses have ended, whatever the order of the rows."""
    generator = torch.Generator().manual_seed(random.randrange(1000))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    longest = max(length for length, _ in groups)
    cache = DynamicCache()
    cache.update(draw(len(groups), key_heads, longest, DIM), draw(len(groups), key_heads, longest, DIM), 0)
    visible = torch.tensor([[place >= longest - length for place in range(longest)] for length, _ in groups])
    prompt_of = [prompt for prompt, (_, n) in enumerate(groups) for _ in range(n)]
    random.shuffle(prompt_of)
    prompts = CachedPrompts.of(cache, None if visible.all() else visible, torch.tensor(prompt_of))
    rows = list(range(len(prompt_of)))
    for _ in range(2):
        query, key, value = draw(len(rows), HEADS, 1, DIM), *(draw(len(rows), key_heads, time, DIM) for _ in range(2))
        attended = prompts.attend(0, query, key, value, 0.3)
        for number, row in enumerate(rows):
            prompt = prompt_of[row]
            own = visible[prompt]
            keys, values = (
                torch.cat([whole[prompt][:, own], part[number]], dim=1)[None]
                for whole, part in ((cache.layers[0].keys, key), (cache.layers[0].values, value))
            )
            expected = scaled_dot_product_attention(query[number][None], keys, values, scale=0.3, enable_gqa=True)
            torch.testing.assert_close(attended[number], expected[0].transpose(0, 1), rtol=0, atol=1e-10)
        kept = sorted(random.sample(range(len(rows)), random.randint(1, len(rows))))
        prompts, rows = prompts.only(torch.tensor(kept)), [rows[number] for number in kept]


@properties
@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_cache_in_place_holds_what_it_was_given(news: list[int], random: Random) -> None:
    cache, expected = in_place(1), torch.zeros((5, 2, 0, 3))
    generator = torch.Generator().manual_seed(random.randrange(1000))
    for new in news:
        tokens = torch.randn((len(expected), 2, new, 3), generator=generator)
        keys, values = cache.update(tokens, -tokens, 0)
        expected = torch.cat([expected, tokens], dim=2)
        assert torch.equal(keys, expected)
        assert torch.equal(values, -expected)
        assert cache.get_seq_length() == expected.shape[2]
        if len(expected) > 1 and random.random() < 0.5:
            kept = torch.tensor(sorted(random.sample(range(len(expected)), len(expected) - 1)))
            cache.batch_select_indices(kept)
            expected = expected[kept]
