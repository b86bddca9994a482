"""Experts' answers to prompts of the data: the files of `data.replay.files`."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from ratchet.rlhf.data import files
from ratchet.rlhf.data.examples import example_of
from ratchet.rlhf.data.folders import data_files
from ratchet.rlhf.data.formats import Chat
from ratchet.rlhf.data.prompts import Prompt, PromptDataset, end_of_turn
from ratchet.rlhf.errors import UserError, in_one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Matched:
    """Answers matched to prompts."""

    by_row: Mapping[int, tuple[int, ...]]
    """Numbers of a prompt's answers, by the prompt's row in the files of the dataset, in order of these rows."""
    too_long: int
    """Number of answers that exceed the maximum length of a response."""
    unknown: int
    """Number of answers to prompts that the dataset lacks."""


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
        return " ".join(map(files.digest, self._paths))

    def answer(self, number: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
        """Reads the answer in a row, counted over all files; returns its place, for people, and its tokens with the end
        of turn."""
        where, _, text = self._row(number)
        return where, _answer_ids(text, tokenizer)

    def matched(
        self, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase, *, system_prompt: str | None, max_tokens: int
    ) -> Matched:
        """Finds the prompts of all answers, by their messages and tools. Raises UserError for a malformed row.

        Args:
            system_prompt: system message for prompts that have none, in the dataset and in the files.
        """
        by_prompt: dict[bytes, list[int]] = defaultdict(list)
        too_long = 0
        for number in range(len(self)):
            _, (messages, tools), text = self._row(number)
            if len(_answer_ids(text, tokenizer)) > max_tokens:
                too_long += 1
            else:
                question = Prompt("", messages, None, ground_truth_is_json=False, extra_info="{}", tools=tools)
                by_prompt[_key(question, system_prompt)].append(number)
        by_row: dict[int, tuple[int, ...]] = {}
        known = set[bytes]()
        for index, prompt in enumerate(dataset):
            key = _key(prompt, system_prompt)
            if key in by_prompt:
                known.add(key)
                by_row[dataset.row(index)] = tuple(by_prompt[key])
        unknown = sum(len(numbers) for key, numbers in by_prompt.items() if key not in known)
        return Matched(by_row, too_long, unknown)

    def _row(self, number: int) -> tuple[str, Chat, str]:
        file = bisect_right(self._starts, number) - 1
        where, row = self._files[file][number - self._starts[file]]
        if (example := example_of(row, where)) is None:
            raise UserError(
                f"{where}: answers of experts are rows of prompt and response (or completion), or of messages or "
                f"conversations that end with the answer; there are {in_one_line(', '.join(row))}"
            )
        return where, *example


def _answer_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], *end_of_turn(tokenizer)]


def _key(prompt: Prompt, system_prompt: str | None) -> bytes:
    return hashlib.sha256(json.dumps(prompt.chat(system_prompt), sort_keys=True).encode()).digest()
