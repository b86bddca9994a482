"""Load Hugging Face models and tokenizers, check them, and compute digests of their files."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.rlhf.data.prompts import beginning, end_of_turn
from ratchet.rlhf.data.responses import end_with
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models import lora
from ratchet.rlhf.models.custom_code import code_files

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ratchet.rlhf.config import ModelConfig, RewardModelConfig
    from ratchet.rlhf.models.skeleton import Skeleton

WEIGHTS = ("*.safetensors", "config.json", "*.safetensors.index.json")
NAMED = 3
"""Tokens that an error names."""
TOKENIZER = ("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "chat_template*")
"""Files that the digest of a tokenizer covers; another pattern would change the digests of stored runs."""
OF_TOKENIZERS = (*TOKENIZER, "added_tokens.json", "*.tiktoken")
"""All files of tokenizers."""
GENERATION_CONFIG = "generation_config.json"
DOWNLOADED = [*WEIGHTS, *OF_TOKENIZERS, GENERATION_CONFIG, "*.jinja", "*.py"]
"""Files of a model on the hub that are used."""


def model_folder(model: ModelConfig, key: str = "model", *, download: bool = True) -> Path:
    """The folder of a model's files; a model on the hub is downloaded to the cache first, or else must be there."""
    path = Path(model.path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{key}.path {model.path} holds no config.json: it is not a Hugging Face model folder")
        return path
    if hub_name(model) is None:
        raise UserError(
            f"{key}.path {model.path} does not exist: name a model folder, or a model on the hub (owner/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.path, allow_patterns=DOWNLOADED, local_files_only=not download))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{key}.path {model.path} is not a local folder, and the download failed: {first}") from None


def hub_name(model: ModelConfig) -> str | None:
    """The name of a model on the hub; None if it is a local folder, even one that does not exist."""
    is_name = model.path.count("/") == 1 and not model.path.startswith((".", "/"))
    return model.path if is_name and not Path(model.path).is_dir() else None


def base_models(model: ModelConfig) -> list[str]:
    """Names on the hub of what a model derives from: the model itself, or what the card of its folder names."""
    from huggingface_hub.repocard import metadata_load
    from huggingface_hub.utils import validate_repo_id
    from yaml import YAMLError

    if (name := hub_name(model)) is not None:
        return [name]
    card = Path(model.path) / "README.md"
    try:
        named = (metadata_load(card) or {}).get("base_model") if card.is_file() else None
        names = [str(name) for name in (named if isinstance(named, list) else [named] if named else [])]
        for name in names:
            validate_repo_id(name)
    except (OSError, ValueError, YAMLError):  # the card is others' text
        return []
    return names


def files_digest(folder: Path, patterns: tuple[str, ...] = WEIGHTS) -> str:
    """sha256 over the names and contents of the files in a folder that match the patterns."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        status = path.stat()
        digest.update(f"{path.name}\0{_file_digest(path, status.st_size, status.st_mtime_ns)}\0".encode())
    return digest.hexdigest()


@cache  # several roles may start from one model, whose files take a minute to read at 32 B
def _file_digest(path: Path, size: int, modified_ns: int) -> str:
    """sha256 of a file that was last modified at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_weights(folder: Path, key: str = "model") -> None:
    """Refuse a folder without readable safetensors."""
    from safetensors import SafetensorError, safe_open

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{key}.path {folder} holds no safetensors: convert its weights with save_pretrained")
    for path in paths:
        try:
            safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}") from None


def parameter_count(folder: Path) -> int:
    """The number of parameters in a model folder, from the headers of its files."""
    import math

    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"  # a folder may also hold the weights in another layout
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
    count = 0
    for path in folder.glob("*.safetensors"):
        if files is not None and path.name not in files:
            continue
        with safe_open(path, framework="numpy") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def text_config(model: ModelConfig) -> PreTrainedConfig:
    """The config of a model's decoder."""
    text: PreTrainedConfig = model_config(model).get_text_config()
    return text


