"""What a stage sees of the config: the keys that its spec names, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from rlhf.config import RunConfig


class ConfigView:
    """`RunConfig` narrowed to some keys. Reading another raises `AttributeError`, so that the fingerprint of a stage,
    which hashes just these keys, cannot miss one."""

    def __init__(self, config: RunConfig, keys: Iterable[str], prefix: str = "") -> None:
        self._config = config
        self._keys = tuple(keys)
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        key = f"{self._prefix}{name}"
        if any(key == allowed or key.startswith(f"{allowed}.") for allowed in self._keys):
            return self._attribute(key)
        if any(allowed.startswith(f"{key}.") for allowed in self._keys):
            return None if self._attribute(key) is None else ConfigView(self._config, self._keys, f"{key}.")
        raise AttributeError(f"config key {key} is read here, but the stage's spec names only {', '.join(self._keys)}")

    def values(self) -> dict[str, Any]:
        """The JSON values of the keys; for those of a section that is null, that it is."""
        return {key: self._config.value(key) for key in map(self._there, self._keys)}

    def _there(self, key: str) -> str:
        """The key, or the section of it that is null."""
        parts = key.split(".")
        sections = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        return next((section for section in sections if self._attribute(section) is None), key)

    def chosen(self, keys: Iterable[str]) -> dict[str, Any]:
        """The JSON values, by dotted key, in which the config differs from the defaults: a key that a later release
        adds, and that nobody has set, is not among them."""
        return {leaf: value for key in keys for leaf, value in self._chosen(key).items()}

    def _chosen(self, key: str) -> dict[str, Any]:
        section, _, name = key.rpartition(".")
        holder = self._attribute(section) if section else self._config
        if not isinstance(holder, BaseModel):  # a section that is null holds nothing
            return {}
        return _differing(key, getattr(holder, name), type(holder).model_fields[name].get_default())

    def _attribute(self, key: str) -> Any:
        found: Any = self._config
        for part in key.split("."):
            found = getattr(found, part)
        return found


def _is_tag(field: FieldInfo) -> bool:
    """Whether it can only have one value."""
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def _differing(key: str, value: Any, default: Any) -> dict[str, Any]:
    if not isinstance(value, BaseModel):
        return {} if value == default else {key: to_jsonable_python(value)}
    found = {} if type(value) is type(default) or default is PydanticUndefined else {key: type(value).__name__}
    for name, field in type(value).model_fields.items():
        if not _is_tag(field):  # the class's name says it
            found |= _differing(f"{key}.{name}", getattr(value, name), field.get_default())
    return found
