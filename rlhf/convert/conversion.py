"""Converts a file of another program's settings into a commented config."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.rlhf.algorithms import Advantage, PolicyLoss
from ratchet.rlhf.config import RunConfig, parse_config, yaml_text
from ratchet.rlhf.config.counterparts import Assumed, NoEqual, Settings, Value
from ratchet.rlhf.config.engines import ENGINES
from ratchet.rlhf.config.reading import models_in
from ratchet.rlhf.convert.sources import Given, read_settings
from ratchet.rlhf.errors import UserError, counted

WIDTH = 120


@dataclass(frozen=True)
class Line:
    """A key of the config, its value, and its comment."""

    key: str
    value: Value
    comment: str
    theirs: tuple[str, ...] = ()
    """The other program's keys behind it."""
    is_default: bool = False
    """True if it is only a default of the other program."""


@dataclass(frozen=True)
class Conversion:
    """A converted config."""

    lines: tuple[Line, ...]
    without_equal: tuple[str, ...]
    """Settings without a counterpart, and why, one sentence each."""
    assumptions: tuple[str, ...]
    """Assumptions made in reading the file, one sentence each."""
    where: str
    """The file that was converted."""
    program: str
    """The program whose settings it has."""

    @property
    def tree(self) -> dict[str, Value]:
        """The config as nested sections."""
        tree: dict[str, Value] = {}
        for line in self.lines:
            section = tree
            *parents, last = line.key.split(".")
            for part in parents:
                inner = section.setdefault(part, {})
                if isinstance(inner, str):  # the type alone
                    inner = section[part] = {"type": inner}
                assert isinstance(inner, dict)
                section = inner
            options = section.get(last)
            section[last] = {"type": line.value, **options} if isinstance(options, dict) else line.value
        return tree

    @property
    def summary(self) -> str:
        """The extent of the conversion, in a sentence."""
        converted, others = counted(len(self.lines), "key"), len(self.without_equal)
        without = "1 setting has" if others == 1 else f"{others} settings have"
        return converted + (f"; {without} no counterpart: the comments at its end say why" if others else "")

    def config(self) -> RunConfig:
        """Returns the validated config. Raises UserError, with one line per mistake."""
        return parse_config(self.tree, self.where)

    def text(self) -> str:
        """Formats the config as YAML, with the origin of each line, assumptions, and unconverted settings as
        comments."""
        keys = {line.key for line in self.lines}
        # if an engine has options, the comment belongs to its type
        comments = {
            f"{line.key}.type" if any(key.startswith(f"{line.key}.") for key in keys) else line.key: line.comment
            for line in self.lines
        }
        parts = [f"# Converted from {_printable(self.where)} ({self.program}) by `ratchet convert`.\n"]
        parts += [_list("Assumed in reading the script:", self.assumptions)]
        parts += _sections(self.tree, comments, "")
        parts += [_list(f"Settings of {self.program} without a counterpart here:", self.without_equal)]
        return "".join(parts)


def convert(path: Path, program: str, overrides: Sequence[str] = ()) -> Conversion:
    """Converts a file of another program's settings.

    Args:
        path: a YAML or TOML file, or a shell script that starts the program; the script is read, not run.
        program: the program's name in lower case: verl, trl, openrlhf or prime-rl.

    Raises:
        UserError: the file cannot be read, or starts no such program; or settings have the wrong type, one line each.
    """
    given = read_settings(path, program, overrides)
    settings = Settings(given.settings, given.source.defaults, _rows)
    owners = {key: given.source.counterpart(key) for key in given.settings}
    lines: dict[str, Line] = {}
    reasons: dict[str, str] = {}
    mistakes: dict[str, None] = {}
    for row in given.source.counterparts:
        keys = [key for key in given.settings if key in row.theirs or owners[key] is row]
        try:
            converted = row.convert(settings)
        except NoEqual as reason:
            reasons |= {key: str(reason) for key in keys}
            continue
        except UserError as error:
            mistakes |= dict.fromkeys(str(error).splitlines())
            continue
        for line in _lines(converted, keys, given):
            # the first row that sets a key wins, but for defaults
            if line.key not in lines or (lines[line.key].is_default and not line.is_default):
                lines[line.key] = line
    mistakes |= {_unknown(key, given): None for key, row in owners.items() if row is None}
    if mistakes:
        raise UserError("\n".join(f"{given.where}: {mistake}" for mistake in mistakes))
    lines = {key: line for key, line in lines.items() if not line.is_default or line.value != _default(key, lines)}
    for key in list(lines):
        if engine := _other_engine(key, lines):
            reasons |= dict.fromkeys(lines.pop(key).theirs, f"{engine} has no {key.rpartition('.')[2]}")
    used = {key for line in lines.values() for key in line.theirs}
    without_equal = {key: reasons.get(key, "it changes nothing here") for key in given.settings if key not in used}
    sections = list(RunConfig.model_fields)
    return Conversion(
        tuple(sorted(lines.values(), key=lambda line: sections.index(line.key.split(".")[0]))),
        tuple(f"{given.shown(key)}: {reason}" for key, reason in without_equal.items()),
        given.assumptions,
        given.where,
        given.source.name,
    )


