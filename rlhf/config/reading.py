"""Reads YAML and overrides into a validated model, and turns validation errors into one readable line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from ratchet.rlhf.errors import UserError

M = TypeVar("M", bound=BaseModel)


def read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        tree = plain_value(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} should hold sections such as `model:` and `data:`")
    return tree


def overridden(tree: dict[str, Any], overrides: Iterable[str], model: type[BaseModel]) -> dict[str, Any]:
    """Applies overrides to a config, in place; returns it.

    Args:
        overrides: ``a.b=c``, with values in YAML syntax; Hydra's ``+a.b=c`` and ``++a.b=c`` mean the same. A plain text
            for a section (``rollout.environment=calculator``) is set before the keys of that section.
    """
    changes: list[tuple[str, Any]] = []
    for section, value in map(_change, overrides):
        position = len(changes)
        if isinstance(value, str) and _shorthand(model, section) is not None:
            inside = (index for index, (key, _) in enumerate(changes) if key.startswith(f"{section}."))
            position = next(inside, position)
        changes.insert(position, (section, value))
    for key, value in changes:
        write_out(tree, key, model)
        set_value(tree, key, value)
    return tree


def write_out(tree: dict[str, Any], key: str, model: type[BaseModel]) -> None:
    """Replaces plain texts that stand for the sections around a key by those sections, so that the key can be set."""
    parts = key.split(".")
    section: Any = tree
    for depth, part in enumerate(parts[:-1], 1):
        shorthand = _shorthand(model, ".".join(parts[:depth]))
        if isinstance(section.get(part), str) and shorthand is not None:
            section[part] = {shorthand: section[part]}
        section = section.get(part)
        if not isinstance(section, dict):
            return


def _shorthand(model: type[BaseModel], key: str) -> str | None:
    """Returns the key that a plain text sets if it is given in place of the section at `key`; None if it cannot be."""
    options = [model]
    for part in key.split("."):
        fields = [option.model_fields[part].annotation for option in options if part in option.model_fields]
        options = [inner for field in fields for inner in _sections(field)]
    if any("type" in option.model_fields for option in options):
        return "type"
    keys_alone = (getattr(option, "alone", None) for option in options)
    return next((str(key_alone) for key_alone in keys_alone if key_alone is not None), None)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Returns the models that a value of this type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return models_in(annotation)


def _change(override: str) -> tuple[str, Any]:
    """Parses the key and the value of an override."""
    key, equals, text = override.partition("=")
    key = re.sub(r"^\+{1,2}", "", key)
    if not equals or not key:
        raise UserError(f"{override!r} is not an override: write key.subkey=value, such as actor.lr=1e-5")
    try:
        return key, plain_value(text)
    except yaml.YAMLError:
        raise UserError(f"{override!r}: {text!r} is not a YAML value") from None


def validated(model: type[M], tree: Mapping[str, Any], where: str, context: object = None) -> M:
    """Validates a tree against a model. Raises UserError: one line per wrong key, which starts with `where`."""
    try:
        return model.model_validate(tree, context=context)
    except ValidationError as error:
        problems: dict[str, str] = {}
        # a key that takes several types has a problem for each type: only the first is kept
        for problem in error.errors():
            for key, text in _explain(problem, tree, model).items():
                problems.setdefault(key, text)
        lines = [line for text in problems.values() for line in text.splitlines()]
        raise UserError("\n".join(f"{where}: {line}" for line in lines)) from None


INTERNAL: dict[str, JsonValue] = {"internal": True}
"""`json_schema_extra` of a field that users do not set."""


def keys(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Returns every key of the config that users set as (key, type, default, meaning), in order."""
    rows: list[tuple[str, str, str, str]] = []
    for name, field in model.model_fields.items():
        if field.json_schema_extra == INTERNAL:
            continue
        key, annotation = prefix + name, field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += keys(annotation, f"{key}.")
            continue
        default = "required" if field.is_required() else yaml_text(field.get_default())
        rows.append((key, _type_name(annotation), default, field.description or ""))
        options = models_in(annotation)
        shared = _shared_base(options)
        common = keys(shared, "") if shared is not None else []
        rows += [(f"{key}.{name}", *rest) for name, *rest in common]  # type: ignore[misc]
        for option in options:
            shown = f"{key}[{_tag(option)}]." if "type" in option.model_fields else f"{key}."
            rows += [(shown + row[0], *row[1:]) for row in keys(option) if row[0] != "type" and row not in common]
    return rows


