"""What models are fitted to: prompts with their responses, and pairs of which one response is preferred."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.batch import TrajectoryBatch
from rlhf.data.files import read
from rlhf.data.prompts import Messages, Prompt, beginning, end_of_turn, messages_of, tokens, with_response
from rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def supervised(
    url: str, tokenizer: PreTrainedTokenizerBase, *, prompt: str, response: str, max_tokens: int
) -> tuple[TrajectoryBatch, int]:
    """Rows of a prompt and its response, by the names of their columns, or of `messages` whose last is the response;
    and how many were left out because they are longer. Raises `UserError` naming the row."""
    prompts, responses = [], []
    examples, end = 0, end_of_turn(tokenizer)
    for where, row in read(url):
        examples += 1
        column = response if response in row or "completion" not in row else "completion"
        if "messages" in row and not (prompt in row and column in row):
            messages, said = answered(row["messages"], where, "messages")
        elif prompt in row and column in row:
            messages, said = answered(row[column], where, column, row[prompt])
        else:
            raise UserError(
                f"{where} has no {prompt if prompt not in row else column}: supervised examples are rows of {prompt} "
                f"and {response}, or of messages; there are {', '.join(row)} (prompt_column and response_column name "
                "others)"
            )
        asked = Prompt("", messages, ground_truth=None, ground_truth_is_json=False, extra_info="{}", where=where)
        ids = tokens(asked, tokenizer, system_prompt=None)[1]
        written = [*tokenizer(said, add_special_tokens=False)["input_ids"], *end]
        if not ids:
            raise UserError(f"{where}: the prompt is empty: give it at least one message with content")
        if len(ids) + len(written) <= max_tokens:
            prompts.append(ids)
            responses.append(written)
    _some(prompts, f"{url}, up to max_tokens {max_tokens},")
    columns = {"prompt_ids": prompts, "response_ids": responses, "loss_mask": [[1] * len(each) for each in responses]}
    return TrajectoryBatch.of(columns), examples - len(prompts)


def preferences(
    url: str, tokenizer: PreTrainedTokenizerBase, *, padding: int | None, max_tokens: int
) -> tuple[TrajectoryBatch, int]:
    """Pairs as two rows each, the preferred one first, and how many were left out because they are longer.

    A row is a conversation up to the token at which a classifier with this token for `padding` reads its score, and one
    place after it, which asks for it.
    """
    conversations: list[list[int]] = []
    pairs = 0
    for where, row in read(url):
        pairs += 1
        pair = [_tokens(*each, tokenizer, padding) for each in _pair(row, where)]
        if max(map(len, pair)) <= max_tokens:
            conversations += pair
    _some(conversations, f"{url}, up to max_tokens {max_tokens},")
    asking = [[0]] * len(conversations)
    batch = TrajectoryBatch.of(
        {"prompt_ids": conversations, "response_ids": asking, "loss_mask": [[1]] * len(conversations)}
    )
    return batch, pairs - len(conversations) // 2


def answered(value: Any, where: str, column: str, prompt: Any = None) -> tuple[Messages, str]:
    """Prompt and response: a text after the prompt, or messages that end with the assistant's: either the whole
    conversation, or what goes on from the prompt with a message of the assistant."""
    if isinstance(value, str) and prompt is not None:
        return messages_of(prompt, where), value
    messages = messages_of(value, where, column)
    if messages[-1]["role"] != "assistant" or (prompt is None and messages[0]["role"] == "assistant"):
        text = "" if column == "messages" else "be a text after a prompt, or "
        raise UserError(f"{where}: {column} should {text}end with a message of the assistant, after others")
    whole = messages[0]["role"] != "assistant"  # else they go on from the prompt
    before = messages[:-1] if whole else [*messages_of(prompt, where), *messages[:-1]]
    return before, messages[-1]["content"]


def _pair(row: Mapping[str, Any], where: str) -> Iterator[tuple[Messages, str]]:
    for column in ("chosen", "rejected"):
        if column not in row:
            there = ", ".join(row)
            raise UserError(
                f"{where} has no {column}: preferences are rows of prompt, chosen and rejected; there are {there}"
            )
        yield answered(row[column], where, column, row.get("prompt"))


def _tokens(messages: Messages, response: str, tokenizer: PreTrainedTokenizerBase, padding: int | None) -> list[int]:
    text, _ = with_response(messages, response, tokenizer)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = ids if tokenizer.chat_template else [*beginning(ids, tokenizer), *ids]
    while len(ids) > 1 and ids[-1] == padding:
        ids.pop()
    return ids


def _some(rows: Sequence[Any], url: str) -> None:
    if not rows:
        raise UserError(f"{url} has no examples")
