"""Prompt datasets: files in the layout that verl made common, and which prompts an iteration draws.

Rows are ``data_source, prompt [{role, content}], ability, reward_model {style, ground_truth}, extra_info``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rlhf import seeding
from rlhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Messages = list[dict[str, str]]
"""Of a conversation, each {role, content}."""


@dataclass(frozen=True)
class Prompt:
    data_source: str
    messages: Messages
    ground_truth: str
    extra_info: str
    where: str = field(default="the data", compare=False)
    """File and row, for messages."""

    def after(self, system_prompt: str | None) -> Messages:
        """Its messages, after that of the system, if they have none of their own."""
        if system_prompt is None or self.messages[0]["role"] == "system":
            return self.messages
        return [{"role": "system", "content": system_prompt}, *self.messages]


TEMPLATE = 128
"""Tokens that a chat template may add to a prompt; a token of the rest has a byte at least."""


class PromptDataset:
    """The prompts of some files, in order. Raises `UserError` naming file and row for anything malformed."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [Path(path) for path in paths]
        self.prompts = [prompt for path in self.paths for prompt in _read(path)]
        if not self.prompts:
            raise UserError(f"{', '.join(map(str, self.paths))}: no prompts")

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def digest(self) -> str:
        """sha256 over the files' bytes, in order."""
        digest = hashlib.sha256()
        for path in self.paths:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def without_overlong(
        self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, system_prompt: str | None
    ) -> PromptDataset:
        """Without the prompts of more tokens; raises `UserError` if none is left."""
        kept = copy(self)
        kept.prompts = [each for each in self.prompts if len(tokens(each, tokenizer, system_prompt)[1]) <= max_tokens]
        if not kept.prompts:
            raise UserError(f"{self.prompts[0].where}: every prompt has more than data.max_prompt_tokens {max_tokens}")
        return kept

    def check_lengths(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, system_prompt: str | None) -> None:
        """Raises `UserError` for the first prompt of more tokens. One that is too short to have so many, whatever a
        template adds, is not looked at closely."""
        for prompt in self.prompts:
            characters = sum(len(message["content"].encode()) for message in prompt.after(system_prompt))
            if characters + TEMPLATE > max_tokens:
                encode(prompt, tokenizer, max_tokens=max_tokens, truncation="error", system_prompt=system_prompt)

    def draw(self, seed: int, cursor: int, count: int) -> list[int]:
        """Rows `cursor` to `cursor + count` of an endless sequence of epochs, each shuffled in its own way."""
        rows: list[int] = []
        while len(rows) < count:
            epoch, start = divmod(cursor + len(rows), len(self))
            order = seeding.generator(seed, "data", epoch).permutation(len(self))
            rows += order[start : start + count - len(rows)].tolist()
        return rows


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
        head = {"left": 0, "middle": max_tokens // 2, "right": max_tokens}[truncation]
        ids = ids[:head] + ids[len(ids) - (max_tokens - head) :]
    return text, ids


def tokens(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> tuple[str, list[int]]:
    messages = prompt.after(system_prompt)
    if tokenizer.chat_template:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    else:
        text = "\n".join(message["content"] for message in messages)
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


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


def read_parquet(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {error}") from None


def _read(path: Path) -> Iterable[Prompt]:
    if not path.is_file():
        raise UserError(f"{path} does not exist (data.train or validation.data); `ratchet data countdown` writes one")
    if path.suffix == ".parquet":
        for number, row in enumerate(read_parquet(path).to_pylist(), 1):
            yield _prompt(row, f"{path}, row {number}")
    else:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _prompt(json_of(line, where := f"{path}, line {number}"), where)


def json_of(line: bytes, where: str) -> Any:
    """Raises `UserError`, saying where."""
    try:
        return json.loads(line.strip())
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None


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


def _prompt(row: Any, where: str) -> Prompt:
    if not isinstance(row, dict):
        raise UserError(f"{where} is not an object with the keys prompt, data_source and reward_model")
    messages = messages_of(row.get("prompt"), where)
    reward_model = row.get("reward_model") or {}
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    extra, style = row.get("extra_info"), reward_model.get("style") if isinstance(reward_model, dict) else None
    if style not in (None, "rule", "model") and (extra is None or isinstance(extra, dict)):
        extra = {**(extra or {}), "reward_style": style}  # which reward to take, for `auto`
    if "data_source" not in row:
        raise UserError(f"{where}: data_source is missing")
    return Prompt(
        data_source=str(row["data_source"]),
        messages=messages,
        ground_truth=truth if isinstance(truth, str) else json.dumps(truth, default=str),
        extra_info=json.dumps(extra, default=str),
        where=where,
    )
