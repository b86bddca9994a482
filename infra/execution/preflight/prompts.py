"""Checks the prompts: their lengths, roles and ground truths, and that rewards and the environment can use them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING

from ratchet.infra.execution.preflight.mistakes import refuse
from ratchet.infra.progress import note
from ratchet.rlhf.built_in_rewards import COMPARING
from ratchet.rlhf.config import DataConfig, EnvironmentConfig, ModelConfig, RewardConfig, RunConfig
from ratchet.rlhf.data.chat_turns import special_in
from ratchet.rlhf.data.formats import formulas_of
from ratchet.rlhf.data.images import ImageError, check_image, digest_of
from ratchet.rlhf.data.prompts import Prompt, PromptDataset, check_length, render
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.environment import load_environment
from ratchet.rlhf.environments.guarded_calls import check_continues, try_environment
from ratchet.rlhf.environments.policy_tokenizer import policy_tokenizer, tools_of_environment
from ratchet.rlhf.errors import UserError, counted
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.rewards import auto
from ratchet.rlhf.rewards.functions import TAIL_CHARACTERS
from ratchet.rlhf.rewards.math import boxed
from ratchet.rlhf.rewards.registry import can_be_right
from ratchet.rlhf.rewards.reward_processes import TrialAnswer, compare_columns, try_rewards
from ratchet.rlhf.validation import reported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCES = 8
"""Largest number of data sources of a file whose rewards are tried, and of mistakes that are reported at once."""
AS_THEY_ARE = "{{ messages[-1]['content'] }}"
"""The chat template that leaves a text unchanged."""
MANY_PROMPTS = 10_000
"""Number of prompts whose lengths take more than two seconds to measure, which the driver announces."""


@cache  # called twice: by the command line before it starts Prefect, and by the driver before it claims
def check_files(
    paths: tuple[str, ...], model: ModelConfig, data: DataConfig, reward: str, environment: str | None
) -> None:
    """See `check_prompts`. Reward and environment are JSON, because the arguments must be hashable."""
    section = None if environment is None else EnvironmentConfig.model_validate_json(environment)
    check_prompts(PromptDataset(paths), model, data, RewardConfig.model_validate_json(reward), section)


def check_prompts(
    dataset: PromptDataset,
    model: ModelConfig,
    data: DataConfig,
    reward: RewardConfig,
    environment: EnvironmentConfig | None,
) -> None:
    """Checks the prompts' lengths and ground truths, and tries reward and environment on a row of each file.

    Raises:
        UserError: prompts are too long, lack the ground truth for a built-in reward, have a data source that `auto` has
            no reward for, have tools beside those of the environment, cannot be scored, or make the environment fail; a
            line for each.
    """
    tokenizer = policy_tokenizer(model, environment, data.special_tokens)
    readers = [tokenizer, *([] if reward.model is None else [load_tokenizer(reward.model, writes=False)])]
    if len(dataset) > MANY_PROMPTS:
        note(f"checking {len(dataset)} prompts")
    scan = _Scan(data, reward, readers, bool(tools_of_environment(environment)))
    for prompt in dataset.attempts():
        if isinstance(prompt, Prompt):
            scan.look_at(prompt)
        else:
            scan.note_images(prompt)
    problems, tried = scan.problems, scan.samples
    if environment is not None:
        if scan.continuing is not None:
            check_continues(scan.continuing, environment.name, load_environment(environment.name))
        problems |= {failure: failure for failure in try_environment(environment, tried, data.system_prompt)}
    if not problems and not scan.images:

        def write(prompt: Prompt, answer: str) -> TrialAnswer:
            text = render(prompt.chat(data.system_prompt), tokenizer, prompt.where, add_generation_prompt=True)
            ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
            return TrialAnswer(text[-TAIL_CHARACTERS:], ids, response_text(ids, tokenizer))

        for failure in try_rewards(reward, [*tried, *scan.doubtful.values()], write, note):
            if reward.on_error == "fail":
                problems[failure] = failure
            else:
                note(failure)
        for line in compare_columns(reward, tried, write):
            note(line)
    refuse([*list(problems.values())[:SOURCES], *scan.images])
    if scan.spelling:
        kept = data.special_tokens == "keep"
        are = (
            "control tokens, as data.special_tokens: keep says" if kept else "text, unless data.special_tokens is keep"
        )
        which = f"{scan.spelling} of {counted(len(dataset), 'prompt')} spell special tokens"
        special = ", ".join(list(scan.special)[:SOURCES])
        note(f"{which} ({special}), the first in {scan.first_spelling}: they are {are}")
    for column, (number, first) in scan.unseen.items():
        note(
            f"{number} of {counted(len(dataset), 'prompt')} have {column}, the first in {first}: it is in extra_info, "
            "for rewards and environments, and the policy does not see it"
        )
    if scan.texts and tokenizer.chat_template:
        every = scan.texts == len(dataset)
        which = "the prompts are texts" if every else f"{scan.texts} of {len(dataset)} prompts are texts"
        note(
            f"{which}: the chat template of {model.path} renders each as a message of the user. To keep them as they "
            f"are, set model.chat_template to a file that has only {AS_THEY_ARE}"
        )


class _Scan:
    """One pass over the prompts."""

    def __init__(
        self,
        data: DataConfig,
        reward: RewardConfig,
        readers: Sequence[PreTrainedTokenizerBase],
        environment_has_tools: bool,
    ) -> None:
        """Takes the tokenizers of the models that read the prompts, the policy's first."""
        self.data, self.reward, self.readers = data, reward, readers
        self._environment_has_tools = environment_has_tools
        self.problems: dict[str, str] = {}
        """The first problem of each kind and data source."""
        self.doubtful: dict[str, Prompt] = {}
        """The first prompt of each data source for which no response is right, unless the source's sample is such a
        prompt."""
        self.continuing: Prompt | None = None
        """The first prompt that continues stored turns."""
        self._images: list[str] = []
        """What is wrong with the images of the first `SOURCES` such prompts."""
        self._more_images = 0
        """Number of prompts beyond these."""
        self._decoded = set[str]()
        """The digests of images that can be decoded."""
        self.texts = 0
        self.spelling = 0
        """Number of prompts that spell special tokens."""
        self.first_spelling = ""
        self.special: dict[str, None] = {}
        self.unseen: dict[str, tuple[int, str]] = {}
        """Columns that are not shown to the policy: their number of prompts, and the first."""
        self._firsts: dict[str, dict[str, Prompt]] = {}
        """The first prompt of each data source, by file."""
        self._renders: dict[tuple[str, ...], bool] = {}
        """By roles of a conversation, True if templates render it: they look at little else."""

    @property
    def samples(self) -> list[Prompt]:
        """The first prompt of each data source of each file."""
        return [prompt for sources in self._firsts.values() for prompt in sources.values()]

    @property
    def images(self) -> list[str]:
        """What is wrong with the images of prompts, a line for each, and for those that are many."""
        more = f"the images of {counted(self._more_images, 'more prompt')} cannot be used either"
        return [*self._images, *([more] if self._more_images else [])]

    def note_images(self, error: ImageError) -> None:
        """Notes what is wrong with the images of the next prompt."""
        if len(self._images) < SOURCES:
            self._images.append(str(error))
        else:
            self._more_images += 1

    def look_at(self, prompt: Prompt) -> None:
        """Notes the mistakes of the next prompt."""
        data, tokenizer = self.data, self.readers[0]
        try:
            self._check_images(prompt)
        except ImageError as error:
            self.note_images(error)
            return
        self.texts += prompt.is_text
        if prompt.continues is not None and self.continuing is None:
            self.continuing = prompt
        sources = self._firsts.setdefault(prompt.where.rpartition(",")[0], {})
        if prompt.data_source not in sources and len(sources) < SOURCES:
            sources[prompt.data_source] = prompt
        self._check_truth(prompt, sources.get(prompt.data_source))
        if spelled := special_in(prompt.chat(data.system_prompt), tokenizer):
            self.spelling, self.first_spelling = self.spelling + 1, self.first_spelling or prompt.where
            self.special |= dict.fromkeys(sorted(spelled))
        for column in prompt.unseen:
            number, first = self.unseen.get(column, (0, prompt.where))
            self.unseen[column] = number + 1, first
        if self._is_rendered(prompt) and data.truncation == "error" and "length" not in self.problems:
            try:
                check_length(prompt, tokenizer, data.max_prompt_tokens, data.system_prompt)
            except UserError as error:
                self.problems["length"] = str(error)

    def _check_images(self, prompt: Prompt) -> None:
        for number, image in enumerate(prompt.images, 1):
            if (digest := digest_of(image)) not in self._decoded:
                check_image(image, f"{prompt.where}: image {number}")
                self._decoded.add(digest)

    def _check_truth(self, prompt: Prompt, first: Prompt | None) -> None:
        """Notes a ground truth that the reward cannot use. `first` is the tried sample of the data source, if there is
        one."""
        functions = self.reward.functions
        comparing = next((name for name in functions if name in COMPARING), None)
        if "auto" in functions and (problem := auto.problem_of(prompt.data_source, prompt.style)) is not None:
            self.problems.setdefault(f"source {prompt.data_source}", f"{prompt.where}: {problem}")
        elif comparing is not None and prompt.ground_truth is None:
            self.problems.setdefault(
                "truth",
                f"{prompt.where}: reward.function {comparing} needs reward_model.ground_truth (or a column "
                "ground_truth, answer or solution), which is missing",
            )
        elif not can_be_right(functions, prompt):
            if first is None or can_be_right(functions, first):
                self.doubtful.setdefault(prompt.data_source, prompt)
        elif self._uses_math(prompt) and _has_unmarked_answer(prompt.ground_truth):
            self.problems.setdefault(
                "formulas",
                f"{prompt.where}: the ground truth is a text of several formulas ({prompt.ground_truth!r:.60}...), and "
                "reward.function math would compare with one of them: put the answer into a column answer, or into "
                "\\boxed{} in this text",
            )

    def _uses_math(self, prompt: Prompt) -> bool:
        functions = self.reward.functions
        return "math" in functions or (
            "auto" in functions and auto.reward_of(prompt.data_source, prompt.style) == "math"
        )

    def _is_rendered(self, prompt: Prompt) -> bool:
        """True if all chat templates accept the prompt's messages and tools."""
        if prompt.tools and self._environment_has_tools:
            self.problems.setdefault(
                "tools",
                f"{prompt.where}: the prompt has tools, and so has rollout.environment, whose tools the policy gets: "
                "remove the column tools, or rollout.tools and rollout.mcp",
            )
            return False
        chat = prompt.chat(self.data.system_prompt)
        roles = tuple(message["role"] for message in chat.messages)
        if not prompt.is_plain or roles not in self._renders:
            try:
                for reader in self.readers:
                    render(chat, reader, prompt.where, add_generation_prompt=True)
            except UserError as error:
                added = len(chat.messages) > len(prompt.messages)
                fix = " (data.system_prompt puts a system message in front: set it to null)" if added else ""
                self.problems.setdefault("template", f"{error}{fix}")
                self._renders[roles] = False
            else:
                self._renders.setdefault(roles, True)
        return self._renders[roles]


def _has_unmarked_answer(ground_truth: str | None) -> bool:
    """True if a ground truth has several formulas, none of them in a box."""
    return ground_truth is not None and boxed(ground_truth) is None and len(formulas_of(ground_truth)) > 1


def check_metric(config: RunConfig) -> None:
    """Refuses a `validation.metric` that no validation will report."""
    validation = config.validation
    if validation.metric is None or validation.data is None:
        return
    solves = config.solved_score is not None
    sources = (prompt.data_source for prompt in PromptDataset((validation.data,)))
    scores = (name for name in reported(sources, validation.n) if name.startswith("val-core/"))
    names = [name for name in scores if solves or "/acc/" not in name]
    if validation.metric not in names:
        shown = get_close_matches(validation.metric, names, SOURCES, 0) if len(names) > SOURCES else names
        more = f", and {len(names) - len(shown)} others" if len(names) > len(shown) else ""
        raise UserError(
            f"validation.metric {validation.metric} is not a metric of this validation, which has {', '.join(shown)}"
            f"{more}: choose one of them, or set validation.metric=null for the mean score of the first data source"
        )
