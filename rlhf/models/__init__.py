"""Loading Hugging Face models: actor, critic, tokenizer, and digests of their files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.data.prompts import beginning, end_of_turn
from rlhf.errors import UserError
from rlhf.models import lora

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from rlhf.config import ModelConfig, RewardModelConfig

WEIGHTS = ("*.safetensors", "config.json", "*.safetensors.index.json")
TOKENIZER = ("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "chat_template*")


def model_folder(model: ModelConfig, key: str = "model") -> Path:
    """The folder of a model's files; a name on the hub is downloaded (or found in the cache)."""
    path = Path(model.path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{key}.path {model.path} holds no config.json: it is not a Hugging Face model folder")
        return path
    if path.is_absolute() or model.path.startswith(".") or model.path.count("/") != 1:
        raise UserError(
            f"{key}.path {model.path} does not exist: name a model folder, or a model of the hub (owner/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = [*WEIGHTS, *TOKENIZER, "generation_config.json", "*.jinja"]
        return Path(snapshot_download(model.path, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{key}.path {model.path} is no folder here, and the hub did not give it ({first})") from None


def files_digest(folder: Path, patterns: tuple[str, ...] = WEIGHTS) -> str:
    """sha256 over the names and bytes of a folder's files."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            digest.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()


def check_weights(folder: Path, key: str = "model") -> None:
    """Refuse a folder without readable safetensors."""
    from safetensors import SafetensorError, safe_open

    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise UserError(f"{key}.path {folder} holds no safetensors: convert its weights with save_pretrained")
    for path in found:
        try:
            safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}") from None


def check_architecture(model: ModelConfig, key: str, *, is_critic: bool) -> None:
    """Refuse a model whose architecture transformers does not know as a policy, or as a critic."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig

    known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING if is_critic else MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = "AutoModelForTokenClassification" if is_critic else "AutoModelForCausalLM"
    config = AutoConfig.from_pretrained(model_folder(model, key), trust_remote_code=model.trust_remote_code)
    if type(config) in known or auto_class in (getattr(config, "auto_map", None) or {}):
        return
    instead = "name another one, or an algorithm without a critic (algorithm.advantage: grpo)"
    raise UserError(
        f"{key}.path {model.path}: transformers has no {auto_class} for {config.model_type}, so it cannot be the "
        f"{'critic' if is_critic else 'policy'}: {instead if is_critic else 'name a language model'}"
    )


def load_tokenizer(model: ModelConfig, *, writes: bool = True) -> PreTrainedTokenizerBase:
    """`writes`: for a model that has to end what it writes."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder(model), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"model.path {model.path} holds no tokenizer that can be loaded: {first}") from None
    if writes and tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {model.path} has no end-of-sequence token: set eos_token in its config")
    if model.chat_template is not None:
        _set_template(tokenizer, model.chat_template)
    return tokenizer


def _set_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    from jinja2 import TemplateError

    try:
        tokenizer.chat_template = Path(path).read_text()
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise UserError(f"chat_template {path} is not a chat template: {error}") from None


def tokenizer_digest(model: ModelConfig, *, writes: bool = True) -> str:
    """Of its files, of the chat template that takes the place of theirs, and for a model that `writes` of the tokens
    that this project puts around its texts, where they are not the end of sequence alone."""
    files = files_digest(model_folder(model), TOKENIZER)
    template = "" if model.chat_template is None else f" {Path(model.chat_template).read_text()}"
    around = _tokens_around(model) if writes else ""
    return hashlib.sha256(f"{files}{template}{around}".encode()).hexdigest() if template or around else files


def _tokens_around(model: ModelConfig) -> str:
    """Before a prompt without a chat template, and after an answer with one."""
    tokenizer = load_tokenizer(model)
    before = beginning([], tokenizer)
    known = _ends(generation_config(model), tokenizer)
    after = [token for token in end_of_turn(tokenizer)[-1:] if token not in known]
    found = {"before": [] if tokenizer.chat_template else before, "after": after}
    return f" {json.dumps(found)}" if any(found.values()) else ""


def initial_digest(model: ModelConfig, seed: int) -> str:
    """Of what a role starts from: its model's files, and its adapters if it learns those."""
    base = files_digest(model_folder(model))
    if model.lora is None:
        return base
    return hashlib.sha256(f"{base} {model.lora.model_dump_json()} {seed}".encode()).hexdigest()


def load_actor(model: ModelConfig, seed: int = 0) -> PreTrainedModel:
    """A causal language model, weights in float32 (`dtype` is the type of the computation). The seed is that of new
    adapters."""
    from transformers import AutoModelForCausalLM

    loaded, _ = _load(AutoModelForCausalLM, model)
    if model.lora is not None:
        lora.add(loaded, model.lora, seed)
    return loaded


def load_critic(model: ModelConfig, seed: int = 0) -> PreTrainedModel:
    """The backbone with one number a token on top (a token-classification model with one label).

    A new head starts at zero, so that every value is 0 until the critic has learned; a head that the folder already
    holds (of an earlier critic or a reward model) is kept.
    """
    from transformers import AutoModelForTokenClassification

    return _with_head(AutoModelForTokenClassification, model, seed, "critic")


def load_scorer(model: ModelConfig, seed: int = 0) -> PreTrainedModel:
    """A reward model to train: a sequence classifier with one label, whose head begins as a critic's does."""
    from transformers import AutoModelForSequenceClassification

    return _with_head(AutoModelForSequenceClassification, model, seed, "reward model")


def _with_head(auto_class: Any, model: ModelConfig, seed: int, what: str) -> PreTrainedModel:
    loaded, missing = _load(auto_class, model, num_labels=1)
    parameters = dict(loaded.named_parameters())
    unknown = [name for name in missing if not name.startswith(("score.", "classifier."))]
    if unknown:
        raise UserError(f"{model.path} lacks {unknown[0]}: it is not a backbone for a {what}")
    for name in missing:
        parameters[name].data.zero_()
    if model.lora is not None:
        lora.add(loaded, model.lora, seed)
    return loaded


def load_reward_model(model: RewardModelConfig) -> PreTrainedModel:
    """A sequence classifier, or for a process reward a token classifier, in the type of its computation."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    auto = AutoModelForTokenClassification if model.kind == "process" else AutoModelForSequenceClassification
    loaded, missing = _load(auto, model, dtype=getattr(torch, model.dtype))
    if missing:
        raise _no_reward_model(model, missing[0])
    return loaded.eval()


def check_reward_model(model: RewardModelConfig) -> None:
    """Refuse a folder that holds no head, before anything is generated that it could not score."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

    folder = model_folder(model)
    stored: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            stored.update(file.keys())
    auto = AutoModelForTokenClassification if model.kind == "process" else AutoModelForSequenceClassification
    config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    with torch.device("meta"):
        whole = auto.from_config(config, trust_remote_code=model.trust_remote_code)
    prefix = f"{whole.base_model_prefix}."
    for name, _ in whole.named_parameters():
        if not name.startswith(prefix) and name not in stored:
            raise _no_reward_model(model, name)


def _no_reward_model(model: RewardModelConfig, missing: str) -> UserError:
    mend = "`ratchet reward-model` trains one" if model.kind == "outcome" else "name a token classifier"
    return UserError(f"reward.model {model.path} lacks {missing}: it is no {model.kind} reward model; {mend}")


def save(model: PreTrainedModel, folder: Path) -> None:
    """A Hugging Face model folder; adapters are merged into what they adapt."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if not lora.has(model):
        model.save_pretrained(folder)
        return
    save_file(lora.merged(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes(config_json(model))
    if model.can_generate():
        assert model.generation_config is not None
        model.generation_config.save_pretrained(folder)


def _load(auto_class: Any, model: ModelConfig, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """`options` are of the config, but for `dtype`, the type of the weights."""
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    folder = model_folder(model)
    logging.set_verbosity_error()  # a critic's new head is no reason for a warning
    logging.disable_progress_bar()
    dtype = options.pop("dtype", torch.float32)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code, **options)
    _without_noise(config)
    try:
        loaded, info = auto_class.from_pretrained(
            folder,
            config=config,
            attn_implementation=attention_of(model)[0],
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            dtype=dtype,
        )
    except RuntimeError as error:  # of shapes
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise UserError(
            f"{model.path} is a classifier with several labels: what learns has one number a token, so start from a "
            "model with one label, or from a language model"
        ) from None
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise UserError(
            f"{model.path}: transformers has no {auto_class.__name__} for {config.model_type}: start from another model"
        ) from None
    except ImportError as error:  # of an attention kernel
        first = str(error).splitlines()[0]
        raise UserError(f"model.attention is {model.attention}, which does not work here: {first}") from None
    for module in loaded.modules():  # a classifier's head has a dropout that no config names
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return loaded, sorted(info["missing_keys"])


NOISE = ("dropout", "pdrop", "layerdrop", "drop_path", "droppath", "jitter")
"""What the fields of a config are called that make a model's outputs random while it trains."""


def _without_noise(config: PreTrainedConfig) -> None:
    """The log-probs of an update must be those of the same network that generated, so nothing in it may be random. The
    config has to say so: many architectures copy the numbers into their layers, and call functions with them."""
    for name, value in vars(config).items():
        if any(part in name for part in NOISE) and isinstance(value, float | int):
            setattr(config, name, 0.0)
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            _without_noise(inner)


def attention_of(model: ModelConfig) -> tuple[str, str | None]:
    """The attention kernel that a model is computed with, and if it is not the one in the config, why."""
    if model.attention != "sdpa":
        return model.attention, None
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(model_folder(model), trust_remote_code=model.trust_remote_code)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "eager", "it caps the logits of its attention, which sdpa leaves out"
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa:
        return "eager", "transformers has no sdpa for it"
    return model.attention, None


def eos_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's end of sequence, those of the generation config, and the one
    with which the chat template ends a turn."""
    return tuple(sorted({*_ends(generation, tokenizer), end_of_turn(tokenizer)[-1]}))


def _ends(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = getattr(generation, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [])} | (
        {configured} if isinstance(configured, int) else set()
    )


def generation_config(model: ModelConfig) -> GenerationConfig | None:
    """As a model loaded from the folder has it."""
    from transformers import AutoConfig, GenerationConfig

    folder = model_folder(model)
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    return GenerationConfig.from_model_config(config)


def config_json(model: PreTrainedModel) -> bytes:
    """With the class that the weights are of, which is not that of the folder they came from where a head was added."""
    name = type(model).__name__.removeprefix("FSDP")
    return json.dumps(
        model.config.to_diff_dict() | {"architectures": [name]}, sort_keys=True, indent=1, default=str
    ).encode()
