"""Builds a small model of the same architecture, to try the architecture before anything large is loaded."""

from __future__ import annotations

import warnings
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LAYERS = 2
HEADS = 6
"""Attention heads per process of a team. The odd factor keeps a width from equaling another size by chance."""
VOCABULARY = 128
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
"""Parts of the names of fields that hold the widths of MLPs."""
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields that hold the number of experts of a layer."""
DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Fields that hold the number of first layers, which have no experts."""
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
"""Fields that hold the number of experts of a token."""


def truncated(model: PreTrainedModel, *, attention: str, teams_of: int = 1) -> PreTrainedModel:
    """Builds a small float32 model of the same class on the CPU, with random weights.

    It has a layer of each kind that the model has, and at least two; few attention heads, of the same size; few
    experts; and a small vocabulary. If that cannot be built, fewer things are changed, in the end none.
    """
    small = small_model(model, attention=attention, teams_of=teams_of)
    if small is not None:
        return small
    warnings.warn(
        f"no small {type(model).__name__} can be built, so the checks need memory for a whole one", stacklevel=2
    )
    return _built(model, deepcopy(model.config), attention)


def small_model(
    model: PreTrainedModel, *, attention: str, teams_of: int = 1, at_most: int | None = None
) -> PreTrainedModel | None:
    """Builds what `truncated` builds, if it has at most so many parameters; returns None if nothing can be built."""
    for changes in (
        (_shorten, _few_experts, _few_tokens, partial(_few_heads, teams_of=teams_of)),
        (_shorten, _few_experts, _few_tokens),
        (_shorten,),
    ):
        config = deepcopy(model.config)
        try:
            for change in changes:
                change(config.get_text_config())
            if at_most is not None and _parameters(model, config) > at_most:
                continue
            return _built(model, config, attention)
        except Exception:  # fields of a config may depend on others in unknown ways
            continue
    return None


def _built(model: PreTrainedModel, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Builds a model whose outputs are large enough to differ visibly between two ways of computing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config._attn_implementation = attention
        small = type(model)(config).eval().float()  # parts have types of their own in the config
        width = config.get_text_config().hidden_size
        for parameter in small.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=width**-0.5)
        for embedding in (small.get_input_embeddings(), small.get_output_embeddings()):
            if embedding is not None:
                torch.nn.init.normal_(embedding.weight)
        with torch.no_grad():  # a model that cannot compute is of no use
            small.base_model(input_ids=torch.arange(4)[None], use_cache=False)
    return small


def _parameters(model: PreTrainedModel, config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in type(model)(config).parameters())


def _shorten(config: PreTrainedConfig) -> None:
    """Keeps one layer of each kind, and at least two."""
    count = config.num_hidden_layers
    per_layer = {
        name: list(values)
        for name, values in vars(config).items()
        # a list of all layers' numbers names the layers of a kind: they are of one kind
        if isinstance(values, list | tuple) and len(values) == count and list(values) != list(range(count))
    }
    first_of_kind: dict[str, int] = {}
    for layer in range(count):
        first_of_kind.setdefault(repr([values[layer] for values in per_layer.values()]), layer)
    kept = sorted(first_of_kind.values()) if len(first_of_kind) >= LAYERS else list(range(min(count, LAYERS)))
    for name, values in per_layer.items():
        setattr(config, name, [values[layer] for layer in kept])
    config.num_hidden_layers = len(kept)
    for name in DENSE_LAYERS:  # else a model whose first layers have no experts would have none
        if isinstance(first := getattr(config, name, None), int):
            setattr(config, name, min(first, len(kept) - 1))


def _few_heads(config: PreTrainedConfig, *, teams_of: int) -> None:
    """Keeps few attention heads; MLPs become as wide as the model."""
    heads, width = getattr(config, "num_attention_heads", None), config.hidden_size
    kept = HEADS * teams_of
    if heads is None or heads <= kept or width % heads:
        return
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    kept_of_keys = kept if of_keys == heads else 2 * teams_of if of_keys % (2 * teams_of) == 0 else 1
    size = getattr(config, "head_dim", None) or width // heads
    config.num_attention_heads = kept
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = kept_of_keys
    config.hidden_size = kept * size
    for name, value in list(vars(config).items()):
        is_width = any(part in name for part in WIDTHS) or value == width
        if is_width and isinstance(value, int) and value > config.hidden_size:
            setattr(config, name, config.hidden_size)


def _few_experts(config: PreTrainedConfig) -> None:
    """Keeps twice as many experts as a token has, and two in each group."""
    chosen = max((getattr(config, name, None) or 1 for name in CHOSEN_EXPERTS), default=1)
    groups = getattr(config, "n_group", None) or 1
    kept = groups * max(2, -(-2 * chosen // groups))
    for name in EXPERTS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > kept:
            setattr(config, name, kept)


def _few_tokens(config: PreTrainedConfig) -> None:
    """Keeps a small vocabulary."""
    if config.vocab_size > VOCABULARY:
        config.vocab_size = VOCABULARY
        for name in TOKENS:
            if getattr(config, name, None) is not None:
                setattr(config, name, VOCABULARY - 1)