def model_config(model: ModelConfig, key: str = "model", *, num_labels: int | None = None) -> PreTrainedConfig:
    """The config of a model.

    Args:
        model: the model.
        key: config key that holds it, for errors.
        num_labels: number of labels of a classifier; None: that of the folder.

    Raises:
        UserError: the config has code of its own, and `model.trust_remote_code` is false; or it cannot be read.
    """
    from transformers import AutoConfig

    labels = {} if num_labels is None else {"num_labels": num_labels}
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            model_folder(model, key), trust_remote_code=model.trust_remote_code, **labels
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise _has_code(model, key) from None
    return config


def _has_code(model: ModelConfig, key: str = "model") -> UserError:
    return UserError(
        f"{key}.path {model.path} has Python code of its own, which it needs: read it, and set "
        f"{key}.trust_remote_code=true"
    )


def attention_heads(model: ModelConfig) -> int:
    """The number of a model's attention heads."""
    heads: int = text_config(model).num_attention_heads
    return heads


def longest_sequence(model: ModelConfig) -> int | None:
    """The largest number of tokens that a model reads at once, as vLLM also derives it; None: its config tells none."""
    text = text_config(model)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    stretched = rope.get("rope_type") in ("linear", "dynamic") and not text.model_type.startswith("gemma3")
    longest = int(limit * (rope.get("factor") or 1)) if stretched else int(limit)  # other types include the factor
    return max(longest, getattr(text, "model_max_length", None) or 0)


def check_embeddings(tokenizer_of: ModelConfig, *models: ModelConfig) -> None:
    """Check that models have a row of embeddings for every token.

    Args:
        tokenizer_of: the model whose tokenizer writes the tokens.
        models: models that read them.

    Raises:
        UserError: one has fewer rows; a line for each model.
    """
    vocabulary = load_tokenizer(tokenizer_of, writes=False).get_vocab()
    rows = {model.path: getattr(text_config(model), "vocab_size", None) for model in models}
    size = max(vocabulary.values()) + 1
    mistakes = []
    for path, count in rows.items():
        if count is not None and count < size:
            extra = [token for token, number in sorted(vocabulary.items(), key=itemgetter(1)) if number >= count]
            names = ", ".join(extra[:NAMED]) + (f" and {len(extra) - NAMED} more" if len(extra) > NAMED else "")
            mistakes.append(
                f"{path} has embeddings for {count} tokens, and the tokenizer of {tokenizer_of.path} has {size}: call "
                f"model.resize_token_embeddings({size}) and save the model, or remove the tokens {names}"
            )
    if mistakes:
        raise UserError("\n".join(mistakes))


def check_architecture(model: ModelConfig, key: str, *, is_critic: bool) -> None:
    """Refuse a model whose architecture transformers does not support as a policy or as a critic, or its kernels, if
    they are installed."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    from ratchet.rlhf.models.kernels import check_liger

    known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING if is_critic else MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = "AutoModelForTokenClassification" if is_critic else "AutoModelForCausalLM"
    config = model_config(model, key)
    if model.kernels == "liger" and importlib.util.find_spec("liger_kernel") is not None:
        check_liger(config.model_type)
    if type(config) in known or auto_class in (getattr(config, "auto_map", None) or {}):
        return
    instead = "name another one, or an algorithm without a critic (algorithm.advantage: grpo)"
    raise UserError(
        f"{key}.path {model.path}: transformers has no {auto_class} for {config.model_type}, so it cannot be the "
        f"{'critic' if is_critic else 'policy'}: {instead if is_critic else 'name a language model'}"
    )


def load_tokenizer(model: ModelConfig, *, writes: bool = True) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        model: the model.
        writes: whether the model generates, so that the tokenizer needs an end-of-sequence token.

    Raises:
        UserError: it cannot be loaded, or not as the config wants it.
    """
    tokenizer = _tokenizer(model, model_folder(model), runs_code=model.trust_remote_code)
    if writes and tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {model.path} has no end-of-sequence token: set eos_token in its config")
    if model.chat_template is not None:
        _set_template(tokenizer, model.chat_template)
    if model.chat_template_kwargs:
        _set_variables(tokenizer, model)
    if writes and (model_folder(model) / "generation_config.json").is_file():
        end_with(tokenizer, _ends(generation_config(model), tokenizer))
    return tokenizer


