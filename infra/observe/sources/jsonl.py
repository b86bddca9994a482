"""JSON lines of any program, with a mapping of its fields to Ratchet's columns."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ratchet.infra.observe.sources.lines import complete_lines, is_cut, parsed
from ratchet.infra.observe.sources.source import Content, Unit, content_of
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import IMAGES, TRAJECTORY

ITERATION = "iteration"
SPLIT = "split"
VALIDATIONS = ("validation", "val", "eval", "test")
"""Values of `SPLIT` that mark held-out prompts."""


class JSONLines:
    """A file, or a folder of files, with one trajectory per line."""

    def __init__(self, path: Path, mapping: Mapping[str, str], trainer: str = "jsonl") -> None:
        """Takes the files and the mapping.

        Args:
            path: a file, or a folder of ``*.jsonl``.
            mapping: the field of each column, such as ``{"prompt": "input"}``; dots lead into objects. Columns are
                those of docs/columns.md, `iteration`, and `split`, whose values `VALIDATIONS` mark held-out prompts.
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
        known = {ITERATION, SPLIT, *(column.name for column in TRAJECTORY.columns)} - {
            IMAGES
        }  # those in files are paths
        if unknown := [name for name in mapping if name not in known]:
            raise UserError(f"--map {unknown[0]}=…: there is no such column; columns are {', '.join(sorted(known))}")
        self._mapping = dict(mapping)
        self._direct = known - set(mapping) - {ITERATION, SPLIT}
        self._taken = {field.partition(".")[0] for field in mapping.values()} | ({ITERATION, SPLIT} - set(mapping))

    def units(self) -> Iterator[Unit]:
        """See `Source.units`. Several files may have rows of a step. If the last line of a file is cut, its last step
        is still being written, and so are later ones."""
        places: dict[tuple[int, bool], array[int]] = {}
        digests: dict[tuple[int, bool], Any] = {}
        ends: list[tuple[int, bool]] = []
        for place, file in enumerate(self._files):
            last: tuple[int, bool] | None = None
            for number, position, line in complete_lines(file):
                where = f"{file}, line {number}"
                row = parsed(line, where)
                last = key = (self._iteration(row, where), self._value(row, SPLIT) in VALIDATIONS)
                places.setdefault(key, array("q")).extend((place, number, position, len(line)))
                digests.setdefault(key, hashlib.sha256()).update(line.rstrip(b"\n"))
            if last is not None and is_cut(file):
                ends.append(last)
        for key, of_key in places.items():
            if not ends or key < min(ends):
                yield Unit(
                    number=key[0],
                    digest=digests[key].hexdigest(),
                    where=str(self._files[of_key[0]]),
                    read=partial(self._read, of_key),
                    is_validation=key[1],
                )

    def _read(self, places: array[int]) -> Content:
        rows = []
        for place, lines in groupby(zip(*(places[n::4] for n in range(4)), strict=True), key=itemgetter(0)):
            file = self._files[place]
            with file.open("rb") as opened:
                for _, number, position, size in lines:
                    opened.seek(position)
                    rows.append(parsed(opened.read(size), f"{file}, line {number}"))
        return content_of([self._columns(row) for row in rows], [self._rest(row) for row in rows])

    def _iteration(self, row: Mapping[str, Any], where: str) -> int:
        value = self._value(row, ITERATION)
        if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
            field = self._mapping.get(ITERATION, ITERATION)
            raise UserError(
                f"{where}: the field {field!r} is no number of a step: name the field that is (--map iteration=FIELD); "
                f"fields are {', '.join(row)}"
            )
        return int(value)

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        columns = {name: value for name, value in row.items() if name in self._direct}
        columns |= {name: self._value(row, name) for name in self._mapping if name in TRAJECTORY}
        return {name: value for name, value in columns.items() if value is not None}

    def _rest(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that no column takes."""
        return {
            f"source_{name}": value
            for name, value in row.items()
            if name not in self._direct and name not in self._taken
        }

    def _value(self, row: Mapping[str, Any], column: str) -> Any:
        value: Any = row
        for part in self._mapping.get(column, column).split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value
