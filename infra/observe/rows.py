"""Rows of another trainer as columns of the schema: names and types are checked, and what is missing is filled in."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Union, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ratchet.infra.observe.images import with_digests
from ratchet.infra.store.run_store import CLOSE, JOURNAL, VALIDATE
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.data.placeholders import runs_in
from ratchet.rlhf.errors import UserError, counted, in_one_line
from ratchet.rlhf.schema import IMAGES, PARTS, TRAJECTORY, branch_id

if TYPE_CHECKING:
    import pandas as pd

Rows = Union[Sequence[Mapping[str, Any]], "pa.Table", "pd.DataFrame"]
"""One mapping per trajectory, or a table."""
GENERATE, SCORE, ADVANTAGES = "generate", "score", "advantages"
JSON_COLUMNS = ("messages", "tools", "ground_truth", "extra_info")
"""Columns whose values are stored as JSON unless they are texts."""
PER_TOKEN = ("advantages", "returns", "values", "token_scores", "token_rewards")
"""Columns of a value per token; a single number stands for each token of the response."""
WRONG = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""Errors of Arrow about a value."""
ANSWERS = {"score", "reward_parts", "reward_error"}
"""Columns that a validation has, in addition to those of `generate`."""
OTHER = "source_"
"""Begins the names of another trainer's own columns."""


def as_rows(rows: Rows) -> list[dict[str, Any]]:
    """Copies rows as a list of mappings; nested values are not copied."""
    if isinstance(rows, pa.Table):
        return list(rows.to_pylist())
    if hasattr(rows, "to_dict"):  # pandas writes a missing value as NaN
        return [
            {str(name): value for name, value in row.items() if not isinstance(value, float) or value == value}
            for row in rows.to_dict("records")
        ]
    return [dict(row) for row in cast(Sequence[Mapping[str, Any]], rows)]


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
    own = OTHER if stage == VALIDATE else None  # all of a validation's columns are in its one stage
    if unknown := [name for name in names if name not in known and not (own and name.startswith(own))]:
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


def generated(rows: Sequence[Mapping[str, Any]], iteration: int, source: str, put: Callable[[bytes], str]) -> pa.Table:
    """Makes the columns of `generate`, or of a validation.

    Args:
        rows: see `check_names`. `prompt` is a text or a list of messages. Rows with the same `prompt_id`, or without
            one the same prompt, are a group. Rows with a `branch` above 0 are further conversations of the trajectory
            before them in their group.
        source: the `data_source` of rows that have none.
        put: stores the bytes of an image, and returns their digest.

    Raises:
        UserError: a value has the wrong type; the message names the row and the column.
    """
    groups: dict[str, int] = {}
    samples: Counter[int] = Counter()
    completed = []
    for number, row in enumerate(rows):
        given_values = {name: value for name, value in row.items() if value is not None and name != "trajectory_id"}
        own = with_digests(given_values, put, f"stage {GENERATE}, row {number}")
        prompt = own.get("messages", own.get("prompt"))
        is_text = isinstance(prompt, str) and "messages" not in own
        messages = _messages(prompt, is_text, f"stage {GENERATE}, row {number}")
        shown = own["prompt"] if isinstance(own.get("prompt"), str) else _rendered(messages)
        key = (
            str(own["prompt_id"])
            if "prompt_id" in own
            else _json([prompt, own.get("prompt_ids"), _of_prompt(own.get(IMAGES), shown)])
        )
        group = groups.setdefault(key, len(groups))
        branch = given if isinstance(given := own.get("branch"), int) else 0
        if branch and not samples[group]:
            raise UserError(f"stage {GENERATE}, row {number}: branch {branch} has no trajectory before it in its group")
        sample = samples[group] - (branch > 0)
        samples[group] = sample + 1
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
                **({"response_mask": np.ones(len(ids), np.int8)} if isinstance(ids, Sequence | np.ndarray) else {}),
                **own,
                "trajectory_id": branch_id(f"it{iteration:06d}-p{group:05d}-s{sample:02d}", branch),
                "prompt_id": f"it{iteration:06d}-p{group:05d}",
                "messages": messages,
                "prompt": shown,
                "ground_truth_is_json": truth is not None and not isinstance(truth, str),
            }
        )
    return _table(completed, GENERATE)


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
    known = set(ids)
    named = [row.get("trajectory_id") for row in rows]
    if any(name is not None for name in named):
        of_row = [str(name) for name in named]
        if lost := [name for name in of_row if name not in known]:
            raise UserError(f"stage {stage}: the step has generated no trajectory {lost[0]}")
        if len(set(of_row)) < len(of_row):
            raise UserError(f"stage {stage}: several rows name the trajectory {Counter(of_row).most_common(1)[0][0]}")
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
    return _table(completed, stage)


