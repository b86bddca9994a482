"""TRL's completions (`log_completions`) and metrics (`trainer_state.json`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ratchet.infra.observe.sources.lines import Digests, parsed_file
from ratchet.infra.observe.sources.messages import text
from ratchet.infra.observe.sources.source import Content, Unit, content_of, finite, others
from ratchet.infra.progress import note
from ratchet.rlhf.data.formats import without_nulls
from ratchet.rlhf.errors import UserError, in_one_line

COMPLETIONS = re.compile(r"completions_(\d+)\.parquet")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
FOOTER = b"PAR1"
LOOKED_AT = 64
"""The number of files in which completions without a reward are looked for."""
REWARD = re.compile(r"rewards/(.+)/mean")
BASE = ("prompt", "completion", "advantage")
SETTINGS = (
    "max_steps",
    "num_train_epochs",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
    "trial_name",
    "trial_params",
)
"""Fields of trainer_state.json that are settings of the run."""
UNSCORED = "no reward function scored it"
NAMES = {
    "policy_loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "reward": "reward/mean",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "completions/mean_length": "response_length/mean",
    "completions/min_length": "response_length/min",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    **{f"sampling/importance_sampling_ratio/{n}": f"rollout_corr/rollout_is_{n}" for n in ("mean", "max", "min")},
    "step_time": "timing_s/step",
}
"""Ratchet's names of metrics. The others are called ``trl/…``."""


