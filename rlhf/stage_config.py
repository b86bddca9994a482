"""The keys of the run's config that a stage depends on.

A stage declares a model whose fields name keys and sections of the config:

    class UpdateCriticConfig(StageConfig):
        seed: int = key("run.seed")
        trainer: UpdateConfig = section("critic")

The stage can read no other part of the config. The values are committed with the stage's output. If a key that is not
operational changes later, the committed output is out of date.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.reading import set_value
from ratchet.rlhf.config.section import Section


def key(path: str, *, operational: bool = False) -> Any:
    """Returns a field that holds the value at a dotted key of the run's config; None if the key's section is null.

    Args:
        operational: the key may change without changing the result: speed, memory, paths of files.
    """
    return Field(json_schema_extra={"key": path, "operational": operational})


def section(path: str) -> Any:
    """Returns a field that holds a section of the run's config, or the keys of it that a base class declares.

    The field's type is the section's class or its base class; None if the section is null. The class declares which
    keys are operational.
    """
    return Field(json_schema_extra={"section": path})


class StageConfig(BaseModel):
    """The part of a run's config that a stage depends on. Each field is a `key` or a `section`."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Extracts the stage's part of a run's config."""
        fields: dict[str, object] = {}
        for name, field in cls.model_fields.items():
            part = _part(field)
            fields[name] = _value(config, str(_extra(field)["key"])) if part is None else part.of(config)
        return cls.model_validate(fields)

    @classmethod
    def keys(cls, *, operational: bool | None = None) -> Iterator[str]:
        """Yields the dotted keys: all, only the operational ones (True), or only the others (False)."""
        for field in cls.model_fields.values():
            if (part := _part(field)) is not None:
                yield from part.keys(operational)
            elif operational in (None, _extra(field)["operational"]):
                yield str(_extra(field)["key"])

    @classmethod
    def values(cls, config: RunConfig) -> dict[str, JsonValue]:
        """Returns the JSON values by dotted key; for a null section, the section's key with null."""
        paths = [_key_or_null_section(config, path) for path in cls.keys()]  # noqa: SIM118  (not a dictionary)
        return {path: _json(_value(config, path)) for path in paths}

    @classmethod
    def differences(cls, then: Mapping[str, JsonValue], config: RunConfig) -> list[str]:
        """Describes the changes since `then`, except in operational keys, such as ``actor.lr: 1e-05 -> 2e-05``.

        Args:
            then: the result of `values` when the stage was committed. A missing key did not exist then: it counts as
                unchanged while it has its default.
        """
        tree: dict[str, Any] = {}
        for path, value in then.items():
            set_value(tree, path, value)
        lines = cls._section_changes(tree, config)
        for path in cls.keys(operational=False):
            holder, _, name = path.rpartition(".")
            default = _section_class(holder).model_fields[name].get_default()
            now = _value(config, path) if _key_or_null_section(config, path) == path else default
            held = _value(config, holder) if holder else config
            operational = held.operational if isinstance(held, Section) else frozenset()
            lines += _changes(path, _lookup(tree, path, _json(default)), now, operational)
        return lines

    @classmethod
    def _section_changes(cls, tree: Mapping[str, Any], config: RunConfig) -> list[str]:
        """Describes sections that were null and are not any more, or the reverse."""
        lines: list[str] = []
        for part in filter(None, map(_part, cls.model_fields.values())):
            path = part.path
            before, now = _lookup(tree, path, PydanticUndefined), _value(config, path)
            if before is not PydanticUndefined and (before is None) != (now is None):
                states = ["null" if value is None else "set" for value in (before, now)]
                lines.append(f"{path}: {' -> '.join(states)}")
        return lines


