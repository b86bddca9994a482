"""Prompt datasets: files of prompts, tokenization, and the prompts that an iteration draws.

Rows are ``data_source, prompt [{role, content}], ability, reward_model {style, ground_truth}, extra_info`` as in verl,
or have another layout of `ratchet.rlhf.data.formats`.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, takewhile
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from ratchet.rlhf.data import drawing, files
from ratchet.rlhf.data.chat_turns import (
    CONTENT,
    Rendered,
    around_content,
    by_template,
    check_sees,
    in_parts,
    render_contents,
    state_of,
    token_ids,
    with_image_tokens,
)
from ratchet.rlhf.data.drawing import Drawn
from ratchet.rlhf.data.folders import data_files, name_of
from ratchet.rlhf.data.formats import (
    SHAREGPT,
    THOUGHTS,
    Chat,
    Message,
    Messages,
    Tools,
    question_of,
    text_of,
    tools_column,
    truth_of,
)
from ratchet.rlhf.data.images import ImageError
from ratchet.rlhf.errors import UserError, in_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """A row of a prompt dataset."""

    data_source: str
    messages: Messages
    ground_truth: str | None
    """Ground truth of the reward: text, or JSON; None if the dataset has none."""
    ground_truth_is_json: bool
    extra_info: str
    """JSON; includes the row's columns that have no other place, and its tools."""
    tools: Tools = ()
    """The functions that the policy may call, as the chat template describes them."""
    continues: str | None = None
    """The turns of a stored trajectory with which the prompt's trajectories begin, as JSON: their tokens `ids`, for
    each turn `turn_starts`, `turn_ends`, `turn_rewards`, `turn_images` and, of a durable environment, `states`, and
    `images`, those of the environment's answers as `data:` URLs. None: there are none."""
    style: str | None = field(default=None, compare=False)
    """`reward_model.style`, if it names a reward."""
    is_text: bool = field(default=False, compare=False)
    """True if the row has the prompt as text, not as messages."""
    where: str = field(default="the data", compare=False)
    """File and row, for errors."""
    unseen: tuple[str, ...] = field(default=(), compare=False)
    """Columns of the row that may belong to the prompt, and are not shown to the model; see `formats.UNSEEN`."""
    images: tuple[bytes, ...] = field(default=(), compare=False)  # the messages have their digests
    """The images of all messages, encoded, in order."""

    @property
    def original(self) -> str | Messages:
        """The prompt as in the row."""
        return self.messages[-1]["content"] if self.is_text else self.messages

    def after(self, system_prompt: str | None) -> Messages:
        """Returns the messages, after the system message if they have none."""
        if system_prompt is None or self.messages[0]["role"] == "system":
            return self.messages
        return [{"role": "system", "content": system_prompt}, *self.messages]

    def chat(self, system_prompt: str | None) -> Chat:
        """Returns the messages, after the system message if they have none, with the tools and images."""
        return Chat(self.after(system_prompt), self.tools, self.images)

    def size(self, system_prompt: str | None) -> int:
        """Returns the size of the messages' contents and the tools, in bytes."""
        texts = [*map(text_of, self.after(system_prompt)), tools_column(self.tools) or ""]
        return sum(len(text.encode()) for text in texts)

    @property
    def is_plain(self) -> bool:
        """True if all messages have only a role and a content, and not calls of tools or the like, and no tools."""
        return not self.tools and all(len(message) <= 2 for message in self.messages)


def asked(chat: Chat, where: str) -> Prompt:
    """Returns a chat that is no row of a dataset as a prompt; `where` is its place, for errors."""
    messages, tools, images = chat
    return Prompt("", messages, None, False, "{}", tools=tools, where=where, images=images)


def structures(ground_truth: str | None, is_json: bool | None, extra_info: str | None) -> tuple[Any, Any]:
    """Decodes a prompt's ground truth and `extra_info` for a reward or an environment.

    Returns new objects, which the caller may modify.
    """
    truth = json.loads(ground_truth) if is_json and ground_truth is not None else ground_truth
    return truth, json.loads(extra_info or "{}") or {}


