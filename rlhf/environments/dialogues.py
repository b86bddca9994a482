"""Dialogues: trajectories that a policy and an environment write in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from math import isfinite
from operator import itemgetter
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlhf.data.prompts import Messages, structures
from rlhf.engines import ranks
from rlhf.engines.base import Generation, Request, Sampling
from rlhf.environments import KEY, Environment, EnvironmentFailed, Observation
from rlhf.errors import UserError, raised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 64
"""Largest number of threads that call environments. They mostly wait, for example for the network."""
LOOK_S = 0.5
"""Seconds between checks for calls that exceed their time limit."""

T = TypeVar("T")


class Beginning(NamedTuple):
    """The start of a trajectory, as its environment receives it."""

    trajectory_id: str
    messages: Messages
    ground_truth: str | None
    ground_truth_is_json: bool
    extra_info: str
    """JSON."""


class Environments:
    """The environments of several trajectories. Rank 0 holds and calls them; all ranks receive the same answers.

    The constructor and `step` raise `EnvironmentFailed` on all ranks if an environment fails or takes longer than
    `timeout_s`.
    """

    def __init__(
        self,
        make: Callable[..., Environment],
        options: Mapping[str, Any],
        beginnings: Sequence[Beginning],
        *,
        timeout_s: float,
    ) -> None:
        def start(beginning: Beginning) -> Environment:
            environment = make(**options)
            environment.reset(beginning.messages, *structures(*beginning[2:]))
            return environment

        def start_all() -> tuple[str, ...]:
            calls = {f"{beginning.trajectory_id}, at reset": partial(start, beginning) for beginning in beginnings}
            self._by_id = dict(zip(self._ids, _all(calls, timeout_s), strict=True))
            return tuple(self._by_id[self._ids[0]].stop)

        self.timeout_s = timeout_s
        self._ids = [beginning.trajectory_id for beginning in beginnings]
        self.stop = _from_rank_0(start_all)

    def step(self, turns: Mapping[str, str]) -> list[Observation]:
        """Answer turns of the policy.

        Args:
            turns: the text of each turn, by trajectory id.

        Returns:
            The observations, in the order of `turns`.

        Raises:
            EnvironmentFailed: an environment failed, or took too long.
        """

        def step(trajectory_id: str, turn: str) -> Observation:
            observation = self._by_id[trajectory_id].step(turn)
            _check(observation)
            return observation

        calls = {
            f"{trajectory_id}, turn {turn[-60:]!r}": partial(step, trajectory_id, turn)
            for trajectory_id, turn in turns.items()
        }
        return _from_rank_0(lambda: _all(calls, self.timeout_s))


def _check(observation: Any) -> None:
    if not isinstance(observation, Observation):
        raise TypeError(f"step returned {observation!r}, which is not an Observation")
    if not isfinite(observation.reward):
        raise ValueError(f"step gave the reward {observation.reward}")
    content = observation.content
    if content is None or isinstance(content, str):
        return
    items = content if isinstance(content, list | tuple) else []
    messages = [item for item in items if isinstance(item, Mapping)]
    texts = [message.get(key) for message in messages for key in ("role", "content")]
    if not messages or len(messages) < len(content) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"step returned {content!r}: it should be a text, None, or messages [{{role, content}}]")


@dataclass(frozen=True)
class _Failure:
    reason: str


def _all(calls: Mapping[str, Callable[[], T]], timeout_s: float) -> list[T]:
    """Make calls concurrently and return their results in order.

    Args:
        calls: the calls, by a text that describes each one in errors.
        timeout_s: time limit of each call, in seconds.

    Raises:
        EnvironmentFailed: a call failed, or took too long.
    """
    todo: SimpleQueue[tuple[str, Callable[[], T]]] = SimpleQueue()
    done: SimpleQueue[tuple[str, T | _Failure]] = SimpleQueue()
    started: dict[str, float] = {}
    failed = Event()
    late = _Failure(f"took longer than {KEY}.timeout_s {timeout_s:g} s")
    for item in calls.items():
        todo.put(item)

    def work() -> None:
        with suppress(Empty):
            while not failed.is_set():
                where, call = todo.get_nowait()
                started[where] = time.monotonic()
                try:
                    result: T | _Failure = call()
                except BaseException as error:  # includes sys.exit, which would end this thread silently
                    result = _Failure(f"raised {raised(error)}")
                done.put((where, late if time.monotonic() - started[where] > timeout_s else result))

    for _ in range(min(len(calls), AT_ONCE)):
        Thread(target=work, daemon=True).start()  # daemon: a call that hangs must not keep the process alive
    results: dict[str, T] = {}
    while len(results) < len(calls):
        try:
            where, result = done.get(timeout=LOOK_S)
        except Empty:
            now = time.monotonic()
            hanging = [name for name in calls if name not in results and now - started.get(name, now) > timeout_s]
            if not hanging:
                continue
            where, result = hanging[0], late
        if isinstance(result, _Failure):
            failed.set()  # the threads make no further calls
            raise EnvironmentFailed(
                f"{KEY} {result.reason} ({where}): nothing of the shard is committed; fix the environment and resume"
            )
        results[where] = result
    return [results[where] for where in calls]


def _from_rank_0(call: Callable[[], T]) -> T:
    """Make a call on rank 0, and return its result, or raise its `EnvironmentFailed`, on all ranks."""
    results: list[T] = []
    failed: EnvironmentFailed | None = None
    if ranks.rank() == 0:
        try:
            results = [call()]
        except EnvironmentFailed as error:
            failed = error
    results, failed = ranks.gathered((results, failed))[0]
    if failed is not None:
        raise failed
    return results[0]


@dataclass
class Dialogue:
    """A trajectory that is being written. The lists have one entry per token of the response."""

    request: Request
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 if the policy wrote the token, else 0."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that drew the token."""
    reward: float = 0.0
    """Sum of the environment's rewards."""
    finish_reason: str = ""
    """Empty until the dialogue ends."""

    def wrote(self, generation: Generation, versions: Sequence[int]) -> None:
        """Append tokens of the policy."""
        self.ids += generation.response_ids
        self.log_probs += generation.log_probs
        self.mask += [1] * len(generation.response_ids)
        self.versions += versions

    def turns(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
        """The turns as messages with the roles `policy` and `environment`."""
        turns = groupby(zip(self.ids, self.mask, strict=True), key=itemgetter(1))
        return [
            {
                "role": "policy" if by_policy else "environment",
                "content": tokenizer.decode([token for token, _ in tokens], skip_special_tokens=True),
            }
            for by_policy, tokens in turns
        ]

    def heard(self, ids: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.ids += ids
        self.log_probs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)


Generate = Callable[[Sequence[Request], Sampling], tuple[list[Generation], list[list[int]]]]


def multi_turn(
    generate: Generate,
    dialogues: Sequence[Dialogue],
    environments: Environments,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
    max_turns: int,
) -> None:
    """Write the dialogues until all have ended, in place: a turn of the policy for all of them, then the observations.

    The `finish_reason` of a dialogue is stop (the environment ended it), length (there is no room for another token)
    or turns (the policy wrote `max_turns`).

    Args:
        generate: draws a turn for each request; returns the generations and the weight versions of their tokens.
        dialogues: the dialogues, empty at first.
        environments: their environments.
        sampling: sampling options; `max_tokens` limits the whole response.
        tokenizer: tokenizer of the policy.
        max_turns: largest number of policy turns.

    Raises:
        EnvironmentFailed: an environment failed, or took too long.
        UserError: the chat template cannot render an observation.
    """
    sampling = replace(sampling, stop=(*sampling.stop, *environments.stop))
    for turn in range(max_turns):
        open_dialogues = [dialogue for dialogue in dialogues if not dialogue.finish_reason]
        if not open_dialogues:
            return
        requests = [
            replace(
                dialogue.request,
                prompt_ids=(*dialogue.request.prompt_ids, *dialogue.ids),
                generated_tokens=len(dialogue.ids),
                max_tokens=sampling.max_tokens - len(dialogue.ids),
            )
            for dialogue in open_dialogues
        ]
        generations, token_versions = generate(requests, sampling)
        for dialogue, generation, versions in zip(open_dialogues, generations, token_versions, strict=True):
            dialogue.wrote(generation, versions)
            dialogue.finish_reason = "length" if generation.finish_reason == "length" else ""
        pairs = zip(open_dialogues, generations, strict=True)
        to_answer = [(dialogue, generation) for dialogue, generation in pairs if not dialogue.finish_reason]
        turns = {
            dialogue.request.trajectory_id: tokenizer.decode(list(generation.response_ids), skip_special_tokens=True)
            for dialogue, generation in to_answer
        }
        for (dialogue, generation), observation in zip(to_answer, environments.step(turns), strict=True):
            dialogue.reward += observation.reward
            if observation.content is None:
                dialogue.finish_reason = "stop"
                continue
            ids = content_ids(observation.content, generation.response_ids[-1], tokenizer)
            if turn + 1 == max_turns:
                dialogue.finish_reason = "turns"
            elif len(dialogue.ids) + len(ids) >= sampling.max_tokens:
                dialogue.finish_reason = "length"
            else:
                dialogue.heard(ids)


def content_ids(content: str | Messages, last: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize an observation that follows a turn of the policy.

    Args:
        content: a text, which is tokenized unchanged, or messages, which the chat template renders after a message of
            the assistant, with the start of the assistant's next message.
        last: last token of the turn.
        tokenizer: tokenizer of the policy.

    Raises:
        UserError: the chat template refuses the messages, or renders earlier messages differently when others follow.
    """
    if isinstance(content, str):
        text = content
    elif not tokenizer.chat_template:
        text = "\n" + "\n".join(message["content"] for message in content) + "\n"
    else:
        from jinja2 import TemplateError

        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            rendered = str(tokenizer.apply_chat_template(before, tokenize=False))
            whole = str(tokenizer.apply_chat_template([*before, *content], tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in content)
            raise UserError(f"the chat template refuses the messages of {KEY} (roles: {roles}): {error}") from None
        if not whole.startswith(rendered):
            raise UserError(
                "the chat template renders earlier messages differently when others follow, so a response cannot have "
                "several turns: use another chat template"
            )
        end_of_message = rendered[rendered.rindex("!") + 1 :].removeprefix(str(tokenizer.decode([last])))
        text = end_of_message + whole[len(rendered) :]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
