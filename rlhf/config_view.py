"""What a stage sees of the config: the keys that its spec names, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
            return ConfigView(self._config, self._keys, f"{key}.")
        raise AttributeError(f"config key {key} is read here, but the stage's spec names only {', '.join(self._keys)}")

    def values(self) -> dict[str, Any]:
        """The JSON values of the keys."""
        return {key: self._config.value(key) for key in self._keys}

    def _attribute(self, key: str) -> Any:
        found: Any = self._config
        for part in key.split("."):
            found = getattr(found, part)
        return found
