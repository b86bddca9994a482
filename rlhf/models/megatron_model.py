"""Builds a rank's part of a model in Megatron."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu

from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.models.megatron_layout import Place
from ratchet.rlhf.models.routes import OWN, FollowsRoutes
from ratchet.rlhf.models.segments import Segments

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def has_transformer_engine() -> bool:
    """Returns True if TransformerEngine, which needs a GPU, computes the layers."""
    return accelerator.is_available() and find_spec("transformer_engine") is not None


class Norm(torch.nn.RMSNorm):
    """The norm without TransformerEngine; Megatron's own does not share sequences."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        # ranks add up its gradients, each rank those of its own tokens
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(torch.nn.Module):
    """Causal attention without TransformerEngine, by PyTorch's kernels, which store no scores.

    Ranks that share sequences gather the keys and values of the others (arXiv 2407.21783, section 3.3.2).
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        assert softmax_scale is None, "it is that of the head's size"
        self.contexts = config.context_parallel_size
        self.group = parallel_state.get_context_parallel_group()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Computes attention of this rank's queries, shape (time, sequences, heads, size).

        Keys and values have one head per group. The result has shape (time, sequences, heads * size).
        """
        if self.contexts > 1:
            time, sequences = query.shape[:2]
            key, value = (
                gather_from_sequence_parallel_region(of.contiguous(), group=self.group).flatten(0, 1)
                for of in (key, value)
            )
            segments = _own_segments(time, sequences, self.group.rank(), self.contexts, query.device)
            attended: Tensor = segments.attend(query.transpose(0, 1).flatten(0, 1), key, value, None)
            return attended.reshape(sequences, time, -1).transpose(0, 1)
        query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


@lru_cache(1)  # for all layers of a micro-batch
def _own_segments(time: int, sequences: int, context: int, contexts: int, device: torch.device) -> Segments:
    """Describes how a rank's `time` tokens of each sequence attend to the gathered ones.

    Returns:
        The segments of the tokens, sequence by sequence, and of keys in the flattened shape (time, sequences).
    """
    host = torch.device("cpu")
    gathered = torch.cat([local_positions(contexts * time, number, contexts, host) for number in range(contexts)])
    place = gathered.argsort().numpy() * sequences
    piece = time // 2
    ends = np.array([context + 1, 2 * contexts - context]) * piece
    keys = [place[:end] + sequence for sequence in range(sequences) for end in ends]
    lengths = np.full(2 * sequences, piece)
    return Segments.of_pieces(lengths, np.tile(ends, sequences), np.concatenate(keys)).to(device)


class Router(TopKRouter):  # type: ignore[misc]
    """The router without TransformerEngine, which Megatron's own router needs for its products."""

    def gating(self, input: Tensor) -> Tensor:
        """Computes the logits of experts in float32, shape (*tokens, experts)."""
        return linear(input.float(), self.weight.float())


