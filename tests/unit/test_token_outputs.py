"""Log-probs of models whose head does more than a matrix product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.distributed import ranks
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.sequence_parallel import Team
from ratchet.rlhf.models.token_outputs import TokenOutputs
from ratchet.rlhf.train import micro_batches
from ratchet.rlhf.train.micro_batches import Layout, MicroBatch
from tests.largest import Largest

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def model(kind: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL, **options)
    attention = "eager" if kind == "gemma2" else "sdpa"  # transformers 5.24 has no sdpa for it
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("gpt2", {"n_embd": 16, "n_head": 2, "n_layer": 1}),
        ("gemma2", {"final_logit_softcapping": 0.05}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.0625}),
    ],
)
def test_log_probs_are_those_of_the_models_own_logits(kind: str, options: dict[str, Any]) -> None:
    loaded = model(kind, **options)
    ids = torch.tensor([[3, 7, 11, 2, 40]])
    with torch.no_grad():
        logits = loaded(input_ids=ids).logits[0, 1:4]
        found = TokenOutputs(loaded, "policy")(ids, None, torch.tensor([1, 2, 3]), ids[0, 2:], 1.0, ("log_probs",))
    expected = logits.log_softmax(-1).gather(-1, ids[0, 2:, None])[:, 0]
    torch.testing.assert_close(found["log_probs"], expected, rtol=0, atol=1e-6)


class TwiceTheLogits(LlamaForCausalLM):
    def forward(self, *args: Any, **options: Any) -> Any:
        outputs = super().forward(*args, **options)
        outputs.logits = outputs.logits * 2
        return outputs


def test_a_head_that_does_something_unknown_is_refused() -> None:
    with pytest.raises(UserError, match="TwiceTheLogits changes the logits"):
        TokenOutputs(TwiceTheLogits(model("llama").config), "policy")


@pytest.mark.parametrize(("kind", "fits"), [("llama", True), ("bloom", False)])
def test_a_model_that_does_not_tell_packed_sequences_apart_is_refused(kind: str, fits: bool) -> None:
    loaded = (
        model(kind)
        if fits
        else AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
        ).eval()
    )
    if fits:
        TokenOutputs(loaded, "policy", packing=True)
    else:
        with pytest.raises(UserError, match="BloomForCausalLM does not tell packed sequences apart"):
            TokenOutputs(loaded, "policy", packing=True)


def test_packed_sequences_are_told_apart_by_what_describes_them() -> None:
    """OPT counts positions from its mask unless it is given them: packed sequences are as long as padded ones."""
    config = OPTConfig(
        vocab_size=50,
        hidden_size=16,
        ffn_dim=32,
        word_embed_proj_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        init_std=0.3,
        dropout=0.0,
    )
    torch.manual_seed(0)
    loaded = OPTForCausalLM(config).eval()
    rows = {"prompt_ids": [[3, 4, 5], [6, 7], [8, 9, 10, 11]], "response_ids": [[12, 13, 14], [15, 16, 17], [19, 20]]}
    batch = TrajectoryBatch.of(rows)
    outputs = TokenOutputs(loaded, "policy", packing=True, share_prompts=True)

    def log_probs(layout: Layout) -> torch.Tensor:
        micro = MicroBatch.of(batch, range(3), layout)
        given = (micro.input_ids, micro.position_ids, micro.at, micro.targets, 1.0, ("log_probs",), micro.shared)
        with torch.no_grad():
            return outputs(*given)["log_probs"]

    torch.testing.assert_close(log_probs("packed"), log_probs("padded"), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "has_team", "lengths"),
    [
        ("packed", False, [(100, 500), (3, 1), (50, 900), (7, 200)]),
        ("packed", True, [(100, 500), (3, 1), (50, 900), (7, 200)]),
        ("shared", False, [(100, 1500)]),
    ],
)
def test_no_mask_has_all_positions(
    layout: Layout, has_team: bool, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a row of 131,072 tokens it would take 16 GiB. Here masks of 131,072 elements are large."""
    monkeypatch.setattr(micro_batches, "MASKED", 2**10)
    monkeypatch.setattr("ratchet.rlhf.models.segments.MASK_ELEMENTS", 2**17)
    loaded, random = model("llama"), np.random.default_rng(0)
    draws = [[random.integers(3, 50, size).tolist() for size in pair] for pair in lengths]
    columns = {"prompt_ids": [prompt for prompt, _ in draws], "response_ids": [response for _, response in draws]}
    micro = MicroBatch.of(TrajectoryBatch.of(columns), range(len(lengths)), layout)
    arguments = (micro.input_ids, micro.position_ids, micro.at, micro.targets, 1.0, ("log_probs",), micro.shared)
    alone = [MicroBatch.of(TrajectoryBatch.of(columns), [row]) for row in range(len(lengths))]
    expected = torch.cat(
        [
            TokenOutputs(loaded, "policy")(one.input_ids, None, one.at, one.targets, 1.0, ("log_probs",))["log_probs"]
            for one in alone
        ]
    )
    gradients = torch.autograd.grad(expected.sum(), list(loaded.parameters()))
    if has_team:
        ranks.initialized()
    module = TokenOutputs(loaded, "policy", team=Team.of(1) if has_team else None, packing=True, share_prompts=True)
    with Largest() as largest:
        found = module(*arguments)["log_probs"]
        actual = torch.autograd.grad(found.sum(), list(loaded.parameters()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for gradient, other in zip(actual, gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)
    tokens = micro.input_ids.numel()
    assert largest.elements <= 128 * tokens < tokens**2 // 8
