"""Prompt datasets: files in the layout that verl made common, and which prompts an iteration draws.

Rows are ``data_source, prompt [{role, content}], ability, reward_model {style, ground_truth}, extra_info``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf import seeding
from rlhf.data import files
from rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Messages = list[dict[str, str]]
"""Of a conversation, each {role, content}."""


@dataclass(frozen=True)
class Prompt:
    data_source: str
    messages: Messages
    ground_truth: str | None
    """What the reward compares with: a text, or JSON; None where the dataset says nothing."""
    ground_truth_is_json: bool
    extra_info: str
    """JSON."""
    where: str = field(default="the data", compare=False)
    """File and row, for messages."""

    def after(self, system_prompt: str | None) -> Messages:
        """Its messages, after that of the system, if they have none of their own."""
        if system_prompt is None or self.messages[0]["role"] == "system":
            return self.messages
        return [{"role": "system", "content": system_prompt}, *self.messages]

    def size(self, system_prompt: str | None) -> int:
        """Of its messages, in bytes."""
        return sum(len(message["content"].encode()) for message in self.after(system_prompt))


def structures(ground_truth: str | None, is_json: bool | None, extra_info: str) -> tuple[Any, Any]:
    """Ground truth and extra_info of a prompt as rewards and environments get them: as the dataset holds them, and
    nobody else. What was stored before `is_json` was is a text."""
    truth = json.loads(ground_truth) if is_json and ground_truth is not None else ground_truth
    return truth, json.loads(extra_info) or {}


BYTES_A_TOKEN = 100
"""No text has more, on average: what is longer than that is too long, and not tokenized to find it out."""
TEMPLATE = 128
"""Tokens that a chat template may add to a prompt; a token of the rest has a byte at least."""


class PromptDataset:
    """The prompts of some files, in order. Raises `UserError` naming file and row for anything malformed."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """`paths`: files, or fsspec URLs."""
        self.paths = [str(path) for path in paths]
        self.prompts = [_prompt(row, where) for path in self.paths for where, row in files.read(path)]
        if not self.prompts:
            raise UserError(f"{', '.join(self.paths)}: no prompts")

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def digest(self) -> str:
        """sha256 over the files' bytes, in order."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(bytes.fromhex(files.digest(path)))
        return digest.hexdigest()

    def without_overlong(
        self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, system_prompt: str | None
    ) -> PromptDataset:
        """Without the prompts of more tokens; raises `UserError` if none is left."""
        kept = copy(self)
        kept.prompts = [
            prompt
            for prompt in self.prompts
            if prompt.size(system_prompt) <= BYTES_A_TOKEN * max_tokens
            and len(tokens(prompt, tokenizer, system_prompt)[1]) <= max_tokens
        ]
        if not kept.prompts:
            raise UserError(f"{self.prompts[0].where}: every prompt has more than data.max_prompt_tokens {max_tokens}")
        return kept

    def check_lengths(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, system_prompt: str | None) -> None:
        """Raises `UserError` for the first prompt of more tokens. One that is too short to have so many, whatever a
        template adds, is not looked at closely."""
        for prompt in self.prompts:
            if prompt.size(system_prompt) + TEMPLATE > max_tokens:
                encode(prompt, tokenizer, max_tokens=max_tokens, truncation="error", system_prompt=system_prompt)

    def draw(self, seed: int, cursor: int, count: int) -> list[int]:
        """Rows `cursor` to `cursor + count` of an endless sequence of epochs, each shuffled in its own way."""
        return seeding.epochs(seed, "data", len(self), cursor, count)


