"""Rows of another trainer as columns of the schema: names and types are checked, and what is missing is filled in."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import pyarrow as pa

from ratchet.infra.store.run_store import CLOSE, JOURNAL, VALIDATE
from ratchet.rlhf.errors import UserError, counted, in_one_line
from ratchet.rlhf.schema import PARTS, TRAJECTORY, branch_id

if TYPE_CHECKING:
    import pandas as pd

Rows = Union[Sequence[Mapping[str, Any]], "pa.Table", "pd.DataFrame"]
"""One mapping per trajectory, or a table."""
GENERATE, SCORE, ADVANTAGES = "generate", "score", "advantages"
JSON_COLUMNS = ("messages", "tools", "ground_truth", "extra_info")
"""Columns whose values are stored as JSON unless they are texts."""
PER_TOKEN = ("advantages", "returns", "values", "token_scores", "token_rewards")
"""Columns of a value per token; a single number stands for each token of the response."""
ANSWERS = {"score", "reward_parts", "reward_error"}
"""Columns that a validation has, in addition to those of `generate`."""


def as_rows(rows: Rows) -> list[dict[str, Any]]:
    """Copies rows as a list of mappings; nested values are not copied."""
    if isinstance(rows, pa.Table):
        return list(rows.to_pylist())
    if hasattr(rows, "to_dict"):  # pandas writes a missing value as NaN
        return [
            {str(name): value for name, value in row.items() if not isinstance(value, float) or value == value}
            for row in rows.to_dict("records")
        ]
    return [dict(row) for row in rows]


def check_names(stage: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError if a stage cannot have rows with these names, or rows lack a response or a score."""
    names = dict.fromkeys(name for row in rows for name in row)
    if stage not in TRAJECTORY.stages and stage != VALIDATE:
        reserved = stage in (CLOSE, JOURNAL) or stage.startswith("update_")
        if reserved or not stage.isidentifier():
            raise UserError(
                f"a stage cannot be called {stage!r}: choose one of {', '.join(TRAJECTORY.stages)}, or a name of your "
                "own of letters, digits and _"
            )
        if clash := [name for name in names if name in TRAJECTORY and name != "trajectory_id"]:
            raise UserError(
                f"stage {stage}: the column {clash[0]} belongs to the stage {TRAJECTORY[clash[0]].stage}: write it "
                "there, or give it another name"
            )
        return
    known = {"trajectory_id", *TRAJECTORY.names(GENERATE if stage == VALIDATE else stage)}
    known |= ANSWERS if stage == VALIDATE else set()
    if unknown := [name for name in names if name not in known]:
        near = get_close_matches(unknown[0], known, n=1)
        raise UserError(
            f"stage {stage} has no column {unknown[0]}{f' (is it {near[0]}?)' if near else ''}: its columns are "
            f"{', '.join(sorted(known))}; a stage with a name of your own takes any columns"
        )
    answer = ("response", "response_ids")
    needed = {GENERATE: answer, VALIDATE: answer, SCORE: ("score", "reward_error")}
    one_of = needed.get(stage, ())
    for number, row in enumerate(rows):
        if one_of and all(row.get(name) is None for name in one_of):
            raise UserError(f"stage {stage}, row {number} has no {' and no '.join(one_of)}")


def generated(rows: Sequence[Mapping[str, Any]], iteration: int, source: str) -> pa.Table:
    """Makes the columns of `generate`, or of a validation.

    Args:
        rows: see `check_names`. `prompt` is a text or a list of messages. Rows with the same `prompt_id`, or without
            one the same prompt, are a group. Rows with a `branch` above 0 are further conversations of the trajectory
            before them in their group.
        source: the `data_source` of rows that have none.

    Raises:
        UserError: a value has the wrong type; the message names the row and the column.
    """
    groups: dict[str, int] = {}
    samples: Counter[int] = Counter()
    completed = []
    for number, row in enumerate(rows):
        prompt = row.get("messages") if row.get("messages") is not None else row.get("prompt")
        is_text = isinstance(prompt, str) and row.get("messages") is None
        messages = [{"role": "user", "content": prompt}] if is_text else prompt
        messages = json.loads(messages) if isinstance(messages, str) else messages
        shown = row["prompt"] if isinstance(row.get("prompt"), str) else _rendered(messages)
        key = str(row["prompt_id"]) if row.get("prompt_id") is not None else _json([prompt, row.get("prompt_ids")])
        group = groups.setdefault(key, len(groups))
        branch = given if isinstance(given := row.get("branch"), int) else 0
        if branch and not samples[group]:
            raise UserError(f"stage {GENERATE}, row {number}: branch {branch} has no trajectory before it in its group")
        sample = samples[group] - (branch > 0)
        samples[group] = sample + 1
        own = {name: value for name, value in row.items() if value is not None and name != "trajectory_id"}
        ids = own.get("response_ids")
        truth = own.get("ground_truth")
        completed.append(
            {
                "sample": sample,
                "data_source": source,
                "prompt_is_text": is_text,
                "policy_version": iteration,
                "by_expert": False,
                "seed": 0,
                "response": "",
                **({"response_mask": [1] * len(ids)} if ids is not None else {}),
                **own,
                "trajectory_id": branch_id(f"it{iteration:06d}-p{group:05d}-s{sample:02d}", branch),
                "prompt_id": f"it{iteration:06d}-p{group:05d}",
                "messages": None if messages is None else messages,
                "prompt": shown,
                "ground_truth_is_json": truth is not None and not isinstance(truth, str),
            }
        )
    return _table(completed, GENERATE, ids=None)


