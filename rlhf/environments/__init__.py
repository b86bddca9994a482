"""Environments: what a policy talks to while it responds, such as tools, or the other side of a game.

A built-in is a module here with a class `Environment`; anything else is named ``package.module:Class`` or
``folder/file.py:Class``. What the environment says becomes part of the response, with `response_mask` 0: it is read,
and never learned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.data.prompts import Messages
from rlhf.engines import ranks
from rlhf.engines.base import Generation, Request, Sampling
from rlhf.errors import RatchetError, UserError
from rlhf.named import load_named, source_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILT_IN = ("calculator",)
KEY = "rollout.environment"


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a turn of the policy."""

    says: str | Messages | None
    """A text that follows the turn as it is, as tool output within a message does; messages (`user`, `tool`), through
    the chat template, to which the policy then answers; None: the trajectory ends."""
    reward: float = 0.0
    """Added to the trajectory's score."""


class Environment(Protocol):
    """One for each trajectory, made from `rollout.environment.options`. Given the same turns, it says the same."""

    stop: tuple[str, ...]
    """Texts that end a turn, such as that which ends a tool call; the turn keeps them."""

    def reset(self, messages: Messages, ground_truth: str, extra_info: Any) -> None:
        """A trajectory begins with this prompt; a ground truth that the dataset holds as a structure is JSON text."""
        ...

    def step(self, turn: str) -> Observation:
        """The policy has written this, since it was last told something."""
        ...


class EnvironmentFailed(RatchetError):
    """The environment raised an exception."""


def load_environment(name: str) -> Callable[..., Environment]:
    """The class that a name stands for; raises `UserError`."""
    found: Callable[..., Environment] = load_named(name, KEY, "rlhf.environments", "Environment", BUILT_IN)
    return found


def check_environment(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a class that cannot be made with these options, or that lacks something."""
    try:
        made = load_environment(name)(**options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{KEY} {name} cannot be made with rollout.environment.options: {error}") from None
    stop = getattr(made, "stop", None)
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise UserError(f'{KEY} {name} has no `stop`: the texts that end a turn, such as stop = ("</tool>",), or ()')
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise UserError(
                f"{KEY} {name} has no method {method}: it needs reset(messages, ground_truth, extra_info) "
                "and step(turn)"
            )


def environment_digest(name: str) -> str:
    return hashlib.sha256(source_of(load_environment(name), KEY, name).encode()).hexdigest()


def begin(name: str, options: Mapping[str, Any], prompts: Sequence[tuple[Messages, str, str]]) -> list[Environment]:
    """One for each trajectory: from its prompt's messages, and the ground truth and extra info as JSON."""
    make = load_environment(name)
    try:
        made = [make(**options) for _ in prompts]
        for environment, (messages, truth, extra) in zip(made, prompts, strict=True):
            environment.reset(messages, truth, json.loads(extra))
    except Exception as error:
        raise EnvironmentFailed(f"{KEY} {name} raised {type(error).__name__} as it began: {error}") from error
    return made


@dataclass
class Dialogue:
    """A trajectory that is being written."""

    request: Request
    environment: Environment
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 where the policy wrote the token."""
    versions: list[int] = field(default_factory=list)
    reward: float = 0.0
    finish_reason: str = ""
    """Empty while it goes on."""

    def wrote(self, generation: Generation, versions: Sequence[int]) -> None:
        self.ids += generation.response_ids
        self.log_probs += generation.log_probs
        self.mask += [1] * len(generation.response_ids)
        self.versions += versions

    def heard(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.log_probs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)


Generate = Callable[[Sequence[Request], Sampling], tuple[list[Generation], list[list[int]]]]


def converse(
    generate: Generate,
    dialogues: Sequence[Dialogue],
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
    max_turns: int,
) -> None:
    """Write the dialogues to their ends: turns of the policy, drawn for all at once, and what it is told after each.

    A dialogue ends with `finish_reason` stop (the environment has no more to say), length (there is no room for
    another token), or turns (`max_turns` are written).
    """
    sampling = replace(sampling, stop=(*sampling.stop, *dialogues[0].environment.stop))
    for turn in range(max_turns):
        going = [each for each in dialogues if not each.finish_reason]
        if not going:
            return
        asked = [
            replace(
                each.request,
                prompt_ids=(*each.request.prompt_ids, *each.ids),
                begun=len(each.ids),
                max_tokens=sampling.max_tokens - len(each.ids),
            )
            for each in going
        ]
        written = generate(asked, sampling)
        for each, generation, versions in zip(going, *written, strict=True):
            each.wrote(generation, versions)
            each.finish_reason = "length" if generation.finish_reason == "length" else ""
        answered = [
            (each, generation) for each, generation in zip(going, written[0], strict=True) if not each.finish_reason
        ]
        told = _observations(answered, tokenizer)
        for (each, generation), observation in zip(answered, told, strict=True):
            each.reward += observation.reward
            if observation.says is None:
                each.finish_reason = "stop"
                continue
            ids = said(observation.says, generation.response_ids[-1], tokenizer)
            if turn + 1 == max_turns:
                each.finish_reason = "turns"
            elif len(each.ids) + len(ids) >= sampling.max_tokens:
                each.finish_reason = "length"
            else:
                each.heard(ids)


def _observations(
    answered: Sequence[tuple[Dialogue, Generation]], tokenizer: PreTrainedTokenizerBase
) -> list[Observation]:
    """What the environments say. Rank 0 asks, so that all ranks hear the same."""
    found: list[Observation] = []
    failed: EnvironmentFailed | None = None
    if ranks.rank() == 0:
        try:
            for dialogue, generation in answered:
                turn = tokenizer.decode(list(generation.response_ids), skip_special_tokens=True)
                observation = dialogue.environment.step(turn)
                if not isinstance(observation, Observation):
                    raise TypeError(f"step returned {observation!r}, which is no Observation")
                if not isfinite(observation.reward):
                    raise ValueError(f"step gave the reward {observation.reward}")
                found.append(observation)
        except Exception as error:
            where = f"{type(error).__name__}: {error} ({dialogue.request.trajectory_id}, turn {turn[-60:]!r})"
            failed = EnvironmentFailed(f"{KEY} raised {where}: nothing of the shard is committed; mend it and resume")
    found, failed = ranks.gathered((found, failed))[0]
    if failed is not None:
        raise failed
    return found


def said(says: str | Messages, last: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that follow a turn whose last token is `last`: a text as it is; messages as the chat template writes
    them after a message of the assistant, up to where the next one begins."""
    if isinstance(says, str):
        text = says
    elif not tokenizer.chat_template:
        text = "\n" + "\n".join(message["content"] for message in says) + "\n"
    else:
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        shown = str(tokenizer.apply_chat_template(before, tokenize=False))
        whole = str(tokenizer.apply_chat_template([*before, *says], tokenize=False, add_generation_prompt=True))
        if not whole.startswith(shown):
            raise UserError("the chat template writes earlier messages otherwise as others follow: it has no turns")
        ends = shown[shown.rindex("!") + 1 :].removeprefix(str(tokenizer.decode([last])))
        text = ends + whole[len(shown) :]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