def encode(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    truncation: str,
    system_prompt: str | None = None,
) -> tuple[str, list[int]]:
    """The prompt as text and tokens, through the tokenizer's chat template (if it has none: the contents, joined). The
    text is the whole prompt's, whatever is cut from its tokens."""
    if truncation == "error" and (size := prompt.size(system_prompt)) > BYTES_A_TOKEN * max_tokens:
        raise UserError(
            f"{prompt.where}: the prompt has {size:,} bytes, far more than data.max_prompt_tokens {max_tokens} can "
            f"hold ({prompt.messages[-1]['content'][:60]!r}...): raise it, or shorten the prompt"
        )
    text, ids = tokens(prompt, tokenizer, system_prompt)
    if not ids:
        raise UserError(f"{prompt.where}: the prompt is empty: give it at least one message with content")
    if len(ids) > max_tokens:
        if truncation == "error":
            raise UserError(
                f"{prompt.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens {max_tokens} "
                f"({text[:60]!r}...): raise it, or set data.truncation"
            )
        assert truncation != "drop", "such prompts are not in the dataset any more"
        begin = [] if tokenizer.chat_template else beginning(ids[1:], tokenizer)
        kept = len(begin) if ids[: len(begin)] == begin else 0
        head = {"left": kept, "middle": max_tokens // 2, "right": max_tokens}[truncation]
        ids = ids[:head] + ids[len(ids) - (max_tokens - head) :]
    return text, ids


def tokens(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> tuple[str, list[int]]:
    messages = prompt.after(system_prompt)
    if tokenizer.chat_template:  # which writes its special tokens itself
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])
    text = "\n".join(message["content"] for message in messages)
    return text, begun(text, tokenizer)


def begun(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of a text that a sequence begins with, and that goes on after it: the tokenizer's special tokens stand
    before it (a beginning of sequence, unless the text has it already), and none after it."""
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [*beginning(plain, tokenizer), *plain]


def beginning(plain: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that stand before a sequence of these tokens."""
    if plain[:1] == [tokenizer.bos_token_id]:
        return []
    sample = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    places = (at for at in range(len(whole) - len(sample) + 1) if whole[at : at + len(sample)] == sample)
    return whole[: next(places, 0)]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a message of the assistant: those that the chat template writes after it, up to its first
    special tokens (`<|im_end|>`, `<end_of_turn>`); without a template, or where it writes none, the end of sequence."""
    from jinja2 import TemplateError

    end = (int(tokenizer.eos_token_id),)
    if not tokenizer.chat_template:
        return end
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    try:
        _, found, after = str(tokenizer.apply_chat_template(said, tokenize=False)).rpartition("!")
    except TemplateError:  # it knows other roles
        return end
    ids = list(tokenizer(after, add_special_tokens=False)["input_ids"]) if found else []
    special = [token in tokenizer.added_tokens_decoder and token != tokenizer.unk_token_id for token in ids]
    if not any(special):
        return end
    first = special.index(True)
    return tuple(ids[: first + sum(takewhile(bool, special[first:]))])


def with_response(messages: Messages, response: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int | None]:
    """Prompt and response as a reward model reads them, through its own chat template (if it has none: one after the
    other, and the end of sequence); and where in that text the response begins, if it is there as it is."""
    if not tokenizer.chat_template:
        prompt = "\n".join(message["content"] for message in messages)
        return f"{prompt}{response}{tokenizer.eos_token or ''}", len(prompt)
    said = [*messages, {"role": "assistant", "content": response}]
    text = str(tokenizer.apply_chat_template(said, tokenize=False))
    content = response.strip()  # of which templates may make the content
    asked = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    start = text.find(content, len(asked)) if text.startswith(asked) else text.rfind(content)
    return text, start - (len(response) - len(response.lstrip())) if start >= 0 else None


def messages_of(value: Any, where: str, column: str = "prompt") -> Messages:
    """A text is a message of the user. Raises `UserError` saying where."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    valid = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not messages or not valid:
        raise UserError(f"{where}: {column} should be a list of messages {{role, content}}")
    return list(messages)


def _prompt(row: Mapping[str, Any], where: str) -> Prompt:
    for column in ("prompt", "data_source"):
        if row.get(column) is None:
            raise UserError(f"{where}: {column} is missing; there are {', '.join(row)}")
    messages = messages_of(row["prompt"], where)
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"{where}: the prompt is empty: give it at least one message with content")
    reward_model, extra = row.get("reward_model") or {}, row.get("extra_info")
    if not isinstance(reward_model, dict):
        raise UserError(f"{where}: reward_model should be an object {{style, ground_truth}}, not {reward_model!r:.60}")
    extra = {} if extra is None else extra
    style, truth = reward_model.get("style"), reward_model.get("ground_truth")
    if style not in (None, "rule", "model") and isinstance(extra, dict):
        extra = {**extra, "reward_style": style}  # which reward to take, for `auto`
    return Prompt(
        data_source=str(row["data_source"]),
        messages=messages,
        ground_truth=truth if truth is None or isinstance(truth, str) else json.dumps(truth, default=str),
        ground_truth_is_json=not (truth is None or isinstance(truth, str)),
        extra_info=json.dumps(extra, default=str),
        where=where,
    )
