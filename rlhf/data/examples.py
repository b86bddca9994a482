"""Training examples outside the RL loop: prompts with responses, and pairs of a preferred and a rejected response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.data.chat_turns import token_ids
from ratchet.rlhf.data.files import folder_of, read
from ratchet.rlhf.data.formats import (
    THOUGHTS,
    Chat,
    Draft,
    Messages,
    check_media,
    check_no_images,
    drafts_of,
    tools_of,
    unseen_columns,
    with_images,
    with_system,
    without_images,
)
from ratchet.rlhf.data.images import digest_of
from ratchet.rlhf.data.prompts import asked, beginning, end_of_turn, tokenize_prompt, with_response
from ratchet.rlhf.errors import UserError, in_one_line
from ratchet.rlhf.schema import IMAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DrawnTokens(NamedTuple):
    """A trajectory of several answers, or with calls of tools, which only its tokens say: what `ratchet ingest` writes
    of agents' trajectories."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    """1 for the model's tokens, 0 for those that it read."""


class Examples(NamedTuple):
    """Supervised examples."""

    batch: TrajectoryBatch
    """Columns `prompt_ids`, `response_ids`, `loss_mask` and `images`."""
    left_out: int
    """Number of examples that are too long."""
    images: dict[str, bytes]
    """The images of all examples, encoded, by their digests: each is in memory once."""


def supervised(
    url: str, tokenizer: PreTrainedTokenizerBase, *, prompt: str, response: str, max_tokens: int
) -> Examples:
    """Reads supervised examples; see `example_of`. Of `drawn_tokens`, those that the model wrote are learned.

    Args:
        url: Parquet or JSON file, any fsspec URL, or a local folder; see `data_files`.
        max_tokens: maximum number of prompt and response tokens; longer examples are left out.

    Raises:
        UserError: a row is malformed (the message names it), or no example is left.
    """
    prompts, responses, masks, digests = [], [], [], list[list[str] | None]()
    images: dict[str, bytes] = {}
    examples, end = 0, end_of_turn(tokenizer)
    for where, row in read(url):
        examples += 1
        if (drawn := drawn_tokens(row, where, tokenizer, response=response)) is not None:
            if len(drawn.prompt_ids) + len(drawn.response_ids) <= max_tokens:
                prompts.append(drawn.prompt_ids)
                responses.append(drawn.response_ids)
                masks.append(drawn.mask)
                digests.append(None)
            continue
        if (example := example_of(row, where, prompt=prompt, response=response)) is None:
            raise UserError(
                f"{where} has no {prompt if prompt not in row else response}: supervised examples are rows of {prompt} "
                f"and {response}, or of messages or conversations; there are {in_one_line(', '.join(row))} "
                "(set other names in prompt_column and response_column)"
            )
        question, answer = asked(example[0], where), example[1]
        prompt_ids = tokenize_prompt(question, tokenizer, system_prompt=None)[1]
        response_ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], *end]
        if not prompt_ids:
            raise UserError(f"{where}: the prompt is empty: give it at least one message with content")
        if len(prompt_ids) + len(response_ids) <= max_tokens:
            prompts.append(prompt_ids)
            responses.append(response_ids)
            masks.append([1] * len(response_ids))
            digests.append([*map(digest_of, question.images)] or None)
            for digest, image in zip(digests[-1] or (), question.images, strict=True):
                images.setdefault(digest, image)
    _check_not_empty(prompts, f"{url}, up to max_tokens {max_tokens},")
    columns = {"prompt_ids": prompts, "response_ids": responses, "loss_mask": masks, IMAGES: digests}
    return Examples(TrajectoryBatch.of(columns), examples - len(prompts), images)


def example_of(
    row: Mapping[str, Any], where: str, *, prompt: str = "prompt", response: str = "response"
) -> tuple[Chat, str] | None:
    """Finds the prompt and the response of a row.

    Args:
        row: a row with a prompt and a response, or with `messages` (or ShareGPT's `conversations`) that end with the
            response; perhaps with `tools`.
        response: name of the response column; `completion` is accepted in its place.

    Returns:
        The messages before the response with the tools, and its text; None if the row has other columns.

    Raises:
        UserError: a column has another form (see `answered`), or would be left out although it belongs to the prompt.
    """
    check_media(row, where)
    column = "completion" if row.get("completion") is not None and row.get(response) is None else response
    if row.get(prompt) is not None and row.get(column) is not None:
        drafts, answer = answered(row[column], where, column, row[prompt])
        messages, images = with_images(drafts, row, where, folder_of(where))
        return _seen(messages, answer, row, where, images, but=(prompt, column))
    conversation = "messages" if row.get("messages") is not None else "conversations"
    if row.get(conversation) is None:
        if row.get(prompt) is not None and column in row:
            raise UserError(f"{where}: {column} should be a text or a list of messages, and is null")
        return None
    drafts, answer = answered(row[conversation], where, conversation)
    messages, images = with_images(drafts, row, where, folder_of(where))
    messages = with_system(messages, row) if conversation == "conversations" else messages
    return _seen(messages, answer, row, where, images)


def drawn_tokens(
    row: Mapping[str, Any], where: str, tokenizer: PreTrainedTokenizerBase, *, response: str = "response"
) -> DrawnTokens | None:
    """Returns the tokens of a row with `prompt_ids`, `response_ids` and `response_mask` whose response is null; None of
    other rows.

    Raises:
        UserError: a column has another form, or tokens that the tokenizer lacks.
    """
    if row.get("response_ids") is None or row.get(response) is not None:
        return None
    check_media(row, where)
    check_no_images(row, where, "tokens that were drawn")
    drawn = DrawnTokens(*(row.get(name) for name in ("prompt_ids", "response_ids", "response_mask")))  # type: ignore[arg-type]  # checked below
    for name, numbers in zip(("prompt_ids", "response_ids", "response_mask"), drawn, strict=True):
        limit = 2 if name == "response_mask" else len(tokenizer)
        known = isinstance(numbers, list) and bool(numbers) and all(isinstance(number, int) for number in numbers)
        if not known or not 0 <= min(numbers) <= max(numbers) < limit:
            raise UserError(
                f"{where}: {name} should be a list of numbers from 0 to {limit - 1}: draw the trajectories with this "
                "model's tokenizer"
            )
    if len(drawn.mask) != len(drawn.response_ids):
        raise UserError(
            f"{where}: response_mask has {len(drawn.mask)} numbers, and response_ids {len(drawn.response_ids)}: write "
            "one for each token"
        )
    return drawn


def preferences(
    url: str, tokenizer: PreTrainedTokenizerBase, *, padding: int | None, max_tokens: int
) -> tuple[TrajectoryBatch, int]:
    """Reads preference pairs as two rows each, the preferred response first.

    A row holds a conversation up to the token at which the classifier reads its score, followed by one response token
    as the position of the score.

    Args:
        url: Parquet or JSON file with `prompt`, `chosen` and `rejected`, any fsspec URL, or a local folder; see
            `data_files`.
        padding: padding token of the classifier; conversations end before trailing ones. None: no such token.
        max_tokens: maximum number of tokens of a conversation; pairs with a longer one are left out.

    Returns:
        The rows with columns `prompt_ids`, `response_ids` and `loss_mask`, and the number of pairs left out.

    Raises:
        UserError: a row is malformed (the message names it), or no pair is left.
    """
    conversations: list[list[int]] = []
    pairs = 0
    for where, row in read(url):
        pairs += 1
        pair = [_tokens(chat, response, tokenizer, padding, where) for chat, response in pair_of(row, where)]
        if max(map(len, pair)) <= max_tokens:
            conversations += pair
    _check_not_empty(conversations, f"{url}, up to max_tokens {max_tokens},")
    score_tokens = [[0]] * len(conversations)
    batch = TrajectoryBatch.of(
        {"prompt_ids": conversations, "response_ids": score_tokens, "loss_mask": [[1]] * len(conversations)}
    )
    return batch, pairs - len(conversations) // 2


def answered(value: Any, where: str, column: str, prompt: Any = None) -> tuple[list[Draft], str]:
    """Splits an example into the messages before its response, and the response's text.

    Args:
        value: text after `prompt`, or messages that end with one of the assistant: the whole conversation, or, if the
            first message is the assistant's, a continuation of `prompt`.
        prompt: text or messages before the value, if any.

    Raises:
        UserError: the value has another form.
    """
    if isinstance(value, str) and prompt is not None:
        return drafts_of(prompt, where), value
    drafts = drafts_of(value, where, column)
    first, last = drafts[0].message["role"], without_images(drafts[-1:], f"{where}: the answer in {column}")[0]
    if last["role"] != "assistant" or (prompt is None and first == "assistant"):
        text = "" if column in ("messages", "conversations") else "be a text after a prompt, or "
        raise UserError(f"{where}: {column} should {text}end with a message of the assistant, after others")
    if "tool_calls" in last:
        raise UserError(
            f"{where}: {column} ends with a call of a tool, and only texts are learned: leave the row out, or write "
            "the call into the content, as the model should"
        )
    if thoughts := next((key for key in THOUGHTS if last.get(key)), None):
        raise UserError(
            f"{where}: {column} ends with a message with {thoughts}, and only contents are learned: write it into the "
            "content, as the model should, or remove it"
        )
    before = drafts[:-1] if first != "assistant" else [*drafts_of(prompt, where), *drafts[:-1]]
    return before, last["content"]


def pair_of(row: Mapping[str, Any], where: str) -> Iterator[tuple[Chat, str]]:
    """Yields the two sides of a preference, the preferred first: the messages before a response with the tools, and its
    text."""
    check_media(row, where)
    check_no_images(row, where, "pairs")
    for column in ("chosen", "rejected"):
        if column not in row:
            columns = in_one_line(", ".join(row))
            raise UserError(
                f"{where} has no {column}: preferences are rows of prompt, chosen and rejected; there are {columns}"
            )
        drafts, answer = answered(row[column], where, column, row.get("prompt"))
        yield _seen(without_images(drafts, f"{where}: the prompt of a pair"), answer, row, where)


def _seen(
    messages: Messages,
    response: str,
    row: Mapping[str, Any],
    where: str,
    images: tuple[bytes, ...] = (),
    but: Sequence[str] = (),
) -> tuple[Chat, str]:
    """Returns an example with the tools of its row.

    Raises UserError if the row has another column, not in `but`, that belongs to its prompt.
    """
    if unseen := [name for name in unseen_columns(row, messages) if name not in but]:
        raise UserError(
            f"{where} has {unseen[0]}, which would be left out: write it into the messages, or remove the column"
        )
    return Chat(messages, tools_of(row, where), images), response


def _tokens(
    chat: Chat, response: str, tokenizer: PreTrainedTokenizerBase, padding: int | None, where: str
) -> list[int]:
    written, _ = with_response(chat, response, tokenizer, where)
    ids = token_ids(written, tokenizer)
    ids = ids if tokenizer.chat_template else [*beginning(ids, tokenizer), *ids]
    while len(ids) > 1 and ids[-1] == padding:
        ids.pop()
    return ids


def _check_not_empty(rows: Sequence[Any], url: str) -> None:
    if not rows:
        raise UserError(f"{url} has no examples")
