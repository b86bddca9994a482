"""Reads the settings of another program from a YAML or TOML file, a shell script or a command line."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ratchet.rlhf.config import read_yaml, yaml_text
from ratchet.rlhf.config.counterparts import SOURCES, Source, Value
from ratchet.rlhf.config.published import SECRET
from ratchet.rlhf.config.reading import plain_value
from ratchet.rlhf.convert.shell import launches, read_script
from ratchet.rlhf.errors import UserError, in_one_line

STARTS = {"verl": ("verl", "dapo", "ppo"), "trl": ("trl", ".py"), "openrlhf": ("openrlhf",), "prime-rl": ("prime_rl",)}
"""Parts of the names of modules and files that start each program."""


FINE_TUNING, PAIRS = "supervised fine-tuning: see `ratchet sft`", "learning from pairs or labels is not here"
REWARD_MODEL, OTHER = (
    "a reward model: see `ratchet reward-model`",
    "a trainer that is not converted; GRPO's and PPO's are",
)
NOT_CONVERTED = {
    **dict.fromkeys(("sft",), FINE_TUNING),
    **dict.fromkeys(("rm", "prm", "reward", "modeling"), REWARD_MODEL),
    **dict.fromkeys(("dpo", "kto", "bco", "cpo", "orpo", "tpo", "mpo"), PAIRS),
    **dict.fromkeys(("generation", "eval", "serve"), "no training: see `ratchet evaluate`"),
    **dict.fromkeys(
        ("rloo", "online", "xpo", "nash", "gkd", "gold", "distillation", "sdft", "sdpo", "ssd", "async"), OTHER
    ),
}
"""What modules and files of these programs start besides, by the words of their names."""


@dataclass(frozen=True)
class Given:
    """The settings in a file."""

    source: Source
    where: str
    settings: Mapping[str, Value]
    """By today's keys."""
    names: Mapping[str, str]
    """The file's own keys, by today's keys."""
    assumptions: tuple[str, ...]
    """Assumptions made in reading the file, one sentence each."""

    def shown(self, key: str) -> str:
        """Formats a setting as text; without its value if the key is that of a secret."""
        name = self.names[key]
        return name if SECRET.search(name) else f"{name}={yaml_text(self.settings[key])}"


def read_settings(path: Path, program: str, overrides: Sequence[str]) -> Given:
    """Reads another program's settings from a file, and from its command line's `overrides`.

    Raises:
        UserError: the file cannot be read, or starts no such program.
    """
    assumptions: tuple[str, ...] = ()
    if path.suffix in (".yaml", ".yml", ".json"):
        settings = _resolved(dict(_leaves(read_yaml(path))))
        arguments: Sequence[str] = ()
    elif path.suffix == ".toml":
        settings, arguments = dict(_leaves(_read_toml(path))), ()
    else:
        settings = {}
        arguments, assumptions = _arguments(path, program)
    settings |= (
        _overrides(str(path), [*arguments, *overrides]) if program == "verl" else _options([*arguments, *overrides])
    )
    sources = [source for source in SOURCES if source.program == program]
    # a program with several trainers has several tables
    source = max(sources, key=lambda source: sum(source.counterpart(key) is not None for key in settings))
    names = {source.today(key): key for key in settings}
    today = {source.today(key): _at_home(value) for key, value in settings.items()}
    known = sum(source.counterpart(key) is not None for key in today)
    if known == 0 or known < len(today) / 2:  # a few names are common to many programs
        raise UserError(f"{path} has no settings of {source.name}: give the file, or another --from")
    return Given(source, str(path), today, names, assumptions)


