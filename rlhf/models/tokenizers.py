"""Loads and copies the tokenizers of models, and computes their digests."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.rlhf.data.chat_turns import state_of
from ratchet.rlhf.data.prompts import beginning, end_of_turn
from ratchet.rlhf.data.responses import set_response_ends
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.custom_code import needs_code
from ratchet.rlhf.models.hf_configs import generation_config, text_config
from ratchet.rlhf.models.image_processor import ImageProcessor, sees_images
from ratchet.rlhf.models.model_folders import (
    OF_TOKENIZERS,
    TOKENIZER,
    copy_code,
    files_digest,
    model_folder,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from ratchet.rlhf.config import ModelConfig

NAMED = 3
"""Number of tokens that an error lists."""
TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"


def load_tokenizer(model: ModelConfig, *, writes: bool = True) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model; raises UserError if it cannot be loaded, or does not fit the config.

    If the model `writes`, the tokenizer needs an end-of-sequence token.
    """
    tokenizer = _tokenizer(model, model_folder(model), runs_code=model.trust_remote_code)
    if writes and tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {model.path} has no end-of-sequence token: set eos_token in its config")
    if model.chat_template is not None:
        _set_template(tokenizer, model.chat_template)
    if model.chat_template_kwargs:
        _set_variables(tokenizer, model)
    state_of(tokenizer).images = image_processor(model)
    if writes and (model_folder(model) / "generation_config.json").is_file():
        set_response_ends(tokenizer, _ends(generation_config(model), tokenizer))
    return tokenizer


@cache
def image_processor(model: ModelConfig) -> ImageProcessor | None:
    """Returns the processor of a model's images, one per process; None if the model reads text only."""
    if not sees_images(model):
        return None
    return ImageProcessor(model, _tokenizer(model, model_folder(model), runs_code=model.trust_remote_code))


def reading_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads a tokenizer to read the tokens of a stored run; raises UserError if it cannot.

    Whatever the run's config says, no code of the model runs, and nothing is downloaded.
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
            raise needs_code(model) from None
        if "trust_remote_code" in str(error):
            raise UserError(
                f"the tokenizer of model.path {model.path} needs Python code of its own, which does not run where a "
                "run is only read"
            ) from None
        first = str(error).splitlines()[0]
        raise UserError(f"cannot load the tokenizer of model.path {model.path}: {first}") from None
    return tokenizer


def _set_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    from jinja2 import TemplateError

    try:
        tokenizer.chat_template = Path(path).read_text()
        # tried at once, so that an error names the file
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise UserError(f"chat_template {path} is not a chat template: {error}") from None


def _set_variables(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Sets variables at the beginning of the chat template, so that they hold wherever it is used."""
    template = tokenizer.chat_template
    for name in model.chat_template_kwargs:
        if not name.isidentifier() or not isinstance(template, str) or name not in template:
            raise UserError(
                f"model.chat_template_kwargs has {name}, which the chat template of {model.path} does not use: remove "
                "it"
            )
    # Jinja understands Python's literals
    variables = "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in model.chat_template_kwargs.items())
    tokenizer.chat_template = variables + template


def has_chat_template(model: ModelConfig) -> bool:
    """Returns True if a chat template renders the prompts of a model, judged by its files: no code runs."""
    source = model_folder(model)
    settings = source / TOKENIZER_CONFIG
    return (
        model.chat_template is not None
        or (source / TEMPLATE).is_file()
        or (settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template")))
    )


def copy_tokenizer(model: ModelConfig, folder: Path) -> None:
    """Copies the tokenizer of a model, with the configured chat template and with its code, none of which runs.

    Values of `model.chat_template_kwargs` are left out: users of the model set their own.
    """
    source = model_folder(model)
    for path in {path for pattern in OF_TOKENIZERS for path in source.glob(pattern) if path.is_file()}:
        shutil.copyfile(path, folder / path.name)
    copy_code(model, folder)
    if model.chat_template is not None:
        (folder / TEMPLATE).write_text(Path(model.chat_template).read_text())
        settings = folder / TOKENIZER_CONFIG
        if settings.is_file():  # not every program lets the template's file take precedence
            others = json.loads(settings.read_text()) | {"chat_template": None}
            del others["chat_template"]
            settings.write_text(json.dumps(others, indent=2, ensure_ascii=False))


def check_embeddings(tokenizer_of: ModelConfig, *models: ModelConfig) -> None:
    """Raises UserError, with a line for each, for models without an embedding for every token of `tokenizer_of`."""
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


def eos_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns all tokens that end a response, sorted.

    They are the tokenizer's end-of-sequence token, those of the generation config, and the last token with which the
    chat template ends a turn.
    """
    return tuple(sorted({*_ends(generation, tokenizer), end_of_turn(tokenizer)[-1]}))


def _ends(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = getattr(generation, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [])} | (
        {configured} if isinstance(configured, int) else set()
    )


def tokenizer_digest(model: ModelConfig, *, writes: bool = True) -> str:
    """Returns the sha256 of the tokenizer's files and the configured chat template.

    If the model `writes`, it also covers the tokens that Ratchet puts around texts, unless that is only the
    end-of-sequence token.
    """
    files = files_digest(model_folder(model), TOKENIZER)
    template = "" if model.chat_template is None else f" {Path(model.chat_template).read_text()}"
    template += f" {json.dumps(model.chat_template_kwargs, sort_keys=True)}" if model.chat_template_kwargs else ""
    around = _tokens_around(model) if writes else ""
    return hashlib.sha256(f"{files}{template}{around}".encode()).hexdigest() if template or around else files


def _tokens_around(model: ModelConfig) -> str:
    """Returns the tokens around texts (prompts without a chat template, answers with one) as text for a digest."""
    tokenizer = load_tokenizer(model)
    before = beginning([], tokenizer)
    known = _ends(generation_config(model), tokenizer)
    after = [token for token in end_of_turn(tokenizer)[-1:] if token not in known]
    around = {"before": [] if tokenizer.chat_template else before, "after": after}
    return f" {json.dumps(around)}" if any(around.values()) else ""
