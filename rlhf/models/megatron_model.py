"""Builds the part of a model that a rank holds in Megatron."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from rlhf.models.megatron_layout import Place


def has_transformer_engine() -> bool:
    """Whether TransformerEngine, which needs a GPU, computes the layers."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


class Decoder(GPTModel):  # type: ignore[misc]  # megatron-core has no type hints for it
    """A `GPTModel` whose last stage returns hidden states, not logits: those are computed only where they are asked
    for, and in pieces."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute this rank's part of the logits, shape (tokens, tokens of the vocabulary that the rank has)."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: Tensor = self.output_layer(hidden[:, None], weight=weight)[0]
        return logits[:, 0]


def decoder(
    model: PreTrainedModel,
    head: Literal["policy", "value", "reward"],
    place: Place,
    dtype: torch.dtype,
    device: torch.device,
    *,
    recompute: bool | Literal["selective"],
) -> Decoder:
    """Build a rank's part of a model; its weights are not those of the model yet.

    Args:
        model: the model; it may be on the meta device. Its rotary frequencies are used.
        head: `policy`: the head gives logits; otherwise a value.
        place: the rank's place.
        dtype: type of the weights and of the computation.
        device: where the weights are.
        recompute: whether the backward pass computes activations again: all, or those of attention's core.

    Returns:
        The decoder, in which nothing is random.
    """
    hf: Any = model.config.get_text_config()
    recomputing: dict[str, Any] = {}
    if recompute == "selective":
        recomputing = {"recompute_granularity": "selective"}
    elif recompute:
        recomputing = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    has_engine = has_transformer_engine()
    names = {name for name, _ in model.named_parameters()}
    has_norms = any(name.endswith("self_attn.q_norm.weight") for name in names)
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=any(name.endswith("self_attn.q_proj.bias") for name in names),
        qk_layernorm=has_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=place.tensors,
        pipeline_model_parallel_size=place.stages,
        variable_seq_lengths=place.stages > 1,  # micro-batches differ in their size
        moe_token_dispatcher_type="alltoall",  # not used, but the default contradicts the line above
        calculate_per_token_loss=True,  # gradients are sums over ranks: losses are normalized already
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=device.type == "cuda" and has_engine,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        **recomputing,
    )
    specify = get_gpt_layer_with_transformer_engine_spec if has_engine else get_gpt_layer_local_spec
    norm = {} if has_engine else {"normalization": "RMSNorm"}
    built = Decoder(
        config,
        specify(qk_layernorm=has_norms, **norm),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=place.is_first_stage,
        post_process=place.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=head == "policy" and "lm_head.weight" not in names,
        position_embedding_type="rope",
    )
    rotary: Any = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    built.rotary_pos_emb.inv_freq = rotary.inv_freq.detach().to(device, torch.float32, copy=True)
    if head != "policy" and place.is_last_stage:
        built.output_layer = torch.nn.Linear(hf.hidden_size, 1, bias="score.bias" in names)
    placed: Decoder = built.to(device, dtype)
    return placed
