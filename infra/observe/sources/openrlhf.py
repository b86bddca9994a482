"""OpenRLHF's rollouts, as `ratchet.infra.observe.openrlhf.recorded` writes them down."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.infra.observe.sources.lines import complete_lines, parsed
from ratchet.infra.observe.sources.source import Content, Unit, content_of, others
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import IMAGES, TRAJECTORY

Place = tuple[float, Path, int, int, int]
"""A line: its time, file, number, position and size."""


class OpenRLHF:
    """A folder with a file for each process of the rollout."""

    def __init__(self, path: Path) -> None:
        """Takes the folder. Raises UserError if nothing was recorded in it."""
        self.trainer = "openrlhf"
        self.config: Mapping[str, Any] = {}
        self.model: str | None = None
        self._path = path
        if not self._files():
            raise UserError(
                f"{path}: there are no JSON lines, and OpenRLHF writes none by itself: record its rollouts with "
                "ratchet.infra.observe.openrlhf.recorded, in the file of --train.agent_func_path, and name its folder"
            )

    def units(self) -> Iterator[Unit]:
        """See `Source.units`. A step is complete once it has all of its trajectories. A validation may be the last."""
        lines: list[tuple[Place, bool, int]] = []
        for file in self._files():
            for number, position, line in complete_lines(file):
                where = f"{file}, line {number}"
                row = parsed(line, where)
                time, size = row.get("time"), row.get("per_step")
                if not isinstance(time, int | float) or not isinstance(size, int) or size < 1:
                    raise UserError(f"{where}: this is no line of ratchet.infra.observe.openrlhf.recorded")
                lines.append(((time, file, number, position, len(line)), row.get("split") == "validation", size))
        step, training, validation = 0, list[Place](), list[Place]()
        for place, is_validation, size in sorted(lines):
            if is_validation:
                validation.append(place)
                continue
            if validation:
                yield self._unit(step, validation, is_validation=True)
                validation = []
            training.append(place)
            if len(training) == size:
                step += 1
                yield self._unit(step, training, is_validation=False)
                training = []
        if validation:
            yield self._unit(step, validation, is_validation=True)

    def _files(self) -> list[Path]:
        return sorted(self._path.glob("*.jsonl")) if self._path.is_dir() else [self._path]

    def _unit(self, step: int, places: Sequence[Place], *, is_validation: bool) -> Unit:
        digest = hashlib.sha256("\n".join(f"{time} {file.name} {number}" for time, file, number, *_ in places).encode())
        return Unit(
            number=step,
            digest=digest.hexdigest(),
            where=str(self._path),
            read=partial(_read, places),
            is_validation=is_validation,
        )


def _read(places: Sequence[Place]) -> Content:
    rows = []
    for _, file, number, position, size in places:
        with file.open("rb") as opened:
            opened.seek(position)
            rows.append(parsed(opened.read(size), f"{file}, line {number}"))
    known = {column.name for column in TRAJECTORY.columns} - {IMAGES}  # images in files are paths
    columns = [{name: value for name, value in row.items() if name in known} for row in rows]
    return content_of(columns, [others({name: row[name] for name in row if name not in known}) for row in rows])
