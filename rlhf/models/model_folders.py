"""Finds and downloads model folders, checks their files, and computes their digests."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.custom_code import code_files

if TYPE_CHECKING:
    from ratchet.rlhf.config import ModelConfig

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", CONFIG, "*.safetensors.index.json")
TOKENIZER = ("tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "chat_template*")
"""Files in a tokenizer's digest; another pattern would change the digests of stored runs."""
OF_TOKENIZERS = (*TOKENIZER, "added_tokens.json", "*.tiktoken", "preprocessor_config.json", "processor_config.json")
"""All files of tokenizers, and of processors of images."""
GENERATION_CONFIG = "generation_config.json"
WITHOUT_WEIGHTS = [CONFIG, *OF_TOKENIZERS, GENERATION_CONFIG, "*.jinja", "*.py"]
"""Files of a model on the hub that are used if servers compute it."""
DOWNLOADED = [*WEIGHTS, *WITHOUT_WEIGHTS]
"""Files of a model on the hub that are used."""


def model_folder(model: ModelConfig, key: str = "model", *, download: bool = True) -> Path:
    """Returns the folder of a model's files, in the cache if it is on the hub; without `download` it must be there."""
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
        files = WITHOUT_WEIGHTS if model.is_served else DOWNLOADED
        return Path(snapshot_download(model.path, allow_patterns=files, local_files_only=not download))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{key}.path {model.path} is not a local folder, and the download failed: {first}") from None


def hub_name(model: ModelConfig) -> str | None:
    """Returns the name of a model on the hub; None for a local folder, even one that does not exist."""
    is_name = model.path.count("/") == 1 and not model.path.startswith((".", "/"))
    return model.path if is_name and not Path(model.path).is_dir() else None


def base_models(model: ModelConfig) -> list[str]:
    """Returns the names on the hub of a model's base models: its own, or those in its folder's model card."""
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
    except (OSError, ValueError, YAMLError):  # others wrote the card: it may be malformed
        return []
    return names


def files_digest(folder: Path, patterns: tuple[str, ...] = WEIGHTS) -> str:
    """Returns the sha256 of the names and contents of the files in a folder that match the patterns."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        status = path.stat()
        digest.update(f"{path.name}\0{_file_digest(path, status.st_size, status.st_mtime_ns)}\0".encode())
    return digest.hexdigest()


@cache  # several roles may start from one model, whose files take a minute to read at 32 B
def _file_digest(path: Path, size: int, modified_ns: int) -> str:
    """Returns the sha256 of a file; size and time of modification are part of the cache's key."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def initial_digest(model: ModelConfig, seed: int) -> str:
    """Returns the sha256 of a role's initial weights: the model's files, replaced fields of its config, and the
    settings and seed of new adapters. Of a model that servers compute, the only such file is its config."""
    # what servers compute is known by its config only
    base = files_digest(model_folder(model), (CONFIG,) if model.is_served else WEIGHTS)
    if model.args:
        base = hashlib.sha256(f"{base} {json.dumps(model.args, sort_keys=True)}".encode()).hexdigest()
    if model.lora is None:
        return base
    return hashlib.sha256(f"{base} {model.lora.model_dump_json()} {seed}".encode()).hexdigest()


def check_weights(folder: Path, key: str = "model") -> None:
    """Raises UserError for a folder without readable safetensors."""
    from safetensors import SafetensorError, safe_open

    paths = sorted(folder.glob("*.safetensors"))
    if not paths and (gguf := sorted(folder.glob("*.gguf"))):
        raise UserError(
            f"{key}.path {folder} holds GGUF weights ({gguf[0].name}), which are quantized: name the model's folder of "
            "safetensors"
        )
    if not paths:
        raise UserError(f"{key}.path {folder} holds no safetensors: convert its weights with save_pretrained")
    for path in paths:
        try:
            safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}") from None


def parameter_count(folder: Path) -> int:
    """Returns the number of parameters in a model folder, from the headers of its files."""
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


def copy_code(model: ModelConfig, folder: Path) -> None:
    """Copies the code in a model's folder, none of which runs."""
    source = model_folder(model)
    for path in code_files(source):
        if path.is_relative_to(source):
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
