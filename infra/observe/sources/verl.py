"""verl's generations (`trainer.rollout_data_dir`, `validation_data_dir`) and metrics (`trainer.logger=[file]`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ratchet.infra.observe.sources.lines import Digests, complete_lines, is_cut, parsed
from ratchet.infra.observe.sources.source import Content, Unit, content_of, finite, others
from ratchet.rlhf.errors import UserError, in_one_line

PADDING = re.compile(r"pad[0-9a-f]{32}_\d+_\d+")
"""The `uid` of rows that only fill up a batch."""
UID = re.compile(r"(.+)_\d+_(\d+)", re.DOTALL)
"""A `uid`: the group, the sample, and the number of the conversation."""
COLUMNS = ("input", "output", "gts", "score", "step", "reward")


class Verl:
    """Folders with a file ``STEP.jsonl`` of each step.

    Rows of verl 0.9 and later name their group (`uid`). In older files, rows with the same prompt and ground truth are
    a group. The metrics of a step are those that verl logged under its number.
    """

    trainer = "verl"

    def __init__(self, rollouts: Path, validations: Path | None = None, metrics: Path | None = None) -> None:
        """Takes the files.

        Args:
            rollouts: `trainer.rollout_data_dir`.
            validations: `trainer.validation_data_dir`.
            metrics: the file of verl's logger `file`. Steps after the last one in it are not complete yet.

        Raises:
            UserError: there are no such folders, or no such file.
        """
        for folder, key in ((rollouts, "rollout_data_dir"), (validations, "validation_data_dir")):
            if folder is not None and not folder.is_dir():
                raise UserError(f"{folder}: there is no such folder: name that of trainer.{key}")
        if metrics is not None and not metrics.is_file():
            raise UserError(f"{metrics}: there is no such file: name that of trainer.logger=[file]")
        self._rollouts, self._validations, self._metrics = rollouts, validations, metrics
        self._digests = Digests()
        self.config = _config(rollouts)
        self.model = _model(self.config)

    def units(self) -> Iterator[Unit]:
        """See `Source.units`."""
        metrics = {} if self._metrics is None else _metrics(self._metrics)
        for folder in (self._rollouts, self._validations):
            for file in () if folder is None else folder.glob("*.jsonl"):
                number = int(file.stem) if file.stem.isdecimal() else None
                if number is None or is_cut(file) or (self._metrics and number > max(metrics, default=-1)):
                    continue
                yield Unit(
                    number=number,
                    digest=self._digests.of(file),
                    where=str(file),
                    read=partial(generations, file, metrics.get(number, {})),
                    is_validation=folder is self._validations,
                )


def generations(file: Path, metrics: Mapping[str, Any] | None = None) -> Content:
    """Reads the generations of a step, to which its metrics are added. Raises UserError if a row is malformed."""
    rows = []
    for number, _, line in complete_lines(file):
        row = parsed(line, where := f"{file}, line {number}")
        for name in ("input", "output"):
            if not isinstance(row.get(name), str):
                raise UserError(f"{where}: there is no text {name!r}, which verl's generations have")
        if _number(row.get("score")) is None:
            raise UserError(f"{where}: score is {row.get('score')!r}, and no number")
        if not PADDING.fullmatch(str(row.get("uid"))):
            rows.append(row)
    parts = _numeric(
        rows, [name for name in dict.fromkeys(name for row in rows for name in row) if name not in COLUMNS]
    )
    # a part of this name replaces verl's score in the file
    if any("reward" in row and row["reward"] != row["score"] for row in rows):
        parts.append("score")
    content = content_of(
        [_columns(row, parts) for row in rows],
        [others({name: row[name] for name in row if name not in (*COLUMNS, *parts)}) for row in rows],
        finite(metrics or {}),
    )
    content.left_out = tuple(f"metric {name}" for name in metrics or () if name not in content.metrics)
    return content


def _columns(row: Mapping[str, Any], parts: list[str]) -> dict[str, Any]:
    uid = UID.fullmatch(str(row.get("uid")))
    columns = {
        "prompt_id": uid[1] if uid else row.get("uid") or repr((row["input"], row.get("gts"))),
        "prompt": row["input"],
        "response": row["output"],
        "ground_truth": row.get("gts"),
        "score": _number(row.get("reward", row["score"])),
    }
    if uid and int(uid[2]):
        columns["branch"] = int(uid[2])
    if parts:
        columns["reward_parts"] = {name: _number(row.get(name)) for name in parts}
    return columns


def _numeric(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Selects the fields that are a number, or null, in each row."""
    numeric = []
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values and all(isinstance(value, int | float) for value in values):
            numeric.append(name)
    return numeric


def _number(value: Any) -> float | None:
    """Returns a number; verl writes some as texts."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _metrics(file: Path) -> dict[int, dict[str, Any]]:
    metrics: dict[int, dict[str, Any]] = {}
    for number, _, line in complete_lines(file):
        row = parsed(line, where := f"{file}, line {number}")
        step, data = row.get("step"), row.get("data")
        if not isinstance(step, int) or not isinstance(data, Mapping):
            raise UserError(f'{where}: this is no line of verl\'s logger file, {{"step": …, "data": {{…}}}}')
        metrics.setdefault(step, {}).update(data)
    return metrics


def _config(rollouts: Path) -> Mapping[str, Any]:
    """Reads the config that hydra wrote, if the generations are in its folder."""
    for folder in (rollouts, rollouts.parent):
        if (file := folder / ".hydra" / "config.yaml").is_file():
            try:
                config = yaml.safe_load(file.read_text())
            except (yaml.YAMLError, ValueError) as error:
                raise UserError(f"{file}: this is no YAML ({in_one_line(error)})") from None
            return config if isinstance(config, Mapping) else {}
    return {}


def _model(config: Mapping[str, Any]) -> str | None:
    value: Any = config
    for key in ("actor_rollout_ref", "model", "path"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) and "${" not in value else None
