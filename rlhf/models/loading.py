"""Builds models without weights, loads them whole, and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models import lora
from ratchet.rlhf.models.hf_configs import (
    attention_of,
    config_json,
    generation_config,
    model_config,
    policy_class,
    without_noise,
)
from ratchet.rlhf.models.modalities import freeze_vision
from ratchet.rlhf.models.model_folders import model_folder
from ratchet.rlhf.models.skeleton import (
    Skeleton,
    Unreadable,
    extended,
    folder_state,
    say_whole,
    sources,
    without_memory,
)
from ratchet.rlhf.weights.stored_state import Held
from ratchet.rlhf.weights.weight_files import as_umask_says, save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ratchet.rlhf.config import ModelConfig, RewardModelConfig


def actor_skeleton(model: ModelConfig, seed: int = 0, *, trainable: bool = True) -> Skeleton:
    """Builds a causal language model without weights, for a train engine. Raises UserError if the folder is incomplete.

    Trainable weights are float32, others have `model.dtype`, the type of the computation.
    """
    auto_class = policy_class(model_config(model))
    skeleton, missing = _skeleton(auto_class, model, dtype="float32" if trainable else model.dtype)
    if missing:
        raise UserError(f"{model.path} lacks {missing[0]}: it is not a complete {type(skeleton.model).__name__}")
    return _adapted(skeleton, model, seed)


def critic_skeleton(model: ModelConfig, seed: int = 0) -> Skeleton:
    """Builds a backbone with a value head (a token classifier with one label), without weights, for a train engine.

    A new head starts at zero, so that all values are 0 at first. If the folder has a head, from an earlier critic or a
    reward model, it is kept.
    """
    from transformers import AutoModelForTokenClassification

    return _with_head(AutoModelForTokenClassification, model, seed, "critic")


def load_actor(model: ModelConfig, seed: int = 0, *, trainable: bool = True) -> PreTrainedModel:
    """Loads a causal language model whole into host memory; see `actor_skeleton`."""
    return actor_skeleton(model, seed, trainable=trainable).load()


def load_critic(model: ModelConfig, seed: int = 0) -> PreTrainedModel:
    """Loads a backbone with a value head whole into host memory; see `critic_skeleton`."""
    return critic_skeleton(model, seed).load()


def load_scorer(model: ModelConfig, seed: int = 0) -> PreTrainedModel:
    """Loads a reward model to train: a sequence classifier with one label, whose new head starts at zero."""
    from transformers import AutoModelForSequenceClassification

    return _with_head(AutoModelForSequenceClassification, model, seed, "reward model").load()


def load_reward_model(model: RewardModelConfig) -> PreTrainedModel:
    """Loads a reward model in its `dtype`: a sequence classifier, or a token classifier for process rewards."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    auto = AutoModelForTokenClassification if model.kind == "process" else AutoModelForSequenceClassification
    skeleton, missing = _skeleton(auto, model, dtype=model.dtype)
    if missing:
        raise _not_a_reward_model(model, missing[0])
    return skeleton.load()


def check_reward_model(model: RewardModelConfig) -> None:
    """Raises UserError for a reward model without a head, before any response is generated."""
    from safetensors import safe_open
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    from ratchet.rlhf.models import scalar_heads

    folder = model_folder(model)
    stored: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            stored.update(file.keys())
    auto = AutoModelForTokenClassification if model.kind == "process" else AutoModelForSequenceClassification
    config = model_config(model, "reward.model")
    scalar_heads.register(config)
    # only the names of the parameters matter
    with torch.device("meta"):
        whole = auto.from_config(config, trust_remote_code=model.trust_remote_code)
    prefix = f"{whole.base_model_prefix}."
    for name, _ in whole.named_parameters():
        if not name.startswith(prefix) and name not in stored:
            raise _not_a_reward_model(model, name)


def _not_a_reward_model(model: RewardModelConfig, missing: str) -> UserError:
    fix = "`ratchet reward-model` trains one" if model.kind == "outcome" else "name a token classifier"
    return UserError(f"reward.model {model.path} lacks {missing}: it is not a reward model of kind {model.kind}; {fix}")


