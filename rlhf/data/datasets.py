"""Prompt files in the layout that verl made common, from what others publish: GSM8K, MATH, or any table of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from rlhf.errors import UserError
from rlhf.rewards.math import boxed

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64(), "answer": pa.string()}),
    }
)
GSM8K = 'Let\'s think step by step and output the final answer after "####".'
MATH = "Let's think step by step and output the final answer within \\boxed{}."

Rows = Iterable[tuple[str, Mapping[str, Any]]]
"""Where a row stands, for messages, and what it holds."""


def gsm8k(rows: Rows, split: str) -> pa.Table:
    """From rows `question, answer`, where the answer ends with ``#### 42``."""

    def row(where: str, found: Mapping[str, Any]) -> dict[str, str]:
        answer = text(found, "answer", where)
        _, mark, truth = answer.rpartition("####")
        if not mark:
            raise UserError(f"{where}: the answer does not end with #### and a number")
        return {"question": text(found, "question", where), "truth": truth.strip().replace(",", ""), "answer": answer}

    return _table(rows, split, row, "openai/gsm8k", "math", GSM8K)


def math(rows: Rows, split: str, data_source: str = "lighteval/MATH") -> pa.Table:
    """From rows `problem, answer`, or `problem, solution` with the answer in its last ``\\boxed{}``."""

    def row(where: str, found: Mapping[str, Any]) -> dict[str, str]:
        if "answer" in found:
            truth = answer = text(found, "answer", where)
        else:
            answer = text(found, "solution", where)
            inside = boxed(answer)
            if inside is None:
                raise UserError(f"{where}: the solution has no \\boxed{{}} answer")
            truth = inside.removeprefix("\\boxed{").removesuffix("}")
        return {"question": text(found, "problem", where), "truth": truth, "answer": answer}

    return _table(rows, split, row, data_source, "math", MATH)


def prompts(
    rows: Rows, split: str, *, prompt: str, truth: str | None, data_source: str, instruction: str | None
) -> pa.Table:
    """From any rows: the names of the columns that hold the prompt, and what the reward compares with."""

    def row(where: str, found: Mapping[str, Any]) -> dict[str, str]:
        expected = "" if truth is None else _value(found, truth, where)
        if expected is None:
            raise UserError(f"{where}: {truth} is null")
        expected = expected if isinstance(expected, str) else json.dumps(expected, ensure_ascii=False, default=str)
        return {"question": text(found, prompt, where), "truth": expected, "answer": expected}

    return _table(rows, split, row, data_source, "", instruction)


def _table(rows: Rows, split: str, row: Any, data_source: str, ability: str, instruction: str | None) -> pa.Table:
    table = []
    for index, (where, found) in enumerate(rows):
        one = row(where, found)
        question = one["question"] if instruction is None else f"{one['question']} {instruction}"
        table.append(
            {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": question}],
                "ability": ability,
                "reward_model": {"style": "rule", "ground_truth": one["truth"]},
                "extra_info": {"split": split, "index": index, "answer": one["answer"]},
            }
        )
    if not table:
        raise UserError(f"{split}: there are no rows")
    return pa.Table.from_pylist(table, SCHEMA)


def text(found: Mapping[str, Any], column: str, where: str) -> str:
    value = _value(found, column, where)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {column} is empty, or not a text")
    return value


def _value(found: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in found:
        raise UserError(f"{where}: there is no {column}; there are {', '.join(found)}")
    return found[column]
