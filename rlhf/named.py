"""What a config names: a built-in of ours, ``package.module:name``, or ``folder/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.errors import UserError


def load_named(name: str, key: str, package: str, attribute: str, built_in: Sequence[str]) -> Any:
    """What a name stands for; a built-in is the `attribute` of a module in `package`. Raises `UserError`, in which
    `key` is where the name stands."""
    module_name, colon, wanted = name.rpartition(":")
    if not colon:
        module_name, wanted = name if name.endswith(".py") else f"{package}.{name}", attribute
    try:
        found = getattr(_module(module_name), wanted)
    except Exception as error:  # whatever a user's module raises as it is imported
        raise UserError(
            f"{key} {name}: {type(error).__name__}: {error}; name a built-in ({', '.join(built_in)}), "
            f"package.module:{wanted} or file.py:{wanted}"
        ) from None
    if not callable(found):
        raise UserError(f"{key} {name} is not a function or a class")
    return found


def source_of(found: Any, key: str, name: str) -> str:
    """The source of the module that holds it, by which a change of it is known."""
    try:
        return Path(inspect.getsourcefile(found) or "").read_text()
    except (OSError, TypeError):
        raise UserError(f"{key} {name} has no Python source to take a digest of: wrap it") from None


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    own = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # that hides no other module
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[own] = importlib.util.module_from_spec(spec)  # where classes look for their own
    spec.loader.exec_module(module)
    return module