def _shared_base(options: Sequence[type[BaseModel]]) -> type[BaseModel] | None:
    """Returns the nearest common base class of several choices; all of them have its options."""
    if len(options) < 2:
        return None
    bases = (base for base in options[0].__mro__ if issubclass(base, BaseModel) and base is not BaseModel)
    return next((base for base in bases if all(issubclass(option, base) for option in options)), None)


def yaml_text(value: Any) -> str:
    """Formats a value as YAML on one line."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Describes the differences between two configs of plain values, such as ``actor.lr 1e-05 -> 2e-05``."""
    lines: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        old_value, new_value = before.get(name), now.get(name)
        if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
            lines += differences(old_value, new_value, f"{prefix}{name}.")
        elif old_value != new_value:
            lines.append(f"{prefix}{name} {yaml_text(old_value)} -> {yaml_text(new_value)}")
    return lines


def set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value at a dotted key, in place; missing sections are created."""
    *parents, last = key.split(".")
    for part in parents:
        inner = tree.get(part)
        if inner is None:
            inner = tree[part] = {}
        if not isinstance(inner, dict):
            raise UserError(f"{key}: {part} is a value, not a section")
        tree = inner
    before = tree.get(last)
    if isinstance(before, dict) and "type" in before and isinstance(value, dict) and "type" not in value:
        value = before | value  # options without a type keep the chosen algorithm
    tree[last] = value


class _Loader(yaml.SafeLoader):
    """Reads 1e-5 as a number, as YAML 1.2 does; in YAML 1.1 it is text (the number is 1.0e-5)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def plain_value(text: str) -> Any:
    """Parses YAML, in which 1e-5 is a number."""
    return yaml.load(text, _Loader)


def _explain(problem: ErrorDetails, tree: Mapping[str, Any], model: type[BaseModel]) -> dict[str, str]:
    """Explains what is wrong and how to fix it, by key, with a line for each key of another program."""
    key = _key(problem["loc"], tree)
    is_foreign = problem["type"] == "extra_forbidden" and not _choices_with(key, model)
    if is_foreign and "rollout" in model.model_fields:
        from ratchet.rlhf.config.counterparts import SOURCES, answers  # only errors need the tables

        foreign = answers(key, problem["input"], tuple(model.model_fields), SOURCES)
        if foreign:
            return foreign
    return {key: _explain_key(key, problem, model)}


PENALTY = (
    "it lowers a token's probability by what came before, which the trainer's log-probs do not, so every importance "
    "ratio would be wrong: use a reward against repetition instead"
)
REFUSED = {f"rollout.{name}_penalty": PENALTY for name in ("repetition", "presence", "frequency")}
"""Keys that users of other programs look for, left out on purpose, with the reason."""


