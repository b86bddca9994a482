"""Tiny configs of the decoders that `AutoModelForCausalLM` knows, by their types in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig

VOCABULARY = 50
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "attention_hidden_size", "embedding_dim", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "dense_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("index_head_dim",), 16),
    "index_n_heads": 16,  # with 4, some scores are sums of zeros: between equal ones, topk chooses by the length
    "index_topk": 4,
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "attention_window_size"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 4),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "original_max_position_embeddings"), 128),
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "attention_chunk_size": 16,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
}
"""Values of the fields that a config has."""
OF_VLLM: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size"), 128),
    **dict.fromkeys(("head_dim", "v_head_dim"), 32),
}
"""Sizes with the smallest attention heads that vLLM computes on the CPU."""
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "youtu": {"pad_token_id": None},  # transformers sets the row of the padding to 0 in every tied one that it loads
    "zamba": {"attention_hidden_size": 64, "attn_layer_period": 3, "attn_layer_offset": 1, "num_hidden_layers": 6},
    "zamba2": {"attention_hidden_size": 64, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(kind: str, wider: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Returns the config of a tiny model of a type, with layers of all kinds.

    Args:
        wider: what differs from `SIZES`.
    """
    from transformers import AutoConfig

    usual = AutoConfig.for_model(kind)
    sizes = {**SIZES, **(wider or {})}
    sizes = {name: size for name, size in sizes.items() if name in vars(usual) or name in usual.attribute_map}
    if "kv_lora_rank" in sizes:  # latent attention has as many heads of keys as of queries
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return AutoConfig.for_model(kind, **tokens | sizes | MORE.get(kind, {}))
