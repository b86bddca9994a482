"""Config values in publishable form: without secrets, and without the folders of one machine."""

from __future__ import annotations

import re

from pydantic import JsonValue

SECRET = re.compile(
    r"(token|secret|password|passwd|credentials?|authorization|(api|access|private|secret)_?key|wandb(\.key)?)$",
    re.IGNORECASE,
)
"""Keys whose values are secret."""
LEFT_OUT = "(left out)"

_LOGIN = re.compile(r"(?<=://)[^/\s]*@")
_QUERY = re.compile(r"(\w://[^\s?#]*)[?#]\S*")
_FOLDERS = re.compile(r"(?<![^\s=:,;\"'(\[{])(?:(?:file|local)://)?(?:~[^\s/]*|/[^\s/]+)(?:/[^\s/]+)*/")
"""The folders of an absolute path, from its beginning or from the home folder."""


def published(value: JsonValue) -> JsonValue:
    """Copies a config, or a part of one, without details of the machine or the people that ran it.

    Returns:
        The same values, except: values of keys that are named like secrets are left out, URLs have no user, password or
        query, and of an absolute local path only the last part is left, as in ``…/train.parquet``.
    """
    if isinstance(value, dict):
        return {published_text(key): _inner(key, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [published(inner) for inner in value]
    return published_text(value) if isinstance(value, str) else value


def published_text(text: str) -> str:
    """Copies a text in the same way."""
    return _FOLDERS.sub("…/", _QUERY.sub(r"\1", _LOGIN.sub("", text)))


def _inner(key: str, value: JsonValue) -> JsonValue:
    return LEFT_OUT if SECRET.search(key) and value else published(value)