def _explain_key(key: str, problem: ErrorDetails, model: type[BaseModel]) -> str:
    message, given = problem["msg"], problem["input"]
    if problem["type"] == "union_tag_not_found":
        return f"{key}.type is missing: set it"
    if problem["type"] == "union_tag_invalid":
        own = ", or package.module:Class or file.py:Class" if "built-in" in problem["loc"] else ""
        known = problem["ctx"]["expected_tags"]
        return f"{key}.type is {problem['ctx']['tag']!r}: input should be one of {known}{own}"
    if problem["type"] == "extra_forbidden" and key in REFUSED:
        return f"{key} is not supported: {REFUSED[key]}"
    if problem["type"] == "extra_forbidden" and (others := _choices_with(key, model)):
        holder = key.rpartition(".")[0]
        chosen = next(part for part in reversed(problem["loc"][:-1]) if isinstance(part, str))
        choose = f", or set {holder}.type to {' or '.join(others)}"
        return f"{key} is no option of {chosen}, but of {listed(others)}: remove it{choose}"
    if problem["type"] == "extra_forbidden":
        lists = "`ratchet train --help`" if "rollout" in model.model_fields else "docs/configuration.md"
        return f"{key} is not a key of the config{_near(key, model)}; {lists} lists them"
    if problem["type"] == "missing" or given is None:
        required = [re.sub(r"\[.*?\]", "", name) for name, _, default, _ in keys(model) if default == "required"]
        inside = [name for name in required if name.startswith(f"{key}.")]
        if inside or problem["type"] == "missing":
            return "\n".join(f"{name} is missing: set it" for name in inside or [key])
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        return f"{key} is {given!r}: it should be a section, such as {{key: value}}"
    if problem["type"] in ("tuple_type", "list_type"):
        return f"{key} is {given!r}: it should be a list, such as [a, b]"
    message = message.removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key and not message.startswith(key) else message
    return f"{key} is {given!r}: {message[0].lower()}{message[1:]}"


def _choices_with(key: str, model: type[BaseModel]) -> list[str]:
    """Returns the choices of a section with a `type` that have an option of this name."""
    holder, _, option = key.rpartition(".")
    known = (re.fullmatch(r"(.*)\[(.*)\]\.(.*)", name) for name, *_ in keys(model))
    return [found[2] for found in known if found and (found[1], found[3]) == (holder, option)]


def listed(names: Sequence[str]) -> str:
    """Joins names as in a sentence, such as ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _near(key: str, model: type[BaseModel]) -> str:
    """Returns a question that names the most similar keys; empty if there are none."""
    known = {re.sub(r"\[.*?\]", "", name) for name, *_ in keys(model)}
    similar = get_close_matches(key, known, n=2, cutoff=0.8)
    return f" (is it {' or '.join(similar)}?)" if similar else ""


def _key(location: Sequence[str | int], tree: Any) -> str:
    """Returns the dotted key of a location in the tree, without the algorithm types that pydantic adds to locations."""
    parts = []
    for depth, part in enumerate(location, 1):
        if part == tree or part in ("built-in", "user"):
            continue  # a section given by its type alone, or whose code it is
        if isinstance(tree, Mapping) and part not in tree and (depth < len(location) or tree.get("type") == part):
            continue
        parts.append(str(part))
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            tree = None
    return ".".join(parts)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the models that a type annotation contains."""
    models: list[type[BaseModel]] = []
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            models.append(part)
        else:
            models += models_in(part)
    return models


def _tag(choice: type[BaseModel]) -> str:
    """Returns the `type` of a choice; what the user's own classes are called if it has no value."""
    tag = choice.model_fields["type"]
    return "package.module:Class" if tag.is_required() else str(tag.get_default())


def _type_name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (Any, JsonValue):
        return "any value"
    if origin is Literal:
        return " or ".join(yaml_text(arg) for arg in args)
    if annotation is type(None):
        return "null"
    if origin is tuple:
        return f"list of {_type_name(args[0])}"
    if origin in (dict, Mapping):
        return f"mapping of {'/'.join(_type_name(args[0]).split(' or '))} to {_type_name(args[1])}"
    if origin is not None and args:
        names = [_type_name(arg) for arg in args if isinstance(arg, type) or get_origin(arg) is not None or arg is Any]
        return (", or " if any(" of " in name for name in names) else " or ").join(names)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _tag(annotation) if "type" in annotation.model_fields else "section"
    return str(getattr(annotation, "__name__", annotation))