def stored_chat(messages: str | None, tools: str | None) -> Chat:
    """Decodes the columns `messages` and `tools` of a trajectory. Messages that are unknown are none."""
    return Chat(json.loads(messages or "[]"), tuple(json.loads(tools or "[]")))


def original(messages: str | None, is_text: bool) -> str | Messages:
    """Decodes a prompt, as text or messages like the dataset's, for a reward. Messages that are unknown are none."""
    decoded: Messages = json.loads(messages or "[]")
    # a system message may precede a prompt that is text
    return decoded[-1]["content"] if is_text else decoded


BYTES_A_TOKEN = 100
"""Upper bound on the mean bytes per token: a larger prompt is too long, and is not tokenized."""
TEMPLATE = 128
"""Upper bound on the tokens that a chat template adds to a prompt. Every other token has at least one byte."""
SEE_TOOLS = "set model.chat_template, choose a model that was trained to call tools, or rename the column"
"""What to do if a chat template does not describe the tools of a row."""
RENDERED = frozenset(("system", "user", "assistant"))
"""Roles that chat templates render or refuse."""
MESSAGE_ROLES = SHAREGPT | {
    "tool": "tool",
    "function": "tool",
    "developer": "system",
    "model": "assistant",
    "bot": "assistant",
}
"""What roles of other data mean, in lower case."""


