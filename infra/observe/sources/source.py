"""The interface of a format: files as steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ratchet.infra.observe.rows import GENERATE, OTHER
from ratchet.rlhf.schema import TRAJECTORY

SOURCE = "source"
"""The stage of fields that Ratchet has no column for."""


@dataclass
class Content:
    """What files say of a step."""

    stages: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows of each stage, `generate` first; see `ratchet.infra.observe.rows`. Those of a validation are in `generate`,
    with their scores."""
    metrics: dict[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Fields of the files that no column keeps."""


@dataclass(frozen=True)
class Unit:
    """A step, or a validation, that can be imported on its own."""

    number: int
    """The trainer's own number of the step; of a validation, that of the last step before it."""
    digest: str
    """sha256 of the content of its files: what has the same was imported already."""
    where: str
    """Its file, for errors."""
    read: Callable[[], Content]
    """Reads it. Raises UserError, which names file and row."""
    is_validation: bool = False


class Source(Protocol):
    """Files of a trainer."""

    trainer: str
    """The name of the trainer, such as ``trl``."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The trainer's own config, as far as the files have it."""
        ...

    @property
    def model(self) -> str | None:
        """The model that is trained, if the files say it."""
        ...

    def units(self) -> Iterator[Unit]:
        """Lists what is complete, as of now, in any order.

        What is still being written is left out: a file without its end, or a step whose last line is cut.

        Raises:
            UserError: files are not of this format; the message names file and row.
        """
        ...


def content_of(
    columns: list[dict[str, Any]], rest: list[dict[str, Any]], metrics: Mapping[str, float] | None = None
) -> Content:
    """Divides rows of columns among the stages that write them.

    Args:
        columns: a mapping for each trajectory, by columns of any stage.
        rest: fields of each that no column takes; they become the stage `SOURCE`.
    """
    stages: dict[str, list[dict[str, Any]]] = {GENERATE: []}
    names = dict.fromkeys(name for row in columns for name in row if name != "trajectory_id")
    found = {TRAJECTORY[name].stage for name in names}
    for stage in filter(found.__contains__, TRAJECTORY.stages):
        own = [name for name in names if TRAJECTORY[name].stage == stage]
        stages[stage] = [{name: row[name] for name in own if name in row} for row in columns]
    if any(rest):
        stages[SOURCE] = rest
    return Content(stages, dict(metrics or {}))


def others(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Names fields that no column takes. Objects and lists become JSON, as their shape differs from row to row."""
    return {
        f"{OTHER}{name}": value
        if value is None or isinstance(value, str | bool | int | float)
        else json.dumps(value, ensure_ascii=False)
        for name, value in fields.items()
    }


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Selects the metrics that are numbers."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def of_validation(content: Content) -> Content:
    """Moves the scores of a validation, and its other columns, to the rows of `generate`."""
    rows = [dict(row) for row in content.stages.get(GENERATE, [])]
    for stage, columns in content.stages.items():
        if stage != GENERATE:
            for row, more in zip(rows, columns, strict=True):
                row |= more
    return Content({GENERATE: rows}, content.metrics, content.left_out)
