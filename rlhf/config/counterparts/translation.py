"""Types of the tables that translate another program's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ratchet.rlhf.config.reading import yaml_text
from ratchet.rlhf.errors import UserError

Value: TypeAlias = bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"] | None


class NoEqual(Exception):
    """A setting needs no counterpart, because it changes no result; the text says why, or what happens instead."""


@dataclass(frozen=True)
class Assumed:
    """A value that does not follow from the other program's settings alone."""

    value: Value
    why: str


Converted: TypeAlias = Mapping[str, Value | Assumed]
"""Values by our dotted keys."""


def no_rows(files: Sequence[str]) -> int | None:
    """Returns None: the number of rows in prompt files is unknown."""
    return None


@dataclass(frozen=True)
class Settings:
    """The settings of another program's run, by dotted key."""

    given: Mapping[str, Value]
    defaults: Mapping[str, Value] = field(default_factory=dict)
    """The other program's defaults, where they change what is computed."""
    rows: Callable[[Sequence[str]], int | None] = no_rows
    """Counts the rows of prompt files; None if they cannot be read."""

    def __getitem__(self, key: str) -> Value:
        """Returns the value at a key, given or by default; None if it is neither."""
        return self.given.get(key, self.defaults.get(key))

    def has(self, key: str) -> bool:
        """Returns True if a key has a value, given or by default, other than null."""
        return self[key] is not None

    def flag(self, key: str) -> bool:
        """Returns a switch; one without a value is off. Raises UserError for anything but true and false."""
        value = self[key]
        if isinstance(value, bool) or value is None:
            return bool(value)
        raise UserError(f"{key} is {value!r}: it should be true or false")

    def number(self, key: str) -> float:
        """Returns a number. Raises UserError if there is none."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{key} is {value!r}: it should be a number")
        return value

    def count(self, key: str) -> int:
        """Returns a whole number. Raises UserError if there is none."""
        value = self.number(key)
        if value != int(value):
            raise UserError(f"{key} is {value!r}: it should be a whole number")
        return int(value)

    def text(self, key: str) -> str:
        """Returns a text. Raises UserError if there is none."""
        value = self[key]
        if not isinstance(value, str):
            raise UserError(f"{key} is {value!r}: it should be a text")
        return value

    def texts(self, key: str) -> list[str]:
        """Returns a list of texts; a single one may stand alone. Raises UserError if there is none."""
        value = self[key]
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple) or not all(isinstance(item, str) for item in values):
            raise UserError(f"{key} is {value!r}: it should be a text, or a list of texts")
        return [str(item) for item in values]


Conversion: TypeAlias = Callable[[Settings], Converted]


@dataclass(frozen=True)
class Counterpart:
    """A row of a table: settings of another program, and their counterparts here."""

    theirs: tuple[str, ...]
    """Keys of the other program; ``a.*`` stands for all keys in a section."""
    ours: tuple[str, ...]
    """Our keys; empty if there is no counterpart."""
    note: str
    """The difference between the two, or why there is no counterpart."""
    convert: Conversion
    """Converts the settings. Raises `NoEqual` for values without a counterpart."""
    is_direct: bool = False
    """True if our value depends on this setting only."""

    def matches(self, key: str) -> bool:
        """Returns True if a key of the other program belongs to this row."""
        return any(key == name or (name.endswith(".*") and key.startswith(name[:-1])) for name in self.theirs)


def direct(theirs: str, ours: str, note: str = "", *, values: Mapping[str, Value] | None = None) -> Counterpart:
    """Builds a row in which one key has another name.

    Args:
        values: our value for each text of theirs; others are errors. By default the value is unchanged.
    """

    def convert(settings: Settings) -> Converted:
        value = settings[theirs]
        if value is None:
            return {}
        if values is None:
            return {ours: value}
        if str(value) not in values:
            raise UserError(f"{theirs} is {value}, which {ours} does not have: choose one of {', '.join(values)}")
        return {ours: values[str(value)]}

    return Counterpart((theirs,), (ours,), note, convert, is_direct=True)


def computed(
    theirs: str | Iterable[str], ours: str | Iterable[str], convert: Conversion, note: str = ""
) -> Counterpart:
    """Builds a row whose values depend on several settings."""
    return Counterpart(_names(theirs), _names(ours), note, convert)


def without_equal(theirs: str | Iterable[str], why: str) -> Counterpart:
    """Builds a row of keys that change no result and have no counterpart."""

    def convert(settings: Settings) -> Converted:
        raise NoEqual(why)

    return Counterpart(_names(theirs), (), why, convert)


def refused(theirs: str | Iterable[str], why: str, *, unless: Iterable[Value] = (False,)) -> Counterpart:
    """Builds a row of keys that change the result and have no counterpart: giving one is an error.

    Args:
        unless: values with which the setting changes nothing here, besides null.
    """
    names, neutral = _names(theirs), [yaml_text(value) for value in unless]

    def convert(settings: Settings) -> Converted:
        row = Counterpart(names, (), why, convert)
        given = [key for key, value in settings.given.items() if row.matches(key) and value is not None]
        mistakes: dict[str, str] = {}
        for key in given:
            if yaml_text(settings[key]) not in neutral:
                # the keys of a section are one mistake
                section = next((name[:-2] for name in names if name.endswith(".*") and key.startswith(name[:-1])), key)
                what = f"{key} is {yaml_text(settings[key])}" if section == key else f"{section} is set ({key})"
                mistakes.setdefault(section, f"{what}: {why}")
        if mistakes:
            raise UserError("\n".join(mistakes.values()))
        raise NoEqual("it is so here")

    return Counterpart(names, (), why, convert)


def _names(keys: str | Iterable[str]) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else tuple(keys)


@dataclass(frozen=True)
class Source:
    """Another program, and its table."""

    name: str
    counterparts: tuple[Counterpart, ...]
    defaults: Mapping[str, Value]
    """Its defaults, where they change what is computed."""
    older: Mapping[str, str]
    """Older names of its keys, and today's."""
    program: str
    """Its name for `ratchet convert --from`; a program with several trainers has several tables."""

    def today(self, key: str) -> str:
        """Returns today's name of a key."""
        for old, new in self.older.items():
            if key == old:
                return new
            if old.endswith(".*") and key.startswith(old[:-1]):
                return new.removesuffix("*") + key.removeprefix(old[:-1])
        return key

    def older_names(self, key: str) -> list[str]:
        """Returns older names of one of today's keys."""
        names = []
        for old, new in self.older.items():
            if key == new:
                names.append(old)
            elif (
                new.endswith(".*")
                and key.startswith(new[:-1])
                and self.today(old[:-1] + key.removeprefix(new[:-1])) == key
            ):
                names.append(old[:-1] + key.removeprefix(new[:-1]))
        return names

    def counterpart(self, key: str) -> Counterpart | None:
        """Returns the row of a key, by today's or an older name; of several, the one of this key alone."""
        today = self.today(key)
        rows = [row for row in self.counterparts if row.matches(today)]
        return next((row for row in rows if row.is_direct), rows[0] if rows else None)
