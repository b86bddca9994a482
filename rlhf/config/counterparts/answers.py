"""Answers about keys that our config lacks, but another program has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ratchet.rlhf.config.counterparts.translation import Assumed, Counterpart, NoEqual, Settings, Source, Value
from ratchet.rlhf.config.reading import yaml_text
from ratchet.rlhf.errors import UserError


def answers(key: str, value: Value, sections: Sequence[str], sources: Sequence[Source]) -> dict[str, str]:
    """Explains what to write instead of another program's keys; empty if no program has any of them.

    Args:
        value: the value of the unknown key; a section is answered key by key.
    """
    leaves = _leaves(key, value)
    answered = {leaf: _answer(leaf, given, sections, sources) for leaf, given in leaves.items()}
    if not any(answered.values()):
        return {}
    return {leaf: text or f"{leaf} is not a key of the config" for leaf, text in answered.items()}


def _answer(key: str, value: Value, sections: Sequence[str], sources: Sequence[Source]) -> str | None:
    for source in sources:
        row, today = source.counterpart(key), source.today(key)
        if row is not None and (today in row.theirs or key.split(".")[0] not in sections):
            return _explained(f"{key} is a key of {source.name}", source, row, today, value)
    for source in sources:
        for row in source.counterparts:
            for name in row.theirs:
                if row.is_direct and _is_alike(key, name, row.ours, source):
                    return _explained(f"{key} is not a key of the config", source, row, name, value)
    return None


def _is_alike(key: str, theirs: str, ours: Sequence[str], source: Source) -> bool:
    """Returns True if a key is one of theirs except for its section: actor.learning_rate is TRL's learning_rate."""
    section, _, last = key.rpartition(".")
    is_same = key.replace(".", "_") in [name.replace(".", "_") for name in (theirs, *source.older_names(theirs))]
    return is_same or (theirs.rpartition(".")[2] == last and ours[0].startswith(f"{section}.") and section != "")


def _explained(what: str, source: Source, row: Counterpart, key: str, value: Value) -> str:
    if not row.ours:
        return f"{what.split()[0]} has no counterpart here ({row.note}): remove it"
    if not row.is_direct:
        return f"{what}: it is {' and '.join(row.ours)} here{f' ({row.note})' if row.note else ''}"
    try:
        converted = row.convert(Settings({key: value}, source.defaults))
    except (NoEqual, UserError) as reason:
        return f"{what}, and {value} has no counterpart here: {reason}"
    pairs = (f"{ours}={yaml_text(new.value if isinstance(new, Assumed) else new)}" for ours, new in converted.items())
    written = " ".join(pairs)
    return f"{what}: write {written or row.ours[0]}" + (f" ({row.note})" if row.note else "")


def _leaves(key: str, value: Value) -> dict[str, Value]:
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    leaves: dict[str, Value] = {}
    for name, inner in value.items():
        leaves |= _leaves(f"{key}.{name}", inner)
    return leaves
