"""Experts' answers to prompts of the data: the files of `data.replay.files`."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from ratchet.rlhf.data import files
from ratchet.rlhf.data.examples import DrawnTokens, drawn_tokens, example_of
from ratchet.rlhf.data.folders import data_files
from ratchet.rlhf.data.formats import Chat, messages_of, tools_of
from ratchet.rlhf.data.prompts import Prompt, PromptDataset, asked, end_of_turn, tokenize_prompt
from ratchet.rlhf.errors import UserError, in_one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from ratchet.rlhf.data.files import Row


@dataclass(frozen=True)
class Matched:
    """Answers matched to prompts."""

    by_row: Mapping[int, tuple[int, ...]]
    """Numbers of a prompt's answers, by the prompt's row in the files of the dataset, in order of these rows."""
    too_long: int
    """Number of answers that exceed the maximum length of a response."""
    unknown: int
    """Number of answers to prompts that the dataset lacks, or whose tokens are not those of the dataset's prompt."""


class ExpertAnswer(NamedTuple):
    """An expert's answer, for a policy."""

    where: str
    """Its place, for people."""
    ids: list[int]
    mask: list[int]
    """1 for the expert's tokens, 0 for those that it read between its turns."""
    finish_reason: str


class ExpertAnswers:
    """The rows of some files, in order: prompts with a response each. They are read on demand."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Indexes the files; see `data_files`."""
        self._paths = paths
        self._files = [files.open_rows(file) for path in paths for file in data_files(path)]
        self._starts = list(accumulate(map(len, self._files), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def digest(self) -> str:
        """The sha256 of each path, in order."""
        return " ".join(map(files.data_digest, self._paths))

    def answer(self, number: int, tokenizer: PreTrainedTokenizerBase) -> ExpertAnswer:
        """Reads the answer in a row, counted over all files. A text ends with the end of turn."""
        where, row = self._row(number)
        if (drawn := drawn_tokens(row, where, tokenizer)) is not None:
            finish_reason = "length" if row.get("finish_reason") == "length" else "stop"
            return ExpertAnswer(where, drawn.response_ids, drawn.mask, finish_reason)
        ids = _answer_ids(_example(row, where)[1], tokenizer)
        return ExpertAnswer(where, ids, [1] * len(ids), "stop")

    def matched(
        self, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase, *, system_prompt: str | None, max_tokens: int
    ) -> Matched:
        """Finds the prompts of all answers, by their messages and tools. Raises UserError for a malformed row.

        Args:
            system_prompt: system message for prompts that have none, in the dataset and in the files.
        """
        by_prompt: dict[bytes, list[int]] = defaultdict(list)
        too_long = without_prompt = 0
        for number in range(len(self)):
            where, row = self._row(number)
            drawn = drawn_tokens(row, where, tokenizer)
            if drawn is None:
                chat, text = _example(row, where)
                ids = _answer_ids(text, tokenizer)
            else:
                # null: an agent put calls of tools before its first answer
                messages = messages_of(row["prompt"], where) if row.get("prompt") else []
                chat, ids = Chat(messages, tools_of(row, where)), drawn.response_ids
            question = asked(chat, where)
            if len(ids) > max_tokens:
                too_long += 1
            elif drawn is not None and not _asks(question, drawn, tokenizer, system_prompt):
                without_prompt += 1
            else:
                by_prompt[_key(question, system_prompt)].append(number)
        by_row: dict[int, tuple[int, ...]] = {}
        known = set[bytes]()
        for index, prompt in enumerate(dataset):
            key = _key(prompt, system_prompt)
            if key in by_prompt:
                known.add(key)
                by_row[dataset.row(index)] = tuple(by_prompt[key])
        unknown = sum(len(numbers) for key, numbers in by_prompt.items() if key not in known)
        return Matched(by_row, too_long, unknown + without_prompt)

    def _row(self, number: int) -> Row:
        file = bisect_right(self._starts, number) - 1
        return self._files[file][number - self._starts[file]]


def _example(row: Mapping[str, Any], where: str) -> tuple[Chat, str]:
    if (example := example_of(row, where)) is None:
        raise UserError(
            f"{where}: answers of experts are rows of prompt and response (or completion), or of messages or "
            f"conversations that end with the answer; there are {in_one_line(', '.join(row))}"
        )
    return example


def _asks(question: Prompt, drawn: DrawnTokens, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> bool:
    """Returns True if the policy reads a prompt as the tokens after which an answer was drawn."""
    return bool(question.messages) and tokenize_prompt(question, tokenizer, system_prompt)[1] == drawn.prompt_ids


def _answer_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], *end_of_turn(tokenizer)]


def _key(prompt: Prompt, system_prompt: str | None) -> bytes:
    messages, tools, _ = prompt.chat(system_prompt)  # the messages have the digests of the images
    return hashlib.sha256(json.dumps([messages, tools], sort_keys=True).encode()).digest()
