"""Reads the configs of Hugging Face models, and checks that transformers supports their architectures."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

from ratchet.rlhf.config.engine_args import unknown
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.custom_code import needs_code
from ratchet.rlhf.models.families import VISION
from ratchet.rlhf.models.kernels import check_liger
from ratchet.rlhf.models.model_folders import GENERATION_CONFIG, model_folder

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

    from ratchet.rlhf.config import ModelConfig

NOISE = ("dropout", "pdrop", "layerdrop", "drop_path", "droppath", "jitter")
"""Parts of the names of config fields that make a model's outputs random in training."""


def model_config(model: ModelConfig, key: str = "model", *, num_labels: int | None = None) -> PreTrainedConfig:
    """Loads the config of a model; raises UserError if it cannot be read, or may not run its own code.

    Args:
        num_labels: number of labels of a classifier; None: that of the folder.
    """
    from transformers import AutoConfig

    labels = {} if num_labels is None else {"num_labels": num_labels}
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            model_folder(model, key), trust_remote_code=model.trust_remote_code, **labels, **model.args
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise needs_code(model, key) from None
    # transformers ignores arguments that are no fields
    if mistakes := unknown(f"{key}.args", model.args, config.to_dict(), f"the config of {config.model_type}"):
        raise UserError("\n".join(mistakes))
    return config


def policy_class(config: PreTrainedConfig) -> Any:
    """Returns the Auto class of transformers that builds the policy: a language model, perhaps one that sees."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in VISION else AutoModelForCausalLM


def text_config(model: ModelConfig) -> PreTrainedConfig:
    """Returns the config of a model's decoder."""
    text: PreTrainedConfig = model_config(model).get_text_config()
    return text


def attention_heads(model: ModelConfig) -> int:
    """Returns the number of attention heads."""
    heads: int = text_config(model).num_attention_heads
    return heads


def longest_sequence(model: ModelConfig) -> int | None:
    """Returns the maximum length of a sequence in tokens, derived as vLLM does; None if the config has none."""
    text = text_config(model)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    stretched = rope.get("rope_type") in ("linear", "dynamic") and not text.model_type.startswith("gemma3")
    longest = int(limit * (rope.get("factor") or 1)) if stretched else int(limit)  # other types include the factor
    return max(longest, getattr(text, "model_max_length", None) or 0)


def check_architecture(model: ModelConfig, key: str, *, is_critic: bool) -> None:
    """Raises UserError if transformers, or Liger if configured and installed, does not support the architecture."""
    from transformers import AutoModelForTokenClassification

    config = model_config(model, key)
    auto = AutoModelForTokenClassification if is_critic else policy_class(config)
    known, auto_class = auto._model_mapping, auto.__name__
    if is_critic:
        from ratchet.rlhf.models import scalar_heads

        scalar_heads.register(config)
    if model.kernels == "liger" and importlib.util.find_spec("liger_kernel") is not None:
        check_liger(config.model_type)
    if type(config) in known or auto_class in (getattr(config, "auto_map", None) or {}):
        return
    instead = "name another one, or an algorithm without a critic (algorithm.advantage: grpo)"
    raise UserError(
        f"{key}.path {model.path}: transformers has no {auto_class} for {config.model_type}, so it cannot be the "
        f"{'critic' if is_critic else 'policy'}: {instead if is_critic else 'name a language model'}"
    )


def check_unquantized(model: ModelConfig) -> None:
    """Raises UserError for a model whose weights are quantized: their rounding steps are larger than an update."""
    settings = getattr(model_config(model), "quantization_config", None)
    if settings is not None:
        method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings.quant_method
        raise UserError(
            f"{model.path} is quantized ({method}), so it cannot be trained: name the unquantized model that it was "
            "made from, or a copy that transformers dequantized (model.dequantize(), then save_pretrained)"
        )


def attention_of(model: ModelConfig) -> tuple[str, str | None]:
    """Returns the attention kernel for a model, and the reason if it is not the configured one."""
    if model.attention != "sdpa":
        return model.attention, None
    config = model_config(model)
    known = policy_class(config)._model_mapping
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "eager", "it caps the logits of its attention, which sdpa leaves out"
    if type(config) in known and not known[type(config)]._supports_sdpa:
        return "eager", "transformers has no sdpa for it"
    return model.attention, None


def without_noise(config: PreTrainedConfig) -> None:
    """Sets all dropout and noise fields of a config to 0, in place.

    An update must compute the log-probs of the network that generated, so nothing may be random. The fields must be set
    before the model is built, because many architectures copy them into their layers.
    """
    for name, value in vars(config).items():
        if (config.model_type, name) == ("phimoe", "router_jitter_noise"):
            continue  # not only noise there: without it, evaluation routes differently, too
        if any(part in name for part in NOISE) and isinstance(value, float | int):
            setattr(config, name, type(value)(0))  # configs check the types of their fields
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            without_noise(inner)


def generation_config(model: ModelConfig) -> GenerationConfig | None:
    """Returns the generation config of a model loaded from the folder."""
    from transformers import GenerationConfig

    folder = model_folder(model)
    if (folder / GENERATION_CONFIG).is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(model_config(model))


def config_json(model: PreTrainedModel) -> bytes:
    """Returns the config.json of a model, with its actual class: a critic's differs from that of its folder."""
    name = type(model).__name__.removeprefix("FSDP")
    return json.dumps(
        model.config.to_diff_dict() | {"architectures": [name]}, sort_keys=True, indent=1, default=str
    ).encode()