def metrics_of(stage: str, table: pa.Table) -> dict[str, float]:
    """Computes the metrics that Ratchet reports of such a stage, as far as the columns are there."""
    metrics: dict[str, float] = {}
    if stage == GENERATE:
        for column, name in (("response_ids", "response_length"), ("prompt_ids", "prompt_length")):
            if column in table.column_names and table[column].null_count == 0 and len(table):
                metrics |= _spread(name, pc.list_value_length(table[column]).to_numpy().astype(float))
    elif stage == SCORE:
        table = of_trajectories(table)
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
        values = pc.list_flatten(table["advantages"]).drop_null().to_numpy().astype(float)
        if len(values):
            metrics |= _spread("critic/advantages", values)
    return metrics


def of_trajectories(table: pa.Table) -> pa.Table:
    """Selects the row that stands for each trajectory where trajectories count: that of its last conversation."""
    batch = TrajectoryBatch(table)
    return batch.take(batch.last_branches()).table


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _table(rows: Sequence[Mapping[str, Any]], stage: str) -> pa.Table:
    names = dict.fromkeys(["trajectory_id", *(name for row in rows for name in row)])
    order = [name for name in ("trajectory_id", *TRAJECTORY.names(stage)) if name in names]
    order += [name for name in names if name not in order]
    return pa.table({name: _array([row.get(name) for row in rows], f"stage {stage}", name) for name in order})


def _array(values: list[Any], where: str, name: str) -> pa.Array:
    """Makes a column. Raises UserError, which names the first row whose value has the wrong type."""
    kind = TRAJECTORY.type_of(name)
    if name in JSON_COLUMNS:
        values = [
            value if value is None or (isinstance(value, str) and name != "messages") else _json(value)
            for value in values
        ]
    elif kind == PARTS:
        values = [_parts(value) if isinstance(value, Mapping) else value for value in values]
    elif kind is None or not (pa.types.is_primitive(kind) or pa.types.is_list(kind)):
        values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    try:
        return _converted(values, kind)
    except WRONG as error:
        if kind is None:  # values of several types
            return pa.array([None if value is None else _json(value) for value in values], type=pa.string())
        for number, value in enumerate(values):
            try:
                _converted([value], kind)
            except WRONG as wrong:
                raise UserError(f"{where}, row {number}: {name} is no {kind} ({in_one_line(wrong)})") from None
        raise UserError(f"{where}: {name} is no {kind} ({in_one_line(error)})") from None


def _converted(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    inner = kind.value_type if kind is not None and pa.types.is_list(kind) else kind
    if inner is None or not pa.types.is_integer(inner):
        return pa.array(values, type=kind)
    found = pa.array(values)  # with a type, Arrow would cut off decimal places
    of_found = found.type.value_type if pa.types.is_list(found.type) else found.type
    if pa.types.is_string(of_found):  # a cast would read the digits
        raise TypeError("it holds texts")
    return found.cast(kind)


def _parts(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": str(part), "value": number} for part, number in value.items() if number is not None]


def _per_token(name: str, value: Any, tokens: int | None) -> Any:
    """Repeats a single number for each token of the response; without tokens, the column has one value."""
    if name in PER_TOKEN and value is not None and np.ndim(value) == 0:
        return np.full(1 if tokens is None else tokens, value, np.float32)
    return value


def _messages(prompt: Any, is_text: bool, where: str) -> Any:
    """Returns the messages of a prompt: a text, messages, or messages as JSON. Raises UserError if it is neither."""
    messages = [{"role": "user", "content": prompt}] if is_text else prompt
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: messages is no JSON ({in_one_line(error)})") from None
    if messages is not None and not (
        isinstance(messages, Sequence | np.ndarray) and all(isinstance(message, Mapping) for message in messages)
    ):
        raise UserError(f"{where}: a prompt is a text or a list of messages with role and content")
    return messages


def _rendered(messages: Iterable[Mapping[str, Any]] | None) -> str | None:
    """Returns the text of messages, for a prompt whose text is unknown."""
    if messages is None:
        return None
    texts = [message.get("content") for message in messages]
    return "\n".join(text if isinstance(text, str) else _json(text) for text in texts if text is not None)


def _of_prompt(images: Sequence[str] | None, prompt: str | None) -> Sequence[str]:
    """Returns the images that a prompt shows: as many as its text has places for, or all if it has none."""
    places = len(runs_in(prompt or ""))
    return (images or ())[: places or None]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