def reading_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model to read tokens of a stored run: no code that the model brings runs, whatever the
    run's config says, and nothing is downloaded.

    Raises:
        UserError: it cannot be loaded so.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()  # the caller says in one line what cannot be read
    return _tokenizer(model, model_folder(model, download=False), runs_code=False)


def _tokenizer(model: ModelConfig, folder: Path, *, runs_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=runs_code, local_files_only=not runs_code
        )
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error) and not model.trust_remote_code:
            raise _has_code(model) from None
        if "trust_remote_code" in str(error):
            raise UserError(
                f"the tokenizer of model.path {model.path} needs Python code of its own, which does not run where a "
                "run is only read"
            ) from None
        first = str(error).splitlines()[0]
        raise UserError(f"cannot load the tokenizer of model.path {model.path}: {first}") from None
    return tokenizer


def copy_code(model: ModelConfig, folder: Path) -> None:
    """Copy the code that a model's folder brings, of which none runs."""
    source = model_folder(model)
    for path in code_files(source):
        if path.is_relative_to(source):
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"


def copy_tokenizer(model: ModelConfig, folder: Path) -> None:
    """Copy the tokenizer of a model, with the configured chat template and with its code, of which none runs. Values of
    `model.chat_template_kwargs` are left out: whoever uses the model sets them."""
    source = model_folder(model)
    for path in {path for pattern in OF_TOKENIZERS for path in source.glob(pattern) if path.is_file()}:
        shutil.copyfile(path, folder / path.name)
    copy_code(model, folder)
    if model.chat_template is not None:
        (folder / TEMPLATE).write_text(Path(model.chat_template).read_text())
        settings = folder / TOKENIZER_CONFIG
        if settings.is_file():  # not all programs know that the file of the template comes first
            others = json.loads(settings.read_text()) | {"chat_template": None}
            del others["chat_template"]
            settings.write_text(json.dumps(others, indent=2, ensure_ascii=False))


