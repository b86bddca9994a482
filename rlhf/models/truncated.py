"""Builds a small model of the same architecture, to try the architecture before anything large is loaded."""

from __future__ import annotations

import warnings
from copy import deepcopy
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


def truncated(model: PreTrainedModel, *, attention: str, teams_of: int = 1) -> PreTrainedModel:
    """Builds a small float32 model of the same class on the CPU, with random weights.

    It has a layer of each kind that the model has, and at least two; few attention heads, of the same size; and a small
    vocabulary. If that cannot be built, fewer things are changed, in the end none.
    """
    for narrow in (True, False):
        try:
            return _built(model, _small(model.config, teams_of if narrow else None), attention)
        except Exception:  # fields of a config may depend on others in unknown ways
            continue
    warnings.warn(
        f"no small {type(model).__name__} can be built, so the checks need memory for a whole one", stacklevel=2
    )
    return _built(model, deepcopy(model.config), attention)


def _built(model: PreTrainedModel, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Builds a model whose outputs are large enough to differ visibly between two ways of computing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config._attn_implementation = attention
        small = type(model)(config).eval()
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


def _small(whole: PreTrainedConfig, teams_of: int | None) -> PreTrainedConfig:
    """Copies a config with fewer layers and, unless `teams_of` is None, with fewer heads and tokens."""
    config = deepcopy(whole)
    _shorten(config.get_text_config())
    if teams_of is not None:
        _narrow(config.get_text_config(), teams_of)
    return config


def _shorten(config: PreTrainedConfig) -> None:
    """Keeps one layer of each kind, and at least two."""
    count = config.num_hidden_layers
    per_layer = {
        name: list(values)
        for name, values in vars(config).items()
        if isinstance(values, list | tuple) and len(values) == count
    }
    first_of_kind: dict[str, int] = {}
    for layer in range(count):
        first_of_kind.setdefault(repr([values[layer] for values in per_layer.values()]), layer)
    kept = sorted(first_of_kind.values()) if len(first_of_kind) >= LAYERS else list(range(min(count, LAYERS)))
    for name, values in per_layer.items():
        setattr(config, name, [values[layer] for layer in kept])
    config.num_hidden_layers = len(kept)


def _narrow(config: PreTrainedConfig, teams_of: int) -> None:
    """Keeps few heads and tokens; MLPs become as wide as the model."""
    heads, width, vocabulary = config.num_attention_heads, config.hidden_size, config.vocab_size
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    kept = HEADS * teams_of
    if heads > kept and width % heads == 0:
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
    if vocabulary > VOCABULARY:
        config.vocab_size = VOCABULARY
        for name in TOKENS:
            if getattr(config, name, None) is not None:
                setattr(config, name, VOCABULARY - 1)