class PromptDataset:
    """The prompts of some files, in order. They are read on demand; see `ratchet.rlhf.data.files`."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """Indexes the files; see `data_files`. Raises UserError if there are no prompts."""
        self.paths = [str(path) for path in paths]
        self._files = [
            (number, name_of(path), files.open_rows(file))
            for number, path in enumerate(self.paths)
            for file in data_files(path)
        ]
        """The rows of each file, with the number and the name of its path."""
        self._starts = list(accumulate((len(rows) for _, _, rows in self._files), initial=0))
        self._kept: array[int] | None = None
        """Rows of this dataset's prompts; None: all."""
        for number, path in enumerate(self.paths):
            if not self._sizes[number]:
                raise UserError(f"{path}: no prompts")

    @cached_property
    def _sizes(self) -> list[int]:
        """Number of prompts of each path."""
        sizes = [0] * len(self.paths)
        for (number, _, rows), start in zip(self._files, self._starts, strict=False):
            end = start + len(rows)
            sizes[number] += (
                end - start if self._kept is None else bisect_left(self._kept, end) - bisect_left(self._kept, start)
            )
        return sizes

    def __len__(self) -> int:
        return sum(self._sizes)

    def __getitem__(self, index: int) -> Prompt:
        """Reads a prompt. Raises UserError if its row is malformed; the message names it."""
        return _prompt(*self._read(index))

    def __iter__(self) -> Iterator[Prompt]:
        """Reads the prompts in order, as `__getitem__` does."""
        return (_prompt(*row) for row in self._rows())

    def attempts(self) -> Iterator[Prompt | ImageError]:
        """Reads the prompts in order; in place of one whose images cannot be used, what is wrong with them."""
        for row in self._rows():
            try:
                yield _prompt(*row)
            except ImageError as error:
                yield error

    def _read(self, index: int) -> tuple[Mapping[str, Any], str, str]:
        """Reads the row of a prompt, with its location and the name of its path."""
        row = self.row(index)
        file = bisect_right(self._starts, row) - 1
        _, name, rows = self._files[file]
        where, values = rows[row - self._starts[file]]
        return values, where, name

    def _rows(self) -> Iterator[tuple[Mapping[str, Any], str, str]]:
        """Reads the rows of the prompts in order, as `_read` does."""
        if self._kept is not None:
            yield from map(self._read, range(len(self)))
            return
        for _, name, rows in self._files:
            yield from ((values, where, name) for where, values in rows)

    def row(self, index: int) -> int:
        """Returns the number of a prompt's row in the files, which does not depend on the prompts that are left out."""
        return index if self._kept is None else self._kept[index]

    def has_row(self, row: int) -> bool:
        """Returns True if the dataset has the prompt of a row of the files."""
        if self._kept is None:
            return 0 <= row < len(self)
        place = bisect_left(self._kept, row)
        return place < len(self._kept) and self._kept[place] == row

    def index_of(self, row: int) -> int:
        """Returns the index of the prompt of a row of the files, which the dataset has; see `row`."""
        return row if self._kept is None else bisect_left(self._kept, row)

    @cached_property
    def digest(self) -> str:
        """The sha256 of the digests of the files, with the images that they name, in order."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(bytes.fromhex(files.data_digest(path)))
        return digest.hexdigest()

    def without_overlong(
        self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, system_prompt: str | None
    ) -> PromptDataset:
        """Returns a copy without prompts of more than `max_tokens`. Raises UserError if no prompt of a file is left."""
        kept = PromptDataset(self.paths)
        kept._kept = array(
            "q",
            (
                self.row(index)
                for index, prompt in enumerate(self)
                if prompt.size(system_prompt) <= BYTES_A_TOKEN * max_tokens
                and len(tokenize_prompt(prompt, tokenizer, system_prompt)[1]) <= max_tokens
            ),
        )
        # cached before prompts were left out
        del kept._sizes
        for path, size in zip(self.paths, kept._sizes, strict=True):
            if not size:
                raise UserError(f"{path}: every prompt has more than data.max_prompt_tokens {max_tokens}")
        return kept

    def draw(
        self,
        seed: int,
        cursor: int,
        count: int,
        weights: Sequence[float] | None = None,
        chance: Callable[[int], float] | None = None,
        *,
        shuffle: bool = True,
    ) -> list[int]:
        """Draws prompts from an endless sequence of epochs, each shuffled differently; returns their indices.

        Args:
            cursor: number of prompts drawn before.
            weights: weight of each path in the mixture; None: every prompt counts the same.
            chance: the probability with which a prompt is accepted, by its `row`; otherwise others of its file are
                tried. None: always.
            shuffle: False: epochs in the order of the files.
        """
        sizes = self._sizes
        starts = list(accumulate(sizes, initial=0))
        drawn = drawing.draw(seed, sizes, weights, cursor, count, shuffle=shuffle)
        if chance is not None:
            chances = partial(_chance, chance, self, starts)
            drawn = [
                drawing.redraw(seed, position, pair, sizes[pair[0]], chances)
                for position, pair in enumerate(drawn, cursor)
            ]
        return [starts[path] + index for path, index in drawn]


def _chance(chance: Callable[[int], float], dataset: PromptDataset, starts: Sequence[int], drawn: Drawn) -> float:
    path, index = drawn
    return chance(dataset.row(starts[path] + index))


def check_length(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_tokens: int, system_prompt: str | None
) -> None:
    """Raises UserError if a prompt is too long."""
    # few enough bytes need no tokenization, except for tools, calls and the like, around which templates write more
    if not prompt.is_plain or prompt.size(system_prompt) + TEMPLATE > max_tokens:
        encode(prompt, tokenizer, max_tokens=max_tokens, truncation="error", system_prompt=system_prompt)


def encode(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    truncation: str,
    system_prompt: str | None = None,
) -> tuple[str, list[int]]:
    """Renders a prompt as text, which is never truncated, and as tokens, which are.

    Args:
        truncation: `error`, or the part that is cut from a longer prompt: `left`, `right` or `middle`.
    """
    if truncation == "error" and (size := prompt.size(system_prompt)) > BYTES_A_TOKEN * max_tokens:
        raise UserError(
            f"{prompt.where}: the prompt has {size:,} bytes, far more than data.max_prompt_tokens {max_tokens} can "
            f"hold ({prompt.messages[-1]['content'][:60]!r}...): raise it, or shorten the prompt"
        )
    text, ids = tokenize_prompt(prompt, tokenizer, system_prompt)
    if not ids:
        raise UserError(f"{prompt.where}: the prompt is empty: give it at least one message with content")
    if len(ids) > max_tokens:
        if truncation == "error":
            raise UserError(
                f"{prompt.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens {max_tokens} "
                f"({text[:60]!r}...): raise it, or set data.truncation"
            )
        assert truncation != "drop", "the dataset has no prompts that are too long"
        if prompt.images:
            raise UserError(
                f"{prompt.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens {max_tokens}, and "
                "cannot be cut, because it has images: raise it, or set data.truncation: drop"
            )
        # special tokens at the beginning are never cut
        special = [] if tokenizer.chat_template else beginning(ids[1:], tokenizer)
        kept = len(special) if ids[: len(special)] == special else 0
        head = {"left": kept, "middle": max_tokens // 2, "right": max_tokens}[truncation]
        ids = ids[:head] + ids[len(ids) - (max_tokens - head) :]
    return text, ids


def tokenize_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> tuple[str, list[int]]:
    """Renders a prompt as text and tokens, without truncation. Without a chat template, the contents are joined."""
    return tokenize_chat(prompt.chat(system_prompt), tokenizer, prompt.where)


def tokenize_chat(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[str, list[int]]:
    """Renders messages as `tokenize_prompt` does a prompt."""

    def template(chat: Chat) -> str:
        return render(chat, tokenizer, where, add_generation_prompt=True)

    check_sees(chat, tokenizer, where)
    if tokenizer.chat_template:  # a template writes the special tokens itself
        # split before contents are searched for special tokens, of which the mark of an image may be one
        chat = Chat(in_parts(chat.messages, tokenizer), chat.tools, chat.images)
        written = render_contents(template, chat, tokenizer)
        return written.text, with_image_tokens(token_ids(written, tokenizer), chat, tokenizer, where)
    text = template(chat)
    return text, tokenize_start(text, tokenizer)


def render(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, *, add_generation_prompt: bool = False) -> str:
    """Renders messages and tools as text. Without a chat template, the contents are joined."""
    from jinja2 import TemplateError

    messages, tools, _ = chat
    template = tokenizer.chat_template
    _check_keys(messages, tools, str(template or ""), where)
    if not template:
        return "\n".join(message["content"] for message in messages)
    try:
        _check_roles(messages, tokenizer, where)
        # some templates introduce an empty list
        options = {"tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
        text = by_template(messages, tokenizer, **options)
    except (TemplateError, TypeError) as error:  # an unknown role, or another form than the template expects
        what = "messages and tools" if tools else "messages"
        raise UserError(f"{where}: the chat template refuses the {what}: {in_one_line(error)}") from None
    for tool in tools:
        if (name := tool.get("function", tool)["name"]) not in text:
            raise UserError(f"{where}: the chat template leaves out the tool {name}: {SEE_TOOLS}")
    return text


def _check_keys(messages: Messages, tools: Tools, template: str, where: str) -> None:
    """Raises UserError for a key of the messages, or tools, that the chat template would leave out."""
    for key in ("tools", "tool_calls", *THOUGHTS):
        is_there = bool(tools) if key == "tools" else any(message.get(key) for message in messages)
        if is_there and not re.search(rf"\b{key}\b", template):
            what = f"has a chat template that does not render {key}" if template else "has no chat template"
            found, fix = ("has tools", SEE_TOOLS) if key == "tools" else ("calls tools", "set model.chat_template")
            if key in THOUGHTS:
                found, fix = f"has a message with {key}", f"remove it, write it into the content, or {fix}"
            raise UserError(f"{where}: the prompt {found}, and the model {what}: {fix}")


def _check_roles(messages: Messages, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raises UserError for a role that the chat template does not handle, or whose messages it leaves out.

    Many templates render an unknown role, such as `human`, without complaint, although the model never saw such a turn.
    """
    state, template = state_of(tokenizer), str(tokenizer.chat_template)
    for role in {message["role"] for message in messages} - RENDERED - state.rendered[template]:
        if role != "tool" and not re.search(rf"(['\"]){re.escape(role)}\1", template):
            write = MESSAGE_ROLES.get(role.lower())
            rename = "rename it" if write is None else f"write {write}"
            raise UserError(
                f"{where}: the chat template knows no role {role!r:.40}: {rename}, or set another model.chat_template"
            )
        mark = token_hex(16)
        marked = [Message(role=role, content=mark) if message["role"] == role else message for message in messages]
        if mark not in by_template(marked, tokenizer):
            raise UserError(
                f"{where}: the chat template leaves out messages of the role {role}: set another model.chat_template, "
                "or leave out such rows"
            )
        state.rendered[template].add(role)


