"""Converts published datasets to prompt files in verl's layout: GSM8K, MATH, reasoning-gym, or any table of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from ratchet.rlhf.data.formats import check_media, check_no_images, tools_column, tools_of
from ratchet.rlhf.errors import UserError, in_one_line
from ratchet.rlhf.rewards import reasoning_gym as reward
from ratchet.rlhf.rewards.math import boxed
from ratchet.rlhf.schema import MESSAGES

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64(), "answer": pa.string()}),
    }
)
GSM8K = 'Let\'s think step by step and output the final answer after "####".'
REASONING_GYM = "Give the final answer within <answer></answer>."
MATH = "Let's think step by step and output the final answer within \\boxed{}."

Rows = Iterable[tuple[str, Mapping[str, Any]]]
"""Pairs of a row's location, for errors, and the row."""


def gsm8k(rows: Rows, split: str) -> pa.Table:
    """Converts rows of `question` and `answer`, where the answer ends with ``#### 42``.

    `split` is stored in `extra_info`. Raises UserError if a row is malformed (the message names it), or there are none.
    """

    def convert(where: str, row: Mapping[str, Any]) -> dict[str, str]:
        answer = text(row, "answer", where)
        _, mark, truth = answer.rpartition("####")
        if not mark:
            raise UserError(f"{where}: the answer does not end with #### and a number")
        return {"question": text(row, "question", where), "truth": truth.strip().replace(",", ""), "answer": answer}

    return _table(rows, split, convert, "openai/gsm8k", "math", GSM8K)


def math(rows: Rows, split: str, data_source: str = "lighteval/MATH") -> pa.Table:
    """Converts rows of `problem` and `answer`, or `solution` with the answer in its last ``\\boxed{}``."""

    def convert(where: str, row: Mapping[str, Any]) -> dict[str, str]:
        if "answer" in row:
            truth = answer = text(row, "answer", where)
        else:
            answer = text(row, "solution", where)
            inside = boxed(answer)
            if inside is None:
                raise UserError(f"{where}: the solution has no \\boxed{{}} answer")
            truth = inside.removeprefix("\\boxed{").removesuffix("}")
        return {"question": text(row, "problem", where), "truth": truth, "answer": answer}

    return _table(rows, split, convert, data_source, "math", MATH)


def prompts(
    rows: Rows, split: str, *, prompt: str, truth: str | None, data_source: str, instruction: str | None
) -> pa.Table:
    """Converts rows of any table.

    Args:
        truth: name of the column with the ground truth; None: the ground truth is empty.
        instruction: text to append to each prompt; None: nothing.
    """

    def convert(where: str, row: Mapping[str, Any]) -> dict[str, str]:
        expected = "" if truth is None else _value(row, truth, where)
        if expected is None:
            raise UserError(f"{where}: {truth} of this row is empty: fill it in, or remove the row")
        expected = expected if isinstance(expected, str) else json.dumps(expected, ensure_ascii=False, default=str)
        return {"question": text(row, prompt, where), "truth": expected, "answer": expected}

    return _table(rows, split, convert, data_source, "", instruction)


def reasoning_gym(dataset: str, options: Mapping[str, Any], size: int, seed: int) -> pa.Table:
    """Makes problems with the package reasoning-gym, and scores the right answer to each, as stored.

    Args:
        options: arguments of the dataset.

    Raises:
        UserError: there is no such dataset, or its problems cannot be stored or scored.
    """
    where = f"reasoning-gym {dataset}"
    try:
        import reasoning_gym as package
    except ImportError as error:
        raise UserError(f"{where}: {error}; install it (extra reasoning-gym)") from None
    try:
        score = reward.scorer(dataset)
        problems = list(package.create_dataset(dataset, seed=seed, size=size, **options))
    except Exception as error:  # datasets check their arguments with assertions
        raise UserError(f"{where}: {in_one_line(error)}") from None
    table = []
    for index, problem in enumerate(problems):
        stored = json.dumps(problem, default=str)
        answer = problem["answer"]
        if answer is not None and score(answer, json.loads(stored)) != score(answer, problem):
            raise UserError(f"{where}: a problem that was stored as JSON is scored differently: choose another dataset")
        table.append(
            {
                "data_source": f"reasoning_gym/{dataset}",
                "prompt": [{"role": "user", "content": f"{problem['question']}\n{REASONING_GYM}"}],
                "ability": "reasoning",
                "reward_model": {"style": "rule", "ground_truth": answer or ""},
                "extra_info": {"index": index, reward.COLUMN: stored},
            }
        )
    extra = pa.struct({"index": pa.int64(), reward.COLUMN: pa.string()})
    return pa.Table.from_pylist(table, SCHEMA.set(SCHEMA.get_field_index("extra_info"), pa.field("extra_info", extra)))


def _table(rows: Rows, split: str, convert: Any, data_source: str, ability: str, instruction: str | None) -> pa.Table:
    table = []
    for index, (where, row) in enumerate(rows):
        check_media(row, where)
        check_no_images(row, where, "prompt files that are made here")
        fields = convert(where, row)
        question = fields["question"] if instruction is None else f"{fields['question']} {instruction}"
        table.append(
            {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": question}],
                "ability": ability,
                "reward_model": {"style": "rule", "ground_truth": fields["truth"]},
                "extra_info": {"split": split, "index": index, "answer": fields["answer"]},
                "tools": tools_column(tools_of(row, where)),
            }
        )
    if not table:
        raise UserError(f"{split}: there are no rows")
    has_tools = any(row["tools"] for row in table)
    return pa.Table.from_pylist(table, SCHEMA.append(pa.field("tools", pa.string())) if has_tools else SCHEMA)


def text(row: Mapping[str, Any], column: str, where: str) -> str:
    """Returns the text in a column of a row; raises UserError if there is none."""
    value = _value(row, column, where)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UserError(f"{where}: {column} of this row is empty: fill it in, or remove the row")
    if not isinstance(value, str):
        raise UserError(f"{where}: {column} is not a text")
    return value


def _value(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in row:
        raise UserError(f"{where}: there is no {column}; there are {in_one_line(', '.join(row))}")
    return row[column]
