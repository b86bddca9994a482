"""NeMo-RL's `train_data_step{N}.jsonl` and `val_data_step{N}.jsonl`, which its logger writes for each step.

A line is one trajectory, and every value but `idx` is a list of one. Tokens, masks and log-probs are of the whole
conversation, padded to the longest one of the batch. Rewards have no parts, and texts of training have no roles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ratchet.infra.observe.sources.lines import complete_lines, is_cut, parsed
from ratchet.infra.observe.sources.source import Content, Unit, content_of
from ratchet.rlhf.config import read_yaml
from ratchet.rlhf.data.files import digest
from ratchet.rlhf.errors import UserError

FILE = re.compile(r"(train|val)_data_step(\d+)\.jsonl")
PER_TOKEN = {
    "advantages": "advantages",
    "generation_logprobs": "rollout_log_probs",
    "prev_logprobs": "old_log_probs",
}
"""Columns of the fields with a number for each token."""
READ = {
    *("content", "rewards", "filtered_rewards", "input_lengths", "token_ids", "token_loss_mask", "sample_loss_mask"),
    *("idx", *PER_TOKEN),
}


class NeMoRL:
    """The files of a run's experiments: a resumed run continues in the next ``exp_NNN``."""

    def __init__(self, path: Path) -> None:
        """Looks for files of steps and, to know groups and the model, for the `config.yaml` of a checkpoint.

        Args:
            path: ``logs/exp_NNN``, or a folder above it. The config is found if checkpoints are in the same folder.

        Raises:
            UserError: there are no such files, or those of several runs.
        """
        self.trainer = "nemo-rl"
        self._path = path
        if not self._files():
            raise UserError(
                f"{path}: there is no train_data_step1.jsonl: name NeMo-RL's logger.log_dir, or its exp_NNN"
            )
        configs = sorted(path.rglob("step_*/config.yaml"), key=lambda file: (_number(file.parent), file))
        self.config: Mapping[str, Any] = read_yaml(configs[-1]) if configs else {}
        model = _within(self.config, "policy", "model_name")
        self.model = model if isinstance(model, str) else None
        algorithm = "grpo" if "grpo" in self.config else "ppo"
        self._group_sizes = {
            is_validation: size
            for is_validation, key in ((False, "num_generations_per_prompt"), (True, "val_num_generations_per_prompt"))
            if isinstance(size := _within(self.config, algorithm, key), int) and size > 0
        }

    def units(self) -> Iterator[Unit]:
        """See `Source.units`. A file that ends within a line is still being written."""
        for (step, is_validation), file in self._files().items():
            if not is_cut(file):
                yield Unit(
                    number=step,
                    digest=digest(str(file)),
                    where=str(file),
                    read=partial(self._read, file, is_validation),
                    is_validation=is_validation,
                )

    def _files(self) -> dict[tuple[int, bool], Path]:
        """Returns the files by step, and whether it is a validation. What a resumed run has repeated replaces what the
        folders before it have."""
        folders: dict[Path, dict[tuple[int, bool], Path]] = {}
        for file in self._path.rglob("*_data_step*.jsonl"):
            if (named := FILE.fullmatch(file.name)) is not None:
                folders.setdefault(file.parent, {})[int(named[2]), named[1] == "val"] = file
        files: dict[tuple[int, bool], Path] = {}
        for folder in sorted(folders, key=lambda folder: (_number(folder), folder)):
            first, is_validation = min(folders[folder])
            if files and (first, is_validation) <= min(files):
                raise UserError(
                    f"{self._path}: {folder.name} begins with step {first} again, so there are several runs: name the "
                    f"folder of one, such as {folder}"
                )
            files = {key: file for key, file in files.items() if key < (first, is_validation)} | folders[folder]
        return files

    def _read(self, file: Path, is_validation: bool) -> Content:
        columns: list[dict[str, Any]] = []
        rest: list[dict[str, Any]] = []
        size = self._group_sizes.get(is_validation)
        for number, _, line in complete_lines(file):
            where = f"{file}, line {number}"
            row = parsed(line, where)
            sample = {name: _only(value, name, where) for name, value in row.items()}
            tokens, answers = _tokens(sample, where)
            own = {**_texts(sample.get("content"), answers), **tokens}
            if (reward := sample.get("filtered_rewards", sample.get("rewards"))) is not None:
                own["score"] = reward
            if size is not None and isinstance(place := sample.get("idx"), int):
                own["prompt_id"] = str(place // size)
            columns.append(own)
            rest.append({f"source_{name}": value for name, value in sample.items() if name not in READ})
        return content_of(columns, rest)


def _number(folder: Path) -> int:
    """Returns the number at the end of a folder's name, such as that of ``exp_012``."""
    found = re.search(r"(\d+)$", folder.name)
    return int(found[1]) if found else 0


def _within(config: Mapping[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _only(value: Any, name: str, where: str) -> Any:
    """Takes a value out of its list of one. An empty list is of a column that is shorter than the batch."""
    if name == "idx" or not isinstance(value, list):
        return value
    if len(value) > 1:
        raise UserError(f"{where}: {name} is a list of {len(value)}, and NeMo-RL writes lists of one")
    return value[0] if value else None


def _texts(content: Any, answers: tuple[int, bool] | None) -> dict[str, Any]:
    """Returns prompt, response and turns.

    Args:
        content: texts in order; in a validation messages with roles; in some trainers only the response.
        answers: see `_tokens`. Between two answers there is one text, and the others are the prompt.
    """
    if not isinstance(content, list):
        return {} if content is None else {"response": str(content)}
    if content and all(isinstance(message, Mapping) for message in content):
        roles = [message.get("role") for message in content]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        prompt: dict[str, Any] = {"messages": content[:first]}
        turns = [("policy" if role == "assistant" else "environment") for role in roles[first:]]
        texts = [str(message.get("content")) for message in content[first:]]
    else:
        count, ends = answers or (1, True)
        first = len(content) - 2 * count + ends
        texts, turns = [str(text) for text in content[1:]], []
        if count and first > 0:
            turns, texts = (["policy", "environment"] * count)[: len(content) - first], texts[first - 1 :]
        prompt = {"prompt": "\n".join(map(str, content[: first if turns else 1]))}
    if len(turns) > 1:
        said = [{"role": role, "content": text} for role, text in zip(turns, texts, strict=True)]
        prompt["turns"] = said
    return {**prompt, "response": "\n".join(texts)}


def _tokens(sample: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[int, bool] | None]:
    """Returns the columns of tokens, without padding; and the number of answers, and whether the last one is the end.

    The prompt ends before the first token that the policy wrote.
    """
    length, written = sample.get("input_lengths"), sample.get("token_loss_mask")
    if length is None or written is None:
        return {}, None
    mask = _numbers(written, "token_loss_mask", np.int8, where)[:length]
    answers = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    if not len(answers):  # the policy wrote nothing
        answers = np.array([len(mask)])
    first = int(answers[0])
    columns: dict[str, Any] = {"response_mask": mask[first:]}
    if (ids := sample.get("token_ids")) is not None:
        tokens = _numbers(ids, "token_ids", np.int32, where)[:length]
        columns |= {"prompt_ids": tokens[:first], "response_ids": tokens[first:]}
    for field, column in PER_TOKEN.items():
        if (values := sample.get(field)) is not None:
            columns[column] = _numbers(values, field, np.float32, where)[first:length]
    if (weight := sample.get("sample_loss_mask")) is not None:
        columns["loss_mask"] = mask[first:] * np.int8(weight != 0)
    return columns, (int(mask.any()) and len(answers), bool(len(mask) and mask[-1]))


def _numbers(values: Any, name: str, kind: type[np.number], where: str) -> np.ndarray:
    """Takes the numbers of the tokens; arrays need a tenth of the memory of lists."""
    try:
        return np.asarray(values, dtype=kind).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: {name} is no list of numbers ({error})") from None
