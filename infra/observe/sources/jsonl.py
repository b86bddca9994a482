"""JSON lines of any program, with a mapping of its fields to Ratchet's columns."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.infra.observe.sources.lines import complete_lines, is_cut, parsed
from ratchet.infra.observe.sources.source import Content, Unit, content_of
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import TRAJECTORY

ITERATION = "iteration"
SPLIT = "split"


class JSONLines:
    """A file, or a folder of files, with one trajectory per line."""

    def __init__(self, path: Path, mapping: Mapping[str, str], trainer: str = "jsonl") -> None:
        """Takes the files and the mapping.

        Args:
            path: a file, or a folder of ``*.jsonl``.
            mapping: the field of each column, such as ``{"prompt": "input"}``; dots lead into objects. Columns are
                those of docs/columns.md, `iteration`, and `split`, whose value ``validation`` marks held-out prompts.
                Columns that it leaves out are the fields of the same name.

        Raises:
            UserError: there are no such files, or no such column.
        """
        self.trainer = trainer
        self.config: Mapping[str, Any] = {}
        self.model: str | None = None
        self._files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not self._files or not all(file.is_file() for file in self._files):
            raise UserError(f"{path}: there are no JSON lines (a file, or a folder of *.jsonl)")
        known = {ITERATION, SPLIT, *(column.name for column in TRAJECTORY.columns)}
        if unknown := [name for name in mapping if name not in known]:
            raise UserError(f"--map {unknown[0]}=…: there is no such column; columns are {', '.join(sorted(known))}")
        self._mapping = dict(mapping)

    def units(self) -> Iterator[Unit]:
        """See `Source.units`. The last step of a file whose last line is cut is still being written."""
        for file in self._files:
            yield from self._units_of(file)

    def _units_of(self, file: Path) -> Iterator[Unit]:
        places: dict[tuple[int, bool], array[int]] = {}
        digests: dict[tuple[int, bool], Any] = {}
        last: tuple[int, bool] | None = None
        for number, position, line in complete_lines(file):
            where = f"{file}, line {number}"
            row = parsed(line, where)
            last = key = (self._iteration(row, where), self._value(row, SPLIT) in ("validation", "val", "eval", "test"))
            places.setdefault(key, array("q")).extend((number, position, len(line)))
            digests.setdefault(key, hashlib.sha256()).update(line)
        if is_cut(file) and last is not None:
            del places[last]
        for (iteration, is_validation), where_lines in places.items():
            yield Unit(
                number=iteration,
                digest=digests[iteration, is_validation].hexdigest(),
                where=str(file),
                read=partial(self._read, file, where_lines),
                is_validation=is_validation,
            )

    def _read(self, file: Path, places: array[int]) -> Content:
        rows = []
        with file.open("rb") as opened:
            for number, position, size in zip(places[::3], places[1::3], places[2::3], strict=True):
                opened.seek(position)
                rows.append(parsed(opened.read(size), f"{file}, line {number}"))
        return content_of([self._columns(row) for row in rows], [self._rest(row) for row in rows])

    def _iteration(self, row: Mapping[str, Any], where: str) -> int:
        value = self._value(row, ITERATION)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            field = self._mapping.get(ITERATION, ITERATION)
            raise UserError(
                f"{where}: the field {field!r} is no number of a step: name the field that is (--map iteration=FIELD); "
                f"fields are {', '.join(row)}"
            )
        return int(value)

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        names = (column.name for column in TRAJECTORY.columns)
        return {name: value for name in names if (value := self._value(row, name)) is not None}

    def _rest(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that no column takes."""
        taken = {field.partition(".")[0] for field in self._mapping.values()}
        taken |= {name for name in row if name in TRAJECTORY or name in (ITERATION, SPLIT)} - set(self._mapping)
        return {f"source_{name}": value for name, value in row.items() if name not in taken}

    def _value(self, row: Mapping[str, Any], column: str) -> Any:
        value: Any = row
        for part in self._mapping.get(column, column).split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value
