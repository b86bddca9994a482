"""A skeleton is what `from_pretrained` loads, without its weights; architectures are tried on a small model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ratchet.rlhf.config import LoRAConfig, ModelConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.hf_configs import attention_of
from ratchet.rlhf.models.loading import actor_skeleton, critic_skeleton, load_actor
from ratchet.rlhf.models.truncated import truncated

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2},
    "gemma2": {},
    "gpt_neox": {},
    "bloom": {"n_layer": 2, "n_head": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> ModelConfig:
    """A model with random weights, its buffers among them."""
    config = AutoConfig.for_model(kind, **SMALL | KINDS.get(kind, {}) | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for tensor in (*model.parameters(), *(model.get_buffer(name) for name in stored_buffers(model))):
            tensor.data.normal_()
        model.to(dtype).save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype="float32")


def stored_buffers(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_buffers()} & model.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skeleton_becomes_what_transformers_loads(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved(kind, tmp_path, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a model that is loaded whole
        skeleton = actor_skeleton(model)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    loaded = skeleton.load()
    attention = attention_of(model)[0]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=attention)
    tensors = dict(expected.named_parameters()) | dict(expected.named_buffers())
    found = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert not loaded.training
    assert loaded.config.to_dict()["architectures"] == expected.config.to_dict()["architectures"]
    assert loaded.generation_config.to_dict() == expected.generation_config.to_dict()
    ids = torch.tensor([[3, 7, 11, 2]])
    with torch.no_grad():
        # sums may be in another order where tensors lie elsewhere in memory; buffers that are wrong change the logits
        torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)


def test_files_in_parts_and_names_without_a_prefix_are_read(tmp_path: Path) -> None:
    model = saved("gpt2", tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in whole.items()}  # as GPT-2 is on the hub
    (tmp_path / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    index: dict[str, str] = {}
    for number, part in enumerate((sorted(short)[::2], sorted(short)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: short[name].clone() for name in part}, tmp_path / file)
        index |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = load_actor(ModelConfig(path=str(tmp_path)))
    for name, tensor in load_actor(model).named_parameters():
        assert torch.equal(found.get_parameter(name), tensor)


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.embed_tokens.weight", "equal", "different"])
def test_tied_weights_are_tied_unless_the_files_differ(stored: str, tmp_path: Path) -> None:
    model = saved("llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if stored in (name, "equal", "different"):
            tensors[name] = embedding.clone()
    if stored == "different":
        tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_actor(model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (stored != "different")
    assert torch.equal(loaded.model.embed_tokens.weight, embedding)
    assert torch.equal(loaded.lm_head.weight, embedding + 1 if stored == "different" else embedding)


def test_what_cannot_be_read_by_range_is_loaded_whole(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    names = load_file(tmp_path / "weights.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "weights.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.warns(UserWarning, match=r"is loaded whole by every process: its files are not called model-"):
        skeleton = actor_skeleton(model)
    assert not skeleton.sources
    assert all(torch.equal(skeleton.model.get_parameter(name), tensor) for name, tensor in names.items())


def test_incomplete_and_damaged_folders_are_refused(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"is damaged: model.norm.weight has shape \(8,\) in its files, and \(16,\) by"):
        actor_skeleton(model)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks lm_head.weight: it is not a complete LlamaForCausalLM"):
        actor_skeleton(model)
    skeleton = critic_skeleton(model)
    assert torch.equal(skeleton.load().score.weight, torch.zeros(1, 16))


def test_adapters_of_a_skeleton_are_those_of_a_whole_model(tmp_path: Path) -> None:
    """They have their weights, though the base has none."""
    from ratchet.rlhf.models import lora

    settings = LoRAConfig(r=2)
    model = saved("llama", tmp_path)
    whole = load_actor(model)
    lora.add(whole, settings, 3)
    skeleton = actor_skeleton(model.model_copy(update={"lora": settings}), 3)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    trainable = {name for name, parameter in skeleton.model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
    loaded = dict(skeleton.load().named_parameters())
    assert loaded.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(loaded[name], parameter) for name, parameter in whole.named_parameters())


def small(config: Any, teams_of: int = 1) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return truncated(model, attention="sdpa", teams_of=teams_of)


@pytest.mark.slow
def test_a_large_model_is_tried_on_a_small_one() -> None:
    """70 B parameters: heads of the same size, fewer of them, in the same groups or single ones."""
    llama = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        pad_token_id=128255,
    )
    for teams_of, of_keys in ((1, 2), (4, 8), (8, 1)):
        found = small(llama, teams_of)
        assert isinstance(found, LlamaForCausalLM)
        assert sum(parameter.numel() for parameter in found.parameters()) < 10**7 * teams_of**2
        config = found.config
        assert (config.num_hidden_layers, config.head_dim, config.num_key_value_heads) == (2, 128, of_keys)
        assert config.num_attention_heads % teams_of == 0
        with torch.no_grad():
            logits = found(torch.arange(8)[None]).logits
        # a cap, or a factor, that the head has is seen at this size
        assert logits.std() > 5


def test_each_kind_of_layer_is_tried() -> None:
    config = AutoConfig.for_model("gemma3_text", **SMALL | {"num_hidden_layers": 12})
    kinds = small(config).config.layer_types
    assert sorted(kinds) == ["full_attention", "sliding_attention"]
    assert len(small(AutoConfig.for_model("llama", **SMALL | {"num_hidden_layers": 1})).model.layers) == 1