@dataclass(frozen=True)
class _Part:
    """A section of the run's config, or the keys of it that a base class declares."""

    path: str
    declares: type[Section]

    def of(self, config: RunConfig) -> Section | None:
        held = _value(config, self.path)
        if held is None or type(held) is self.declares:
            return held
        # the values are valid already
        return self.declares.model_construct(**{name: getattr(held, name) for name in self.declares.model_fields})

    def keys(self, operational: bool | None) -> Iterator[str]:
        for name in self.declares.model_fields:
            if operational in (None, name in self.declares.operational):
                yield f"{self.path}.{name}"


def _part(field: FieldInfo) -> _Part | None:
    if not isinstance(field.json_schema_extra, dict) or "section" not in field.json_schema_extra:
        return None
    options = (field.annotation, *get_args(field.annotation))
    declares = next(option for option in options if isinstance(option, type) and issubclass(option, Section))
    return _Part(str(field.json_schema_extra["section"]), declares)


def _extra(field: FieldInfo) -> dict[str, Any]:
    assert isinstance(field.json_schema_extra, dict), "a field of a stage's config is made by `key`"
    return field.json_schema_extra


def _json(value: Any) -> Any:
    """Returns the stored JSON value; a missing default stays missing."""
    return value if value is PydanticUndefined else to_jsonable_python(value)


def _value(config: RunConfig, path: str) -> Any:
    """Returns the value at a dotted key; None if a section on the path is null."""
    value: Any = config
    for part in path.split("."):
        value = None if value is None else getattr(value, part)
    return value


def _key_or_null_section(config: RunConfig, path: str) -> str:
    """Returns the key, or its outermost section that is null."""
    parts = path.split(".")
    sections = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((section for section in sections if _value(config, section) is None), path)


def _section_class(path: str) -> type[BaseModel]:
    """Returns the class of a section of the config, null or not."""
    model: type[BaseModel] = RunConfig
    for part in filter(None, path.split(".")):
        annotation = model.model_fields[part].annotation
        options = (annotation, *get_args(annotation))
        model = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return model


def _lookup(tree: Mapping[str, Any], path: str, default: Any) -> Any:
    value: Any = tree
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _changes(path: str, before: JsonValue, now: Any, operational: frozenset[str]) -> list[str]:
    """Describes the differences at a key or below it: values that are models are compared field by field.

    Args:
        operational: keys of the section around `path` that may change.
    """
    after = _json(now)
    if PydanticUndefined in (before, after) or before == after:
        return []
    if path.endswith(".args"):
        return _argument_changes(path, before, after, operational)
    comparable = isinstance(before, dict) and isinstance(now, BaseModel)
    if not comparable or before.get("type", after.get("type")) != after.get("type"):  # type: ignore[union-attr]
        return [f"{path}: {_short(before, other=after)} -> {_short(after, other=before)}"]
    lines: list[str] = []
    within = now.operational if isinstance(now, Section) else frozenset()
    for name, field in type(now).model_fields.items():
        if name in within:
            continue
        before_value = before.get(name, _json(field.get_default()))  # type: ignore[union-attr]
        lines += _changes(f"{path}.{name}", before_value, getattr(now, name), within)
    return lines


def _argument_changes(path: str, before: JsonValue, now: JsonValue, operational: frozenset[str]) -> list[str]:
    """Describes the differences between arguments of another program, some of which may be operational."""
    if before == now or path[path.index(".args") + 1 :] in operational:
        return []
    if not all(value is None or isinstance(value, dict) for value in (before, now)):
        return [f"{path}: {_short(before, other=now)} -> {_short(now, other=before)}"]
    old, new = before or {}, now or {}
    assert isinstance(old, dict)
    assert isinstance(new, dict)
    names = sorted({*old, *new})
    return [
        line
        for name in names
        for line in _argument_changes(f"{path}.{name}", old.get(name), new.get(name), operational)
    ]


def _short(value: JsonValue, other: JsonValue) -> str:
    """Returns a short text: an algorithm as its type, None as null, a section that was null before as set."""
    if isinstance(value, dict) and ("type" in value or other is None):
        return str(value.get("type", "set"))
    return "null" if value is None else str(value)