def has_chat_template(model: ModelConfig) -> bool:
    """Whether the prompts of a model are rendered by a chat template, by its files: no code runs."""
    source = model_folder(model)
    settings = source / TOKENIZER_CONFIG
    return (
        model.chat_template is not None
        or (source / TEMPLATE).is_file()
        or (settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template")))
    )


def _set_variables(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Set variables at the beginning of the chat template, so that they hold wherever it is used."""
    template = tokenizer.chat_template
    for name in model.chat_template_kwargs:
        if not name.isidentifier() or not isinstance(template, str) or name not in template:
            raise UserError(
                f"model.chat_template_kwargs has {name}, which the chat template of {model.path} does not use: remove "
                "it"
            )
    # Jinja reads Python's literals
    variables = "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in model.chat_template_kwargs.items())
    tokenizer.chat_template = variables + template


def _set_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    from jinja2 import TemplateError

    try:
        tokenizer.chat_template = Path(path).read_text()
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise UserError(f"chat_template {path} is not a chat template: {error}") from None


def tokenizer_digest(model: ModelConfig, *, writes: bool = True) -> str:
    """sha256 over the tokenizer's files and the configured chat template.

    If the model `writes`, the digest also covers the tokens that this project puts around texts, unless that is only
    the end of sequence.
    """
    files = files_digest(model_folder(model), TOKENIZER)
    template = "" if model.chat_template is None else f" {Path(model.chat_template).read_text()}"
    template += f" {json.dumps(model.chat_template_kwargs, sort_keys=True)}" if model.chat_template_kwargs else ""
    around = _tokens_around(model) if writes else ""
    return hashlib.sha256(f"{files}{template}{around}".encode()).hexdigest() if template or around else files


def _tokens_around(model: ModelConfig) -> str:
    """The tokens before a prompt without a chat template, and after an answer with one, as text for a digest."""
    tokenizer = load_tokenizer(model)
    before = beginning([], tokenizer)
    known = _ends(generation_config(model), tokenizer)
    after = [token for token in end_of_turn(tokenizer)[-1:] if token not in known]
    around = {"before": [] if tokenizer.chat_template else before, "after": after}
    return f" {json.dumps(around)}" if any(around.values()) else ""


def initial_digest(model: ModelConfig, seed: int) -> str:
    """sha256 over the initial weights of a role: the model's files, and the settings and seed of new adapters."""
    base = files_digest(model_folder(model))
    if model.lora is None:
        return base
    return hashlib.sha256(f"{base} {model.lora.model_dump_json()} {seed}".encode()).hexdigest()


def actor_skeleton(model: ModelConfig, seed: int = 0, *, trainable: bool = True) -> Skeleton:
    """Build a causal language model without weights, for a train engine.

    Args:
        model: the model.
        seed: seed of new adapters.
        trainable: whether the model is trained: its weights are then float32; otherwise they have `model.dtype`, the
            type of the computation.

    Raises:
        UserError: the folder lacks a weight.
    """
    from transformers import AutoModelForCausalLM

    skeleton, missing = _skeleton(AutoModelForCausalLM, model, dtype="float32" if trainable else model.dtype)
    if missing:
        raise UserError(f"{model.path} lacks {missing[0]}: it is not a complete {type(skeleton.model).__name__}")
    return _adapted(skeleton, model, seed)


def critic_skeleton(model: ModelConfig, seed: int = 0) -> Skeleton:
    """Build a backbone with a value head (a token classifier with one label), without weights, for a train engine.

    A new head starts at zero, so that all values are 0 at first. If the folder has a head, from an earlier critic or a
    reward model, it is kept.

    Args:
        model: the backbone.
        seed: seed of new adapters.

    Raises:
        UserError: the folder lacks a weight other than the head, or its head has several labels.
    """
    from transformers import AutoModelForTokenClassification

    return _with_head(AutoModelForTokenClassification, model, seed, "critic")


def load_actor(model: ModelConfig, seed: int = 0, *, trainable: bool = True) -> PreTrainedModel:
    """Load a causal language model whole into host memory; see `actor_skeleton`."""
    return actor_skeleton(model, seed, trainable=trainable).load()


def load_critic(model: ModelConfig, seed: int = 0) -> PreTrainedModel:
    """Load a backbone with a value head whole into host memory; see `critic_skeleton`."""
    return critic_skeleton(model, seed).load()


def load_scorer(model: ModelConfig, seed: int = 0) -> PreTrainedModel:
    """Load a reward model to train: a sequence classifier with one label, whose new head starts at zero."""
    from transformers import AutoModelForSequenceClassification

    return _with_head(AutoModelForSequenceClassification, model, seed, "reward model").load()


def _with_head(auto_class: Any, model: ModelConfig, seed: int, purpose: str) -> Skeleton:
    import torch

    from ratchet.rlhf.models.skeleton import Skeleton
    from ratchet.rlhf.weights.stored_state import Held

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
    """Add adapters, if the config has any."""
    from ratchet.rlhf.models.skeleton import extended

    settings = model.lora
    if settings is None:
        return skeleton
    if not skeleton.sources:
        lora.add(skeleton.model, settings, seed)
        return skeleton
    return extended(skeleton, lambda base: lora.add(base, settings, seed), lora.base_name)


def load_reward_model(model: RewardModelConfig) -> PreTrainedModel:
    """Load a reward model in its `dtype`: a sequence classifier, or a token classifier for process rewards."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    auto = AutoModelForTokenClassification if model.kind == "process" else AutoModelForSequenceClassification
    skeleton, missing = _skeleton(auto, model, dtype=model.dtype)
    if missing:
        raise _not_a_reward_model(model, missing[0])
    return skeleton.load()


def check_reward_model(model: RewardModelConfig) -> None:
    """Refuse a reward model without a head, before any response is generated."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    folder = model_folder(model)
    stored: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            stored.update(file.keys())
    auto = AutoModelForTokenClassification if model.kind == "process" else AutoModelForSequenceClassification
    config = model_config(model, "reward.model")
    with torch.device("meta"):
        whole = auto.from_config(config, trust_remote_code=model.trust_remote_code)
    prefix = f"{whole.base_model_prefix}."
    for name, _ in whole.named_parameters():
        if not name.startswith(prefix) and name not in stored:
            raise _not_a_reward_model(model, name)


def _not_a_reward_model(model: RewardModelConfig, missing: str) -> UserError:
    fix = "`ratchet reward-model` trains one" if model.kind == "outcome" else "name a token classifier"
    return UserError(f"reward.model {model.path} lacks {missing}: it is not a reward model of kind {model.kind}; {fix}")


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a Hugging Face model folder, with adapters merged into the weights."""
    from transformers.core_model_loading import revert_weight_conversion

    from ratchet.rlhf.weights.weight_files import as_umask_says, save_file

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


def _skeleton(
    auto_class: Any, model: ModelConfig, *, dtype: str, num_labels: int | None = None
) -> tuple[Skeleton, list[str]]:
    """Build a model without weights, and list the parameters that its folder lacks.

    A model whose files cannot be read by range is loaded whole.

    Args:
        auto_class: transformers' class of the model.
        model: the model.
        dtype: type of the weights.
        num_labels: number of labels of a classifier; None: that of the folder.
    """
    import torch
    from transformers.utils import logging

    from ratchet.rlhf.models.skeleton import Skeleton, Unreadable, folder_state, say_whole, sources, without_memory

    folder = model_folder(model)
    logging.set_verbosity_error()  # transformers would warn about a critic's new head
    logging.disable_progress_bar()
    config = model_config(model, num_labels=num_labels)
    _without_noise(config)
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
    """Refuse a folder whose tensors have other shapes than the model's parameters."""
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


NOISE = ("dropout", "pdrop", "layerdrop", "drop_path", "droppath", "jitter")
"""Parts of the names of config fields that make a model's outputs random in training."""


def _without_noise(config: PreTrainedConfig) -> None:
    """Set all dropout and noise fields of a config to 0, in place.

    An update must compute the log-probs of the network that generated, so nothing may be random. The fields must be set
    before the model is built, because many architectures copy the numbers into their layers.
    """
    for name, value in vars(config).items():
        if any(part in name for part in NOISE) and isinstance(value, float | int):
            setattr(config, name, 0.0)
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            _without_noise(inner)


def attention_of(model: ModelConfig) -> tuple[str, str | None]:
    """The attention kernel to use for a model, and the reason if it is not the configured one."""
    if model.attention != "sdpa":
        return model.attention, None
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = model_config(model)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "eager", "it caps the logits of its attention, which sdpa leaves out"
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa:
        return "eager", "transformers has no sdpa for it"
    return model.attention, None


def eos_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All tokens that end a response, sorted.

    They are the tokenizer's end of sequence, the ends of the generation config, and the last token with which the chat
    template ends a turn.
    """
    return tuple(sorted({*_ends(generation, tokenizer), end_of_turn(tokenizer)[-1]}))


def _ends(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = getattr(generation, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [])} | (
        {configured} if isinstance(configured, int) else set()
    )


def generation_config(model: ModelConfig) -> GenerationConfig | None:
    """The generation config that a model loaded from the folder has."""
    from transformers import GenerationConfig

    folder = model_folder(model)
    if (folder / GENERATION_CONFIG).is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(model_config(model))


def config_json(model: PreTrainedModel) -> bytes:
    """The config.json of a model, with its actual class: a critic has another class than the folder it came from."""
    name = type(model).__name__.removeprefix("FSDP")
    return json.dumps(
        model.config.to_diff_dict() | {"architectures": [name]}, sort_keys=True, indent=1, default=str
    ).encode()
