"""Every element of a model has one place in Megatron, in every layout; see also tests/contract/test_layouts.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ratchet.infra.execution.preflight.inputs import check_inputs
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.hub_layout import hub_layout
from ratchet.rlhf.models.megatron_layout import Place, local_layout, parts_between, refusal
from ratchet.rlhf.weights.stored_state import Held
from tests import tiny
from tests.extras import needs
from tests.largest import Largest
from tests.ranks import in_another_process, only_rank

SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MIXTURE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def saved(name: str, folder: Path) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A model, and its parameters of what `save_pretrained` wrote."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: PreTrainedModel = {
            "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
            "tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
            "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
            "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
            "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **MIXTURE)),
            "some experts": lambda: Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**SHAPE, **MIXTURE | {"norm_topk_prob": False}, mlp_only_layers=[1])
            ),
        }[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases, which begin as ones and zeros
                    parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model, parameters_in(folder, model)


def parameters_in(folder: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The parameters of a model that a folder has."""
    files = load_file(folder / "model.safetensors")
    layout = hub_layout(model)
    return {
        name: torch.cat([files[tensor.name].flatten() for tensor in layout[name]]).view(parameter.shape)
        for name, parameter in model.named_parameters()
    }


def places(tensors: int, stages: int) -> Iterator[Place]:
    """Of ranks that share matrices, which share experts, too."""
    return (
        Place(tensor, tensors, stage, stages, expert=tensor, experts=tensors)
        for tensor in range(tensors)
        for stage in range(stages)
    )


NAMES = ["llama", "tied", "qwen2", "qwen3", "qwen3_moe", "some experts"]