def tokenize_start(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes the start of a sequence that will be continued, without a chat template.

    The tokenizer's special tokens are put before the text, which may start with one already, but none after it.
    """
    bos = tokenizer.bos_token or ""
    first = bos if text.startswith(bos) else ""
    written = render_contents(lambda rest: first + rest, text.removeprefix(first), tokenizer)
    plain = token_ids(written, tokenizer)
    return [*beginning(plain, tokenizer), *plain]


def beginning(plain: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the special tokens that the tokenizer puts before a sequence.

    None if `plain`, its tokens, already starts with the beginning-of-sequence token.
    """
    if plain[:1] == [tokenizer.bos_token_id]:
        return []
    sample = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    # the special tokens before those of the text itself
    starts = (at for at in range(len(whole) - len(sample) + 1) if whole[at : at + len(sample)] == sample)
    return whole[: next(starts, 0)]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that end a message of the assistant.

    They are those that the chat template writes after a message, up to and including the first special tokens
    (`<|im_end|>`, `<end_of_turn>`); without a template, or without special tokens there, the end-of-sequence token.
    """
    from jinja2 import TemplateError

    end = (int(tokenizer.eos_token_id),)
    if not tokenizer.chat_template:
        return end
    example: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": CONTENT}]
    try:
        after = around_content(example, tokenizer)[1:]
    except TemplateError:  # the template has other roles
        return end
    ids = list(tokenizer(after[-1], add_special_tokens=False)["input_ids"]) if after else []
    special = [token in tokenizer.added_tokens_decoder and token != tokenizer.unk_token_id for token in ids]
    if not any(special):
        return end
    first = special.index(True)
    return tuple(ids[: first + sum(takewhile(bool, special[first:]))])


def with_response(
    chat: Chat, response: str, tokenizer: PreTrainedTokenizerBase, where: str = "the prompt"
) -> tuple[Rendered, int | None]:
    """Renders a prompt and its response for a reward model. Without a chat template, the contents are joined.

    Returns:
        The rendered conversation, and the position of the response in its text; None if the template changes the
        response.
    """
    messages = chat.messages
    conversation, placed = (
        chat._replace(messages=[*messages, {"role": "assistant", "content": content}])
        for content in (response, CONTENT)
    )
    if not tokenizer.chat_template:
        end = tokenizer.eos_token or ""

        def joined(conversation: Chat) -> str:
            messages = conversation.messages
            return (
                render(conversation._replace(messages=messages[:-1]), tokenizer, where) + messages[-1]["content"] + end
            )

        written = render_contents(joined, conversation, tokenizer)
        return written, len(written.text) - len(response + end)
    written = render_contents(lambda conversation: render(conversation, tokenizer, where), conversation, tokenizer)
    before, *after = render(placed, tokenizer, where).split(CONTENT)
    # templates may strip the content
    if len(after) != 1 or not written.text.startswith(before + response.strip()):
        return written, None
    leading = len(response) - len(response.lstrip())
    return written, len(before) - (0 if written.text.startswith(before + response) else leading)


def _prompt(row: Mapping[str, Any], where: str, source: str) -> Prompt:
    """Converts a row to a prompt; `source` is the data source of a row that names none."""
    question = question_of(row, where, files.folder_of(where))
    truth = truth_of(row, question.answer, where)
    extra, style = row.get("extra_info"), (row.get("reward_model") or {}).get("style")
    extra, style = {} if extra is None else extra, None if style in ("rule", "model") else style
    if isinstance(extra, dict):
        extra = {**question.columns, **extra}
        extra |= {} if style is None else {"reward_style": style}  # `auto` chooses the reward by it
    data_source = row.get("data_source")
    return Prompt(
        data_source=source if data_source is None else str(data_source),
        messages=question.messages,
        ground_truth=truth if truth is None or isinstance(truth, str) else json.dumps(truth, default=str),
        ground_truth_is_json=not (truth is None or isinstance(truth, str)),
        extra_info=json.dumps(extra, default=str),
        tools=question.tools,
        continues=None if row.get("continues") is None else json.dumps(row["continues"]),
        style=style,
        is_text=question.is_text,
        where=where,
        unseen=question.unseen,
        images=question.images,
    )
