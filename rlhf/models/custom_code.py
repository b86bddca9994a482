"""Finds the Python code in a model folder, which transformers runs with `trust_remote_code`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.rlhf.errors import UserError

if TYPE_CHECKING:
    from ratchet.rlhf.config import ModelConfig

OTHER_REPOSITORY = "--"
"""Separates a repository from a class of its code."""
GENERATION = "custom_generate"
"""Folder of code that replaces a model's `generate`."""


def code_files(folder: Path) -> list[Path]:
    """Returns the code files of a model folder, sorted: modules that its `auto_map` names, and their relative
    imports."""
    from transformers.dynamic_module_utils import get_relative_import_files

    found = set((folder / GENERATION).rglob("*.py"))
    for name in code_names(folder):
        module = folder / f"{name.split('.')[0]}.py"
        if OTHER_REPOSITORY not in name and module.is_file():
            try:
                imported = get_relative_import_files(module)
            except (OSError, UnicodeDecodeError):  # one is missing, or is not text: transformers will report it
                imported = []
            found |= {module, *map(Path, imported)}
    return sorted(filter(Path.is_file, found))


def code_names(folder: Path) -> list[str]:
    """Returns the classes that `auto_map`s of a model folder's files name, as ``module.Class``, sorted."""
    return sorted({name for path in folder.glob("*.json") for name in _named(path)})


def _named(path: Path) -> Iterator[str]:
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return
    mapped = settings.get("auto_map") if isinstance(settings, dict) else None
    values = mapped.values() if isinstance(mapped, dict) else [mapped]
    for value in values:
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str):
                yield name


def needs_code(model: ModelConfig, key: str = "model") -> UserError:
    """Returns the error for a model whose code may not run."""
    return UserError(
        f"{key}.path {model.path} has Python code of its own, which it needs: read it, and set "
        f"{key}.trust_remote_code=true"
    )