def _with_head(auto_class: Any, model: ModelConfig, seed: int, purpose: str) -> Skeleton:
    skeleton, missing = _skeleton(auto_class, model, dtype="float32", num_labels=1)
    unknown = [name for name in missing if not name.startswith(("score.", "classifier."))]
    if unknown:
        raise UserError(f"{model.path} lacks {unknown[0]}: it is not a backbone for a {purpose}")
    parameters = dict(skeleton.model.named_parameters())
    if skeleton.sources:
        heads = {name: Held(torch.zeros(parameters[name].shape)) for name in missing}
        skeleton = Skeleton(skeleton.model, {**skeleton.sources, **heads})
    else:
        for name in missing:
            parameters[name].data.zero_()
    return _adapted(skeleton, model, seed)


def _adapted(skeleton: Skeleton, model: ModelConfig, seed: int) -> Skeleton:
    """Adds adapters, if the config has any."""
    settings = model.lora
    if settings is None:
        if model.freeze_vision:
            freeze_vision(skeleton.model)
        return skeleton
    if not skeleton.sources:
        lora.add(skeleton.model, settings, seed)
        return skeleton
    return extended(skeleton, lambda base: lora.add(base, settings, seed), lora.base_name)


def _skeleton(
    auto_class: Any, model: ModelConfig, *, dtype: str, num_labels: int | None = None
) -> tuple[Skeleton, list[str]]:
    """Builds a model without weights, and lists the parameters that its folder lacks."""
    from transformers.utils import logging

    from ratchet.rlhf.models import scalar_heads

    folder = model_folder(model)
    logging.set_verbosity_error()  # transformers would warn about a critic's new head
    logging.disable_progress_bar()
    config = model_config(model, num_labels=num_labels)
    scalar_heads.register(config)
    without_noise(config)
    options = {
        "attn_implementation": attention_of(model)[0],
        "trust_remote_code": model.trust_remote_code,
        "dtype": getattr(torch, dtype),
    }
    try:
        try:
            stored = folder_state(folder)
            with without_memory():
                built = auto_class.from_config(config, **options)
            skeleton = Skeleton(built, sources(built, stored.weights))
            missing = sorted({name for name, _ in built.named_parameters()} - skeleton.sources.keys())
            _check_shapes(skeleton, model)
            if built.can_generate():
                built.generation_config = generation_config(model)
        except Unreadable as reason:
            # its files cannot be read by range, so it is loaded whole
            say_whole(model.path, reason)
            built, info = auto_class.from_pretrained(
                folder, config=config, use_safetensors=True, output_loading_info=True, **options
            )
            skeleton, missing = Skeleton(built, {}), sorted(info["missing_keys"])
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise UserError(
            f"{model.path}: transformers has no {auto_class.__name__} for {config.model_type}: start from another model"
        ) from None
    except RuntimeError as error:  # the shapes of the weights differ
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise _several_labels(model) from None
    except ImportError as error:  # the attention kernel is not installed
        first = str(error).splitlines()[0]
        raise UserError(f"model.attention {model.attention} does not work on this machine: {first}") from None
    for module in built.modules():  # the dropout of a classifier's head has no field in the config
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    built.eval()
    return skeleton, missing


def _check_shapes(skeleton: Skeleton, model: ModelConfig) -> None:
    """Raises UserError if the folder's tensors differ in shape from the model's parameters."""
    for name, parameter in skeleton.model.named_parameters():
        source = skeleton.sources.get(name)
        if source is not None and source.shape != tuple(parameter.shape):
            if name.startswith(("score.", "classifier.")):
                raise _several_labels(model)
            raise UserError(
                f"{model.path} is damaged: {name} has shape {source.shape} in its files, and {tuple(parameter.shape)} "
                "by its config.json"
            )


def _several_labels(model: ModelConfig) -> UserError:
    return UserError(
        f"{model.path} is a classifier with several labels: start from a model with one label, or from a language model"
    )


def save(model: PreTrainedModel, folder: Path) -> None:
    """Writes a Hugging Face model folder, with adapters merged into the weights."""
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir(parents=True, exist_ok=True)
    if not lora.has(model):
        model.save_pretrained(folder)
        for path in folder.glob("model*.safetensors"):
            as_umask_says(path)
        return
    weights = revert_weight_conversion(model, lora.merged(model))
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_bytes(config_json(model))
    if model.can_generate():
        assert model.generation_config is not None
        model.generation_config.save_pretrained(folder)