def _unknown(key: str, given: Given) -> str:
    known = sorted({name for row in given.source.counterparts for name in row.theirs if not name.endswith("*")})
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    hint = f"is it {near[0]}? If not, remove it" if near else "remove it"
    return f"{given.shown(key)} is not a known setting of {given.source.name}: {hint}"


def _lines(converted: Mapping[str, Value | Assumed], keys: Sequence[str], given: Given) -> Iterator[Line]:
    """Yields the lines of a row: what was given or assumed, and defaults of the program."""
    names = ", ".join(given.names[key] for key in keys)
    for key, value in converted.items():
        if isinstance(value, Assumed):
            yield Line(key, value.value, f"{names}: {value.why}" if names else value.why, tuple(keys))
        elif keys:
            yield Line(key, value, names, tuple(keys))
        else:
            yield Line(key, value, f"{given.source.name.split()[0]}'s default", is_default=True)


def _other_engine(key: str, lines: Mapping[str, Line]) -> str | None:
    """Returns the chosen engine, if the key is an option that it lacks; else None."""
    holder, _, option = key.rpartition(".")
    if not holder.endswith(".engine"):
        return None
    chosen = str(lines[holder].value) if holder in lines else str(_default(f"{holder}.type", lines))
    return None if option in ENGINES[chosen].model_fields else f"{holder} {chosen}"


def _default(key: str, lines: Mapping[str, Line]) -> Value:
    """Returns our default at a dotted key, or a text that equals no value if there is none."""
    holder, _, option = key.rpartition(".")
    if holder.endswith(".engine") and option != "type":
        defaults = {
            engine.model_fields[option].get_default() for engine in ENGINES.values() if option in engine.model_fields
        }
        default: Value = defaults.pop()  # the engines agree
        return default
    if holder in ALGORITHMS and option != "type" and f"{holder}.type" in lines:  # the algorithms do not agree
        kind = lines[f"{holder}.type"].value
        model = next(model for model in models_in(ALGORITHMS[holder]) if model.model_fields["type"].default == kind)
        default = model.model_fields[option].get_default(call_default_factory=True)
        return default
    if holder and key.endswith(".engine"):
        key += ".type"
    config: object = DEFAULTS
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return "there is no default"
        config = config[part]
    return config  # type: ignore[return-value]


ALGORITHMS = {"algorithm.advantage": Advantage, "algorithm.loss": PolicyLoss}
DEFAULTS = parse_config({"model": {"path": "model"}, "data": {"train": "prompts"}}, "defaults").model_dump(mode="json")


def _rows(names: Sequence[str]) -> int | None:
    from ratchet.rlhf.data.files import count
    from ratchet.rlhf.data.hub_datasets import hub_dataset

    if not names or any(hub_dataset(name) for name in names):  # which is not downloaded for this
        return None
    try:
        return sum(count(name) for name in names)
    except UserError:
        return None


def _sections(tree: Mapping[str, Value], comments: Mapping[str, str], prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in comments:
            yield f"{indent}{name}:\n"
            yield from _sections(value, comments, f"{key}.")
            continue
        line, comment = f"{indent}{name}: {yaml_text(value)}", _printable(comments[key])
        if len(line) + len(comment) + 4 <= WIDTH:
            yield f"{line}  # {comment}\n"
        else:
            yield _commented(comment, indent) + f"{line}\n"


def _list(title: str, sentences: Sequence[str]) -> str:
    items = (_commented(f"- {_printable(sentence)}", "", "  ") for sentence in sentences)
    return f"\n# {title}\n{''.join(items)}\n" if sentences else ""


def _commented(text: str, indent: str, hanging: str = "") -> str:
    first, rest = f"{indent}# ", f"{indent}# {hanging}"
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{line}\n" for line in lines)


def _printable(text: str) -> str:
    """Returns the text on one line, so that it cannot leave its comment."""
    return "".join(character for character in " ".join(text.split()) if character.isprintable())
