"""Configs of real models, for engines without memory."""

from __future__ import annotations

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

MODELS: dict[str, PreTrainedConfig] = {
    "0.5 B": Qwen2Config(  # Qwen 2.5
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "0.6 B": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "1 B": LlamaConfig(  # that of `make gpu`
        vocab_size=4096, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32
    ),
    "1.2 B": LlamaConfig(  # that of benchmarks/engines.py
        vocab_size=32768, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32
    ),
    "4 B": Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "7 B": LlamaConfig(),  # Llama 2
    "8 B": LlamaConfig(  # Llama 3.1
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "30 B": Qwen3MoeConfig(  # Qwen3-30B-A3B
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "32 B": Qwen2Config(  # Qwen 2.5
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
    "70 B": LlamaConfig(  # Llama 3
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "235 B": Qwen3MoeConfig(  # Qwen3-235B-A22B
        vocab_size=151936,
        hidden_size=4096,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        norm_topk_prob=True,
    ),
}


def config_of(model: str, layers: int | None = None) -> PreTrainedConfig:
    """Returns the config of a model with so many layers, which are all alike; None: all."""
    config = MODELS[model]
    if layers is None:
        return config
    changed: PreTrainedConfig = type(config).from_dict(
        {**config.to_dict(), "num_hidden_layers": layers, "layer_types": None}
    )
    return changed
