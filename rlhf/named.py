"""Loads functions and classes that a config names: a built-in, ``package.module:name`` or ``folder/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ratchet.rlhf.errors import UserError


def load_named(name: str, key: str, package: str, attributes: Sequence[str], built_in: Sequence[str]) -> Any:
    """Loads a function or a class by its name in the config; see `load_object`.

    Raises:
        UserError: the module cannot be imported, or has no such function or class.
    """
    target = load_object(name, key, attributes, package, built_in)
    if not callable(target):
        raise UserError(f"{key} {name} is not a function or a class")
    return target


def load_object(name: str, key: str, attributes: Sequence[str], package: str = "", built_in: Sequence[str] = ()) -> Any:
    """Loads what a config names.

    Args:
        name: a built-in, ``package.module:name`` or ``folder/file.py:name``.
        attributes: possible names in a built-in or a file; the first that exists counts.
        package: package whose modules are the built-ins.

    Raises:
        UserError: the module cannot be imported, or has no such name.
    """
    module_name, colon, attribute_name = name.rpartition(":")
    if not colon:
        module_name, attribute_name = name if name.endswith(".py") else f"{package}.{name}", attributes[0]
    try:
        module = _module(module_name)
        if not colon:
            attribute_name = next((known for known in attributes if hasattr(module, known)), attribute_name)
        target = getattr(module, attribute_name, None)
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported, and a script ends
        known = f"a built-in ({', '.join(built_in)}), " if built_in else ""
        raise UserError(
            f"{key} {name}: {type(error).__name__}: {error}; name {known}package.module:{attribute_name} or "
            f"file.py:{attribute_name}"
        ) from None
    if target is None:
        raise UserError(f"{key} {name}: {module_name} has no {attribute_name}: name a function or a class that it has")
    return target


def source_of(target: Any, key: str, name: str) -> str:
    """Returns the source of the module that defines a function or class; its digest shows when the code changes.

    Raises UserError if there is no Python source.
    """
    try:
        return Path(inspect.getsourcefile(target) or "").read_text()
    except (OSError, TypeError):
        raise UserError(
            f"{key} {name} has no Python source, so changes to it would go unnoticed: wrap it in a Python function"
        ) from None


def line_of(error: Exception, owner: Any) -> str | None:
    """Returns the last line of the owner's file that an exception passed through, as file:line; None: it has none."""
    file = inspect.getsourcefile(owner)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else None


def raised(error: Exception, owner: Any) -> str:
    """Says in one line what the user's code raised, and where."""
    line = line_of(error, owner)
    return f"raised {type(error).__name__}: {' '.join(str(error).split())}" + (f" ({line})" if line else "")


@contextmanager
def blamed(key: str, name: str, owner: Any) -> Iterator[None]:
    """Turns an exception of the user's code into a UserError that names the line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if line_of(error, owner) is None:
            raise
        raise UserError(f"{key} {name} {raised(error, owner)}") from error


class _FromSource(SourceFileLoader):
    """Compiles the file that the user has read: anybody may have written the compiled copy beside it."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    unique_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # must not hide another module
    spec = importlib.util.spec_from_file_location(unique_name, path, loader=_FromSource(unique_name, str(path)))
    assert spec is not None and spec.loader is not None
    module = sys.modules[unique_name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module