@pytest.mark.parametrize(("tensors", "stages"), [(1, 1), (2, 1), (4, 2), (1, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_together_hold_each_element_once(name: str, tensors: int, stages: int, tmp_path: Path) -> None:
    """Cut at any element, as the distributed optimizer cuts: what was read is written back."""
    model, stored = saved(name, tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    written = {name: torch.full((tensor.numel(),), torch.nan) for name, tensor in stored.items()}
    for place in places(tensors, stages):
        for blocks in local_layout(model.config, shapes, place).values():
            local = torch.full((blocks[-1].end,), torch.nan)
            cuts = sorted({0, len(local) // 3, len(local) // 2 + 1, len(local)})
            for first, last in pairwise(cuts):
                for block, part in parts_between(local[first:last], first, blocks):
                    part.fill(Held(stored[block.hub]))
                    if block.is_first:
                        at = part.starts[:, None] + torch.arange(part.values.shape[1])
                        assert written[block.hub][at].isnan().all(), "two ranks tell of the same element"
                        written[block.hub][at] = part.values
            assert not local.isnan().any(), "every element of a parameter is read"
    for name, tensor in stored.items():
        assert torch.equal(written[name].view(tensor.shape), tensor)


@pytest.mark.parametrize("name", NAMES)
def test_transformer_engine_changes_names_alone(name: str, tmp_path: Path) -> None:
    model, stored = saved(name, tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    plain, fused = (local_layout(model.config, shapes, Place(), fused=fused) for fused in (False, True))
    assert list(plain.values()) == list(fused.values())
    has_experts = {layer for layer in range(4) if f"model.layers.{layer}.mlp.gate.weight" in shapes}
    for layer in range(4):
        prefix = f"decoder.layers.{layer}."
        assert prefix + "self_attention.linear_qkv.layer_norm_weight" in fused
        if layer in has_experts:
            assert {prefix + f"mlp.experts.linear_fc{number}.weight3" for number in (1, 2)} <= fused.keys()
            assert prefix + "pre_mlp_layernorm.weight" in fused
        else:
            assert prefix + "mlp.linear_fc1.layer_norm_weight" in fused
    assert fused.keys() - plain.keys() == {
        key for key in fused if "layer_norm_weight" in key or "experts.linear" in key
    }


def logits_of(folder: Path, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Size]]:
    """Logits of Megatron's own model, whose parameters were read from the files by the table."""
    from tests import megatron_on_cpu

    with megatron_on_cpu.installed():
        from ratchet.rlhf.models.megatron_model import decoder
        from ratchet.rlhf.train.megatron_groups import Layout, MegatronGroups

        MegatronGroups.of(Layout())
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        stored = parameters_in(folder, model)
        built = decoder(model, "policy", Place(), torch.float32, torch.device("cpu"), recompute=False).eval()
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        local = dict(built.named_parameters())
        layout = local_layout(model.config, shapes, Place())
        assert layout.keys() == local.keys()
        with torch.no_grad():
            for name, blocks in layout.items():
                for block, part in parts_between(local[name].data.view(-1), 0, blocks):
                    part.fill(Held(stored[block.hub]))
            logits = built.logits(built.hidden(ids).transpose(0, 1).flatten(0, 1))
        dist.destroy_process_group()
    return logits.view(*ids.shape, -1).clone(), {name: parameter.shape for name, parameter in local.items()}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In float32: some hundred roundings of 6e-8 on values up to ten, as in tests/contract."""
    model, _ = saved(name, tmp_path)
    ids = torch.randint(0, 48, (3, 40), generator=torch.Generator().manual_seed(2))
    logits, shapes = in_another_process(logits_of, tmp_path, ids)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-4)
    whole = local_layout(model.config, {n: tuple(p.shape) for n, p in model.named_parameters()}, Place())
    assert {n: prod(shape) for n, shape in shapes.items()} == {n: blocks[-1].end for n, blocks in whole.items()}


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match=r"no place for the model's model.layers.0.self_attn.o_proj.bias: use engine"):
        local_layout(model.config, shapes, Place())


@pytest.mark.parametrize(
    ("changes", "place", "reason"),
    [
        ({}, Place(tensors=8), "tensor_parallel is 8, which does not divide the model's num_key_value_heads 4"),
        ({"vocab_size": 49}, Place(tensors=2), "which does not divide the model's vocab_size 49"),
        ({}, Place(stages=3), "pipeline_parallel is 3, which does not divide the model's num_hidden_layers 4"),
        ({"hidden_act": "gelu"}, Place(), "hidden_act gelu: not supported yet by engine megatron, use engine fsdp"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            Place(),
            "rope_type yarn: not supported yet",
        ),
        ({"attention_bias": True}, Place(), "attention_bias: not supported yet by engine megatron, use engine fsdp"),
        ({"mlp_bias": True}, Place(), "mlp_bias: not supported yet by engine megatron, use engine fsdp"),
        ({"model_type": "mixtral"}, Place(), "mixtral is not supported yet by engine megatron"),
        ({}, Place(experts=2), "expert_parallel is 2, but llama has no experts: remove it"),
        ({"num_experts": 3}, Place(experts=2), "expert_parallel is 2, which does not divide the model's num_experts 3"),
        ({"num_experts": 4, "output_router_logits": True}, Place(), "the router's auxiliary loss"),
        (
            {"num_experts": 4, "mlp_only_layers": [1]},
            Place(stages=2),
            "layers with and without experts in a pipeline: not",
        ),
    ],
)
def test_what_megatron_cannot_do_is_refused(changes: dict[str, Any], place: Place, reason: str) -> None:
    config = LlamaConfig(**SHAPE | changes)
    if "model_type" in changes:
        config.model_type = changes["model_type"]
    found = refusal(config, place)
    assert found is not None and reason in found
    assert refusal(LlamaConfig(**SHAPE), Place(tensors=4, stages=2)) is None


@needs("megatron")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_without_a_gpu_is_refused_at_once(tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    with pytest.raises(UserError, match=r"^actor.engine megatron needs a GPU.* set actor.engine to fsdp"):
        check_inputs(tiny.config(tmp_path, actor__engine="megatron"))
    check_inputs(tiny.config(tmp_path, actor__engine="fsdp"))


def test_a_model_that_cannot_be_split_is_refused_before_a_start(tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    config = tiny.config(
        tmp_path, actor__engine="megatron", actor__engine__pipeline_parallel=3, pools={"train": {"workers": 3}}
    )
    says = "^actor.engine megatron cannot compute the actor: pipeline_parallel is 3, which does not divide the model's"
    with pytest.raises(UserError, match=says):
        check_inputs(config)


def largest_of_shared_sequences(time: int) -> int:
    """Elements of the largest tensor that attention creates for a rank that has half of a sequence."""
    from tests import megatron_on_cpu

    with only_rank(0, 2), megatron_on_cpu.installed(), pytest.MonkeyPatch.context() as patch:
        from megatron.core.transformer import TransformerConfig

        from ratchet.rlhf.models.megatron_model import Attention
        from ratchet.rlhf.train.megatron_groups import Layout, MegatronGroups

        patch.setattr("ratchet.rlhf.models.segments.MASK_ELEMENTS", 2**16)
        MegatronGroups.of(Layout(context=2))
        config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, context_parallel_size=2)
        heads = [torch.zeros((time // 2, 1, 2, 8), requires_grad=True) for _ in range(3)]
        with Largest() as largest:
            Attention(config)(*heads).sum().backward()
        return largest.elements


@needs("megatron")
def test_ranks_that_share_sequences_build_no_mask_of_them() -> None:
    """Of 131,072 tokens it would take 8 GiB on each of two ranks. Here masks of 65,536 elements are large."""
    assert in_another_process(largest_of_shared_sequences, 2048) <= 2**16