class _GivenExperts:
    """Chooses the experts of a router in the place of its `topk`: Megatron's `RouterReplay`, of which it has one list
    for all models of a process, with the choice left to the router where none is given."""

    def __init__(self, *, recomputes: bool) -> None:
        self._recomputes = recomputes
        self._given: Tensor | None = None
        self._for_backward: deque[Tensor | None] = deque()
        """Those of the micro-batches that are still to be computed again."""

    def give(self, given: Tensor | None) -> None:
        self._given = given
        if self._recomputes and torch.is_grad_enabled():
            self._for_backward.append(given)

    def end(self) -> None:
        self._given = None
        self._for_backward.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores of the experts of each token, and their numbers; Megatron calls it."""
        of_own, own = default_compute_topk(scores, topk, num_groups, group_topk)
        # what is computed again computes without gradients the first time
        is_again = self._recomputes and torch.is_grad_enabled() and self._for_backward
        given = self._for_backward.popleft() if is_again else self._given
        if given is None:
            return of_own, own
        chosen = torch.where(given[:, :1] == OWN, own, given)
        return scores.gather(1, chosen), chosen


class FollowingRouters(FollowsRoutes):
    """The routers of a rank's part of a model, which take given experts."""

    def __init__(self, decoder: Decoder, *, recomputes: bool) -> None:
        """Takes a decoder with experts; `recomputes` if it computes activations again for the gradient."""
        config, self._decoder = decoder.config, decoder
        with_experts = [number for number, has in enumerate(config.moe_layer_freq) if has]
        self.count, self.experts = len(with_experts), config.num_moe_experts
        self._own: list[tuple[int, _GivenExperts]] = []
        """This rank's routers, by their number among all."""
        for module in decoder.modules():
            if isinstance(module, TopKRouter):
                given = _GivenExperts(recomputes=recomputes)
                module.router_replay = given
                self._own.append((with_experts.index(module.layer_number - 1), given))

    def follow(self, routes: Tensor | None) -> None:
        """Makes the routers take these experts; see `FollowsRoutes.follow`. `routes` has a row for each sequence."""
        if routes is None:
            for _, router in self._own:
                router.give(None)
            return
        local = self._decoder.own_tokens(routes.long(), OWN)
        local = local.view(len(local), self.count, -1)
        for number, router in self._own:
            router.give(local[:, number])

    def end(self) -> None:
        """Lets the routers choose again."""
        for _, router in self._own:
            router.end()


def local_positions(time: int, context: int, contexts: int, device: torch.device) -> Tensor:
    """Returns the positions of a rank's tokens in a sequence, ascending, shape (time / contexts,).

    They are a piece of its beginning and one of its end, so that all ranks attend to equally many tokens. `time` is a
    multiple of 2 * contexts.
    """
    pieces = torch.arange(time, device=device).view(2 * contexts, -1)
    return torch.cat([pieces[context], pieces[2 * contexts - 1 - context]])


