"""Types the overrides of a config as a parameter of flows, which the server checks before it starts a flow run."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import WithJsonSchema

from ratchet.rlhf.config import RunConfig, keys

FORM = "KEY=VALUE, with a KEY that `ratchet train --help` lists"


def _pattern() -> str:
    """Matches overrides of a section, a key, the type of an algorithm, or a key of a mapping that exist."""
    known: dict[str, bool] = {}
    for key, kind, *_ in keys(RunConfig):
        name = re.sub(r"\[.*?\]", "", key)
        parts = name.split(".")
        known |= {
            ".".join(parts[:depth]): False for depth in range(1, len(parts)) if ".".join(parts[:depth]) not in known
        }
        known[name] = known.get(name, False) or "mapping" in kind
        known |= {f"{section}.type": False for section in re.findall(r"^([^\[]+)\[", key)}
    names = (name.replace(".", r"\.") + (r"(\..+)?" if holds_any else "") for name, holds_any in known.items())
    return rf"^\+?\+?({'|'.join(names)})="


Override = Annotated[
    str,
    WithJsonSchema({"type": "string", "if": {"not": {"pattern": _pattern()}}, "then": {"enum": [FORM]}}),
]
"""A change of one value of a config, such as ``actor.lr=1e-5``. For a pattern alone, the server's error would show only
the pattern; the enumeration makes it show the override and the form of overrides."""