def aligned(
    stage: str, rows: Sequence[Mapping[str, Any]], ids: Sequence[str], tokens: Sequence[int | None]
) -> pa.Table:
    """Makes the columns of another stage.

    Args:
        ids: the trajectories that the step has generated. Rows name theirs by `trajectory_id`, or are in this order.
        tokens: the number of tokens of each response; None: unknown.

    Raises:
        UserError: a row belongs to no trajectory, or a value has the wrong type.
    """
    named = [row.get("trajectory_id") for row in rows]
    if any(name is not None for name in named):
        if lost := [name for name in named if name not in set(ids)]:
            raise UserError(f"stage {stage}: the step has generated no trajectory {lost[0]}")
        of_row = [str(name) for name in named]
    else:
        if len(rows) != len(ids):
            raise UserError(
                f"stage {stage} has {counted(len(rows), 'row')}, and the step has generated "
                f"{counted(len(ids), 'trajectory').replace('trajectorys', 'trajectories')}: write one row for each, in "
                "the same order, or name them by trajectory_id"
            )
        of_row = list(ids)
    lengths = dict(zip(ids, tokens, strict=True))
    completed = [
        {**{name: _per_token(name, value, lengths[id_]) for name, value in row.items()}, "trajectory_id": id_}
        for id_, row in zip(of_row, rows, strict=True)
    ]
    return _table(completed, stage, ids=of_row)


def metrics_of(stage: str, table: pa.Table) -> dict[str, float]:
    """Computes the metrics that Ratchet reports of such a stage, as far as the columns are there."""
    metrics: dict[str, float] = {}
    if stage == GENERATE:
        for column, name in (("response_ids", "response_length"), ("prompt_ids", "prompt_length")):
            if column in table.column_names and table[column].null_count == 0 and len(table):
                metrics |= _spread(name, np.array([len(ids) for ids in table[column].to_pylist()], dtype=float))
    elif stage == SCORE:
        if "score" in table.column_names:
            scores = table["score"].drop_null().to_numpy().astype(float)
            scores = scores[np.isfinite(scores)]
            if len(scores):
                metrics |= {"reward/mean": float(scores.mean()), **_spread("critic/score", scores)}
        if "reward_parts" in table.column_names:
            parts: dict[str, list[float]] = {}
            for cell in table["reward_parts"].to_pylist():
                for part in cell or ():
                    if part["value"] is not None and math.isfinite(part["value"]):
                        parts.setdefault(part["name"], []).append(part["value"])
            metrics |= {f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items()}
        if "reward_error" in table.column_names and (errors := len(table) - table["reward_error"].null_count):
            metrics["reward/errors"] = float(errors)
    elif stage == ADVANTAGES and "advantages" in table.column_names:
        values = np.array([v for cell in table["advantages"].to_pylist() for v in cell or ()], dtype=float)
        if len(values):
            metrics |= _spread("critic/advantages", values)
    return metrics


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _table(rows: Sequence[Mapping[str, Any]], stage: str, ids: Sequence[str] | None) -> pa.Table:
    names = dict.fromkeys(["trajectory_id", *(name for row in rows for name in row)])
    order = [name for name in ("trajectory_id", *TRAJECTORY.names(stage)) if name in names]
    order += [name for name in names if name not in order]
    columns = {}
    for name in order:
        kind = TRAJECTORY.type_of(name)
        values = [_stored(name, kind, row.get(name)) for row in rows]
        columns[name] = _array(values, kind, f"stage {stage}", name)
    return pa.table(columns)


def _stored(name: str, kind: pa.DataType | None, value: Any) -> Any:
    if value is None:
        return None
    if name in JSON_COLUMNS:
        return value if isinstance(value, str) and name != "messages" else _json(value)
    if kind == PARTS and isinstance(value, Mapping):
        return [{"name": str(part), "value": number} for part, number in value.items() if number is not None]
    if isinstance(value, float) and kind is not None and pa.types.is_integer(kind) and value.is_integer():
        return int(value)  # pandas stores integers with a missing value as floats
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def _array(values: list[Any], kind: pa.DataType | None, where: str, name: str) -> pa.Array:
    try:
        return pa.array(values, type=kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if kind is None:  # values of several types
            return pa.array([None if value is None else _json(value) for value in values], type=pa.string())
        for number, value in enumerate(values):
            try:
                pa.array([value], type=kind)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as wrong:
                raise UserError(f"{where}, row {number}: {name} is no {kind} ({in_one_line(wrong)})") from None
        raise UserError(f"{where}: {name} is no {kind} ({in_one_line(error)})") from None


def _per_token(name: str, value: Any, tokens: int | None) -> Any:
    """Repeats a single number for each token of the response; without tokens, the column has one value."""
    if name in PER_TOKEN and value is not None and np.ndim(value) == 0:
        return [float(value)] * (1 if tokens is None else tokens)
    return value


def _rendered(messages: Iterable[Mapping[str, Any]] | None) -> str | None:
    """Returns the text of messages, for a prompt whose text is unknown."""
    if messages is None:
        return None
    texts = [message.get("content") for message in messages]
    return "\n".join(text if isinstance(text, str) else _json(text) for text in texts if text is not None)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