class Decoder(GPTModel):  # type: ignore[misc]  # megatron-core has no type hints for it
    """A rank's part of a model. It computes hidden states, and logits only where they are asked for."""

    place: Place

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def hidden(self, input_ids: Tensor) -> Tensor:
        """Computes the hidden states of this rank's share of each sequence.

        Returns:
            Shape (time / ranks that share sequences, sequences, width); time is rounded up. The other stages compute
            them from the decoder's input tensor.
        """
        return self(self._of_context(input_ids[..., None], 0)[..., 0], None, None)  # type: ignore[no-any-return]

    def _of_context(self, tokens: Tensor, padding: int) -> Tensor:
        """Returns this rank's share of values per token, shape (sequences, time, values), padded on the right."""
        place = self.place
        time = tokens.shape[1]
        rounded = -(-time // self._multiple) * self._multiple
        tokens = pad(tokens, (0, 0, 0, rounded - time), value=padding)
        if place.contexts > 1:
            tokens = tokens[:, local_positions(rounded, place.context, place.contexts, tokens.device)]
        return tokens

    def own_tokens(self, tokens: Tensor, padding: int) -> Tensor:
        """Returns values per token, shape (sequences, time, values), in the order in which this rank's layers compute
        tokens one by one, shape (tokens, values)."""
        by_time = self._of_context(tokens, padding).transpose(0, 1)
        return by_time.chunk(self.place.tensors)[self.place.tensor].flatten(0, 1)

    def chosen(self, hidden: Tensor, time: int, at: Tensor) -> Tensor:
        """Selects hidden states from all ranks' shares; the ranks that share sequences select different ones.

        Args:
            at: indices of tokens in the flattened sequences, shape (tokens,).

        Returns:
            Those of this rank's tokens, shape (ceil(tokens / contexts), width); see `gathered`.
        """
        place = self.place
        if place.tensors > 1:  # these ranks compute the same from it, so each has the whole gradient
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=parallel_state.get_tensor_model_parallel_group()
            )
        if place.contexts > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=parallel_state.get_context_parallel_group())
            positions = [
                local_positions(len(hidden), number, place.contexts, hidden.device) for number in range(place.contexts)
            ]
            hidden = hidden.index_select(0, torch.cat(positions).argsort())
            at = self.own(at)
        return hidden[:time].transpose(0, 1).flatten(0, 1).index_select(0, at)

    def own(self, tokens: Tensor) -> Tensor:
        """Selects this rank's part of values per token, shape (tokens,), which is padded with zeros."""
        contexts = self.place.contexts
        return pad(tokens, (0, -len(tokens) % contexts)).chunk(contexts)[self.place.context]

    def gathered(self, outputs: Tensor, tokens: int) -> Tensor:
        """Gathers the outputs of the ranks that share sequences, shape (tokens,); all compute the same from it."""
        if self.place.contexts == 1:
            return outputs
        group = parallel_state.get_context_parallel_group()
        return gather_from_sequence_parallel_region(outputs, tensor_parallel_output_grad=False, group=group)[:tokens]  # type: ignore[no-any-return]

    @property
    def _multiple(self) -> int:
        """The length of sequences is a multiple of this."""
        contexts = self.place.contexts
        return self.place.tensors * (2 * contexts if contexts > 1 else 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes this rank's part of the logits, shape (tokens, tokens of the vocabulary that the rank has)."""
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
    """Builds a rank's part of a model; its weights are not those of the model yet.

    Args:
        model: the model; it may be on the meta device. Its rotary frequencies are used.
        head: `policy`: the head gives logits; otherwise a value.
        recompute: recompute all activations in the backward pass, or those of MLPs and experts.
    """
    hf: Any = model.config.get_text_config()
    has_engine = has_transformer_engine()
    names = {name for name, _ in model.named_parameters()}
    has_norms = any(name.endswith("self_attn.q_norm.weight") for name in names)
    has_experts = any(name.endswith("mlp.gate.weight") for name in names)
    recomputing: dict[str, Any] = {}
    if recompute == "selective":
        modules = ["mlp", "moe"] if has_experts else ["mlp"]
        recomputing = {"recompute_granularity": "selective", "recompute_modules": modules}
    elif recompute:
        recomputing = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    mixture: dict[str, Any] = {}
    if has_experts:
        mixture = {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_layer_freq": [
                int(f"model.layers.{layer}.mlp.gate.weight" in names) for layer in range(hf.num_hidden_layers)
            ],
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": has_engine,
            "expert_model_parallel_size": place.experts,
            "expert_tensor_parallel_size": 1,
        }
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
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=any(name.endswith("self_attn.q_proj.bias") for name in names),
        qk_layernorm=has_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=place.tensors,
        sequence_parallel=place.tensors > 1,
        pipeline_model_parallel_size=place.stages,
        context_parallel_size=place.contexts,
        variable_seq_lengths=place.stages > 1,  # micro-batches differ in size
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,  # gradients are sums over ranks: losses are normalized already
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=accelerator.is_gpu(device) and has_engine,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        **mixture,
        **recomputing,
    )
    specified = get_gpt_decoder_block_spec(config, has_engine, normalization="RMSNorm")
    if not has_engine:
        specified.layer_norm = Norm
        for layer in specified.layer_specs:
            parts = layer.submodules
            parts.input_layernorm = parts.pre_mlp_layernorm = Norm
            parts.self_attention.submodules.core_attention = Attention
            if parts.mlp.module is MoELayer:
                parts.mlp.submodules.router = Router
            if has_norms:
                parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = Norm
    built = Decoder(
        config,
        specified,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=place.is_first_stage,
        post_process=place.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=head == "policy" and "lm_head.weight" not in names,
        position_embedding_type="rope",
    )
    built.place = place
    rotary: Any = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    built.rotary_pos_emb.inv_freq = rotary.inv_freq.detach().to(device, torch.float32, copy=True)
    if head != "policy" and place.is_last_stage:
        built.output_layer = torch.nn.Linear(hf.hidden_size, 1, bias="score.bias" in names)
    elif place.is_last_stage:  # it receives whole sequences: see `Decoder.chosen`
        built.output_layer.sequence_parallel = False
        built.output_layer.allreduce_dgrad = place.tensors > 1
    placed: Decoder = built.to(device, dtype)
    return placed
