"""The hub's names and shapes are those that transformers writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.core_model_loading import revert_weight_conversion

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.hub_layout import HubTensor, hub_layout, split

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 3},
    "qwen2_moe": {"num_experts": 12, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 6},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 10, "head_dim": 8, "mlp_only_layers": [1]},
}


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModelForTokenClassification])
@pytest.mark.parametrize("kind", EXPERTS)
def test_a_parameter_is_its_hub_tensors_one_after_the_other(kind: str, auto: Any) -> None:
    config = AutoConfig.for_model(kind, **SHAPE | EXPERTS[kind])
    model = auto.from_config(config)
    layout = hub_layout(model)
    parameters = dict(model.named_parameters())
    assert layout.keys() == parameters.keys()
    found = {name: part for key, hub in layout.items() for name, part in split(parameters[key].detach(), hub)}
    expected = revert_weight_conversion(model, {name: tensor.detach() for name, tensor in parameters.items()})
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with torch.device("meta"):
        assert hub_layout(auto.from_config(config)) == layout, "no weights are needed"


def test_experts_of_a_large_model_are_described_without_its_weights() -> None:
    with torch.device("meta"):  # the shapes of Qwen3-30B-A3B
        config = AutoConfig.for_model(
            "qwen3_moe", num_hidden_layers=1, num_experts=128, hidden_size=2048, moe_intermediate_size=768
        )
        layout = hub_layout(AutoModelForCausalLM.from_config(config))
    experts = layout["model.layers.0.mlp.experts.gate_up_proj"]
    assert len(experts) == 256
    assert experts[21] == HubTensor("model.layers.0.mlp.experts.10.up_proj.weight", (768, 2048))
    assert layout["model.layers.0.mlp.experts.down_proj"][127] == HubTensor(
        "model.layers.0.mlp.experts.127.down_proj.weight", (2048, 768)
    )


def test_what_cannot_be_written_by_parts_is_refused() -> None:
    """The files of HRM hold one matrix for a gate, queries, keys and values."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("hrm_text"))
    with pytest.raises(UserError, match=r"HrmTextForCausalLM: its files on the hub hold .* cannot be written by parts"):
        hub_layout(model)
