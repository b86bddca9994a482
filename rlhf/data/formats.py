"""The layouts of published datasets: verl's, TRL's and ShareGPT's rows, as a prompt and what belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf.errors import UserError

Messages = list[dict[str, str]]
"""Messages of a conversation, each {role, content}."""
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Roles of ShareGPT's `from`."""
TRUTHS = ("ground_truth", "solution", "answer")
"""Columns of a ground truth outside `reward_model`, in order of precedence."""
LAYOUT = ("data_source", "prompt", "ability", "reward_model", "extra_info")
"""The columns of verl's layout."""


class Question(NamedTuple):
    """The prompt of a row."""

    messages: Messages
    is_text: bool
    """Whether the row has it as a text."""
    answer: str | None
    """The response in the row, if there is one."""
    columns: dict[str, Any]
    """The columns that are neither the prompt nor of verl's layout."""


def question_of(row: Mapping[str, Any], where: str) -> Question:
    """Find the prompt of a row.

    Args:
        row: a row with `prompt`, perhaps with `completion`; with `messages`; or with ShareGPT's `conversations`. In
            the last two, a last message of the assistant is the answer.
        where: file and row, for errors.

    Raises:
        UserError: there is no prompt, or it is empty or malformed.
    """
    column = next((name for name in ("prompt", "messages", "conversations") if row.get(name) is not None), None)
    if column is None:
        raise UserError(
            f"{where}: prompt is missing; there are {', '.join(row)}. Rows have a prompt, messages or conversations: "
            "rename the column, or write such rows with `ratchet data prompts --prompt COLUMN --truth COLUMN`"
        )
    messages, answer = messages_of(row[column], where, column), None
    if column == "prompt":
        completion = row.get("completion")
        answer = completion if completion is None else messages_of(completion, where, "completion")[-1]["content"]
    elif messages[-1]["role"] == "assistant":
        messages, answer = messages[:-1], messages[-1]["content"]
    if column == "conversations":
        messages = with_system(messages, row)
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"{where}: the prompt is empty: give it at least one message with content")
    others = {name: value for name, value in row.items() if name not in (column, *LAYOUT)}
    return Question(messages, isinstance(row[column], str), answer, others)


def truth_of(row: Mapping[str, Any], answer: str | None, where: str) -> Any:
    """The ground truth of a row: of `reward_model`, of a column in `TRUTHS`, or the answer.

    Args:
        row: the row.
        answer: the response in the row, if there is one.
        where: file and row, for errors.

    Raises:
        UserError: `reward_model` is not an object.
    """
    reward_model = row.get("reward_model") or {}
    if not isinstance(reward_model, dict):
        raise UserError(f"{where}: reward_model should be an object {{style, ground_truth}}, not {reward_model!r:.60}")
    truths = (reward_model.get("ground_truth"), *map(row.get, TRUTHS), answer)
    return next((truth for truth in truths if truth is not None), None)


def messages_of(value: Any, where: str, column: str = "prompt") -> Messages:
    """Validate messages; a plain text becomes a message of the user.

    Args:
        value: messages {role, content}, ShareGPT's {from, value}, or text.
        where: file and row, for errors.
        column: name of the column, for errors.

    Raises:
        UserError: the value is neither a text nor a non-empty list of messages.
    """
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if isinstance(messages, list):
        messages = [_of_sharegpt(message, where, column) for message in messages]
    valid = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not messages or not valid:
        raise UserError(f"{where}: {column} should be a list of messages {{role, content}}")
    return list(messages)


def with_system(messages: Messages, row: Mapping[str, Any]) -> Messages:
    """The messages after the text in the column `system` of a ShareGPT row, if it has one.

    Args:
        messages: the row's messages.
        row: the row.
    """
    system = row.get("system")
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages


def _of_sharegpt(message: Any, where: str, column: str) -> Any:
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    if message["from"] not in SHAREGPT:
        raise UserError(
            f"{where}: {column} has a message from {message['from']!r}: from should be one of {', '.join(SHAREGPT)}"
        )
    return {"role": SHAREGPT[message["from"]], "content": message.get("value")}