@dataclass
class _State:
    """What `trainer_state.json` says."""

    step: int | None = None
    """The last step that it covers; None: there is no such file."""
    log: list[Mapping[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


class TRL:
    """The `output_dir` of a trainer, such as GRPOTrainer, that ran with `log_completions`.

    TRL writes a file at each logging step. A file that repeats the completions of the one before it adds only metrics.
    The metrics come with checkpoints, so steps after the newest checkpoint are not complete yet, unless there is none.
    After an evaluation, a file holds the completions of the evaluation, and those of the step only as far as there is
    room: they become a validation.

    The rewards are the columns that the log has means of; without a log, all columns of numbers. The score is the sum
    of the rewards, with the weights by which their means make the logged reward, as TRL writes `reward_weights` only
    into a pickle. If the log does not tell the weights, they are 1.
    """

    trainer = "trl"

    def __init__(self, path: Path) -> None:
        """Takes the trainer's `output_dir`, or its folder ``completions``.

        Raises:
            UserError: there are no completions.
        """
        self._folder = path.parent if path.name == "completions" else path
        self._completions = self._folder / "completions"
        if not self._completions.is_dir():
            raise UserError(
                f"{path}: there is no folder completions: name the output_dir of a trainer of TRL that ran with "
                "log_completions=True (0.28 or later)"
            )
        self._digests = Digests()
        self._has_said = False
        self.config: Mapping[str, Any] = _state(self._folder).settings
        """The settings that `trainer_state.json` has. The others are only in a pickle."""
        self.model = _base_model(self._folder)

    def units(self) -> Iterator[Unit]:
        """See `Source.units`."""
        state = _state(self._folder)
        files = sorted(
            (int(name[1]), file)
            for file in self._completions.iterdir()
            if (name := COMPLETIONS.fullmatch(file.name)) and _is_whole(file)
        )
        weights = _weights(state.log, [file for _, file in files[:LOOKED_AT]])
        before: Path | None = None
        for step, file in files:
            if state.step is not None and step > state.step:
                if not self._has_said:
                    note(f"{file}: steps after {state.step} wait for the next checkpoint, which has their metrics")
                self._has_said = True
                return
            entries = [entry for entry in state.log if entry.get("step") == step]
            evaluated = _evaluated(entries)
            if evaluated:
                yield self._unit(step, file, partial(_read_validation, file, weights, evaluated), is_validation=True)
            if step > 0:  # an evaluation may come before the first step
                yield self._unit(step, file, partial(_read, file, before, weights, evaluated, _logged(entries)))
            before = file

    def _unit(self, step: int, file: Path, read: Callable[[], Content], is_validation: bool = False) -> Unit:
        return Unit(step, self._digests.of(file), str(file), read, is_validation)


def _read(
    file: Path, before: Path | None, weights: Mapping[str, float] | None, evaluated: int, metrics: Mapping[str, float]
) -> Content:
    """Reads a step.

    Args:
        before: the file before this one.
        evaluated: the number of prompts that were evaluated after the step; 0: none.
    """
    table, rows = _rows(file)
    rows = rows[: _begin_of_validation(rows, evaluated)]
    if before is not None and rows:
        _, known = _rows(before)
        if rows == known[-len(rows) :]:
            rows = []
    content = _content(rows, _rewards(table, weights))
    content.metrics = dict(metrics)
    return content


def _read_validation(file: Path, weights: Mapping[str, float] | None, evaluated: int) -> Content:
    table, rows = _rows(file)
    rows = [{**row, "advantage": None} | {"eval_advantage": row.get("advantage")} for row in rows]
    return _content(rows[_begin_of_validation(rows, evaluated) :], _rewards(table, weights))


def _begin_of_validation(rows: Sequence[Mapping[str, Any]], evaluated: int) -> int:
    """Returns the first row of an evaluation: its answers come last, and push out older ones."""
    answers = 0
    for _, same in groupby(reversed(rows), key=lambda row: row["prompt"]):
        answers = len(list(same))  # to each prompt
        break
    return max(0, len(rows) - evaluated * answers)


def _content(rows: Sequence[Mapping[str, Any]], rewards: Mapping[str, float]) -> Content:
    return content_of([_columns(row, rewards) for row in rows], [_rest(row, rewards) for row in rows])


def _columns(row: Mapping[str, Any], rewards: Mapping[str, float]) -> dict[str, Any]:
    prompt, completion = row["prompt"], row["completion"]
    columns: dict[str, Any] = {"prompt" if isinstance(prompt, str) else "messages": prompt}
    if isinstance(completion, str):
        columns["response"] = completion
    else:
        texts = [text(message) for message in completion]
        columns["response"] = "\n".join(texts)
        columns["turns"] = [
            {"role": "policy" if message.get("role") == "assistant" else "environment", "content": said}
            for message, said in zip(completion, texts, strict=True)
        ]
    if row.get("advantage") is not None:
        columns["advantages"] = row["advantage"]
    if rewards:
        parts = {name: float(row[name]) for name in rewards if row[name] is not None}
        columns["reward_parts"] = parts
        if parts:
            columns["score"] = sum(rewards[name] * value for name, value in parts.items())
        else:
            columns["reward_error"] = UNSCORED
    return columns


def _rest(row: Mapping[str, Any], rewards: Mapping[str, float]) -> dict[str, Any]:
    rest = {name: value for name, value in row.items() if name not in (*BASE, *rewards)}
    # the columns of messages have no calls of tools, and no thoughts
    if not isinstance(row["completion"], str) and any(
        message.keys() - {"role", "content"} for message in row["completion"]
    ):
        rest["completion"] = row["completion"]
    return others(rest)


def _table(file: Path, names: Sequence[str] | None = None) -> pa.Table:
    """Reads a file, or some of its columns."""
    try:
        with pq.ParquetFile(file) as opened:
            here = opened.schema_arrow.names
            return opened.read([name for name in here if name != "step" and (names is None or name in names)])
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: this is no Parquet file that can be read ({in_one_line(error)})") from None


def _rows(file: Path) -> tuple[pa.Table, list[dict[str, Any]]]:
    """Reads a file. Arrow gives a message the fields of all messages: those without a value are removed."""
    table = _table(file)
    if missing := [name for name in ("prompt", "completion") if name not in table.column_names]:
        raise UserError(f"{file}: there is no column {missing[0]}, which TRL's completions have")
    rows = []
    for number, row in enumerate(table.to_pylist()):
        for name in ("prompt", "completion"):
            if not isinstance(row[name], str | list):
                raise UserError(f"{file}, row {number}: {name} is neither a text nor a list of messages")
        rows.append({**row, "prompt": without_nulls(row["prompt"]), "completion": without_nulls(row["completion"])})
    return table, rows


def _rewards(table: pa.Table, weights: Mapping[str, float] | None) -> dict[str, float]:
    """Returns the columns of rewards and their weights."""
    if weights is not None:
        return {name: weight for name, weight in weights.items() if name in table.column_names}
    numbers = [name for name in table.column_names if name not in BASE and _is_number(table.schema.field(name).type)]
    return dict.fromkeys(numbers, 1.0)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _is_whole(file: Path) -> bool:
    """True if a Parquet file has its footer, which is written last."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - len(FOOTER)))
        return opened.read() == FOOTER


def _state(folder: Path) -> _State:
    """Reads the newest `trainer_state.json` that is whole."""
    numbered = [(int(name[1]), path) for path in folder.iterdir() if (name := CHECKPOINT.fullmatch(path.name))]
    states = []
    for path in (folder, *(path for _, path in sorted(numbered, reverse=True))):
        with suppress(UserError, FileNotFoundError):
            fields = parsed_file(path / "trainer_state.json")
            states.append(_State(int(fields["global_step"]), fields["log_history"], fields))
        if states and path != folder:
            break
    state = max(states, key=lambda state: state.step or 0, default=_State())
    state.settings = {name: state.settings[name] for name in SETTINGS if name in state.settings}
    return state


def _weights(log: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> dict[str, float] | None:
    """Returns the weight of each reward, or None if the log names no rewards."""
    names = list(dict.fromkeys(name[1] for entry in log for key in entry if (name := REWARD.fullmatch(key))))
    if not names:
        return None
    keys = [*(f"rewards/{name}/mean" for name in names), "reward"]
    entries = [values for entry in log if len(values := finite({key: entry.get(key) for key in keys})) == len(keys)]
    means = np.array([[values[key] for key in keys[:-1]] for values in entries]).reshape(-1, len(names))
    rewards = np.array([values["reward"] for values in entries])
    weights = np.ones(len(names))
    # where a function has not scored all completions, its mean is not that of its terms of the sum
    if len(entries) > len(names) and not any(_lacks_values(file, names) for file in files):
        solved, _, rank, _ = np.linalg.lstsq(means, rewards, rcond=None)
        if rank == len(names) and np.allclose(means @ solved, rewards, atol=1e-4):
            weights = solved.round(4)
    return dict(zip(names, map(float, weights), strict=True))


def _lacks_values(file: Path, names: Sequence[str]) -> bool:
    table = _table(file, names)
    return any(table[name].null_count for name in table.column_names)


def _evaluated(entries: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of prompts that were evaluated: the log has the time, and the prompts per second."""
    prompts = 0.0
    for entry in entries:
        for key, rate in entry.items():
            if key.startswith("eval_") and key.endswith("samples_per_second"):
                prompts += rate * entry.get(key.replace("samples_per_second", "runtime"), 0.0)
    return round(prompts)


def named(values: Mapping[str, float]) -> dict[str, float]:
    """Gives metrics of TRL Ratchet's names, or names after ``trl/``."""
    names = dict(NAMES)
    if not values.keys() & {"kl", "policy_loss", "aux_loss"}:  # the loss has no other terms
        names["loss"] = "actor/pg_loss"
    for name in values:
        if reward := REWARD.fullmatch(name):
            names[name] = f"reward/{reward[1]}/mean"
    return {names.get(name, f"trl/{name}"): value for name, value in values.items()}


def _logged(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return named(finite({name: value for entry in entries for name, value in entry.items() if name != "step"}))


def _base_model(folder: Path) -> str | None:
    """Returns the model that the model card names."""
    for card in (folder / "README.md", *sorted(folder.glob("checkpoint-*/README.md"))):
        if card.is_file() and (text := card.read_text(errors="replace")).startswith("---"):
            with suppress(yaml.YAMLError):
                header = yaml.safe_load(text.split("---")[1])
                if isinstance(header, Mapping) and isinstance(name := header.get("base_model"), str):
                    return name
    return None