def _arguments(path: Path, program: str) -> tuple[Sequence[str], tuple[str, ...]]:
    """Returns the arguments with which a script starts the program, and the assumptions made to find them."""
    if path.suffix == ".py":
        raise UserError(f"{path} is a Python program, which is not read: give the command that starts it, in a script")
    try:
        script = read_script(path.read_text(), str(path), os.environ)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text: give a YAML file or a shell script") from None
    started = [
        (name, arguments)
        for name, arguments in launches(script.commands)
        if any(part in name for part in STARTS[program])
    ]
    if not started:
        raise UserError(f"{path} has no command that starts {program}: give the script that does, or another --from")
    name, arguments = started[-1]
    # a launcher has the module as its first argument
    module = next((text for text in arguments[:1] if re.fullmatch(r"[\w.]+", text)), name)
    words = re.findall(r"[a-z]+", f"{name.rpartition('/')[2]}.{module}".removesuffix(".py"))
    for word in words:
        if word in NOT_CONVERTED:
            raise UserError(f"{path} starts {name}: {NOT_CONVERTED[word]}")
    assumptions = script.assumptions
    if len(started) > 1:
        assumptions += (f"of {len(started)} commands the last one counts, {name}",)
    if "vlm" in words:
        assumptions += (f"{name} trains the vision tower without adapters, too: so does model.freeze_vision=false",)
    return arguments, assumptions


def _overrides(where: str, arguments: Sequence[str]) -> dict[str, Value]:
    """Reads Hydra's overrides as plain values; ``~a.b`` removes a key."""
    settings: dict[str, Value] = {}
    for before, argument in zip(["", *arguments], arguments, strict=False):
        key, equals, text = argument.partition("=")
        is_value = not equals and before.startswith("-") and "=" not in before
        if argument.startswith(("-", "hydra.")) or is_value:
            continue  # an option of Hydra, such as --config-name, or its value
        if argument.startswith("~"):
            settings.pop(key[1:], None)
        elif not equals:
            raise UserError(f"{where}: {argument!r} is not an override: it should be key=value")
        else:
            settings |= dict(_leaves({key.lstrip("+"): _value(text)}))
    return settings


def _options(arguments: Sequence[str]) -> dict[str, Value]:
    """Reads options such as ``--lr 1e-6``, ``--lr=1e-6`` and ``--enable``; several values are a list."""
    settings: dict[str, Value] = {}
    key, values = None, []
    for argument in [*arguments, "--"]:
        if not re.match(r"--(?!\d)|-[a-z]", argument):
            values.append(_value(argument))
            continue
        if key is not None:
            settings[key] = True if not values else values[0] if len(values) == 1 else values
        name, equals, text = argument.lstrip("-").partition("=")
        key, values = name.replace("-", "_"), [_value(text)] if equals else []
    return settings


def _value(text: str) -> Value:
    """Parses a value in YAML's syntax; anything else is text."""
    try:
        value: Value = plain_value(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) and not text.startswith("{") else value


def _at_home(value: Value) -> Value:
    """Expands ``~/`` in a value."""
    if isinstance(value, list | tuple):
        return [_at_home(item) for item in value]
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def _read_toml(path: Path) -> dict[str, Value]:
    """Reads TOML; a list of tables becomes a table by position."""

    def numbered(value: Value) -> Value:
        if isinstance(value, Mapping):
            return {name: numbered(inner) for name, inner in value.items()}
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            return {str(position): numbered(item) for position, item in enumerate(value)}
        return value

    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {in_one_line(str(error))}") from None
    if "orchestrator" not in tree:
        raise UserError(
            f"{path} has no section orchestrator, so it starts no reinforcement learning: see `ratchet sft`"
        )
    return {name: numbered(value) for name, value in tree.items()}


def _leaves(tree: Mapping[str, Value], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}", value


REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*(.*))?\}", re.DOTALL)


def _resolved(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Replaces OmegaConf's references to other keys; those that cannot be resolved are left out, like ``???``."""
    resolved: dict[str, Value] = {}
    for key, value in settings.items():
        # a reference may lead to others, or in a circle
        for _ in range(10):
            match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is None:
                break
            name = key.rpartition(".")[0] + match[1] if match[1].startswith(".") else match[1]
            value = settings.get(name, None if match[2] is None else _value(match[2]))
        if value is not None and value != "???" and not (isinstance(value, str) and "${" in value):
            resolved[key] = value
    return resolved
