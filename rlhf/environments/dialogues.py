"""Dialogues: a policy and its environments take turns in writing trajectories."""

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
"""Threads that ask: most environments that matter wait for something else."""
LOOK_S = 0.5
"""How often those are looked for that do not answer."""

T = TypeVar("T")


class Beginning(NamedTuple):
    """What an environment is told of its trajectory."""

    trajectory_id: str
    messages: Messages
    ground_truth: str | None
    ground_truth_is_json: bool
    extra_info: str
    """JSON."""


class Environments:
    """The environments of several trajectories. Rank 0 has them and asks them; all ranks hear the same.

    Beginning and `step` raise `EnvironmentFailed`, on all ranks, if one fails, or takes longer than `timeout_s`.
    """

    def __init__(
        self,
        make: Callable[..., Environment],
        options: Mapping[str, Any],
        beginnings: Sequence[Beginning],
        *,
        timeout_s: float,
    ) -> None:
        def begin(beginning: Beginning) -> Environment:
            environment = make(**options)
            environment.reset(beginning.messages, *structures(*beginning[2:]))
            return environment

        def begin_all() -> tuple[str, ...]:
            calls = {f"{each.trajectory_id}, as it began": partial(begin, each) for each in beginnings}
            self._each = dict(zip(self._ids, _all(calls, timeout_s), strict=True))
            return tuple(self._each[self._ids[0]].stop)

        self.timeout_s = timeout_s
        self._ids = [each.trajectory_id for each in beginnings]
        self.stop = _heard(begin_all)

    def step(self, turns: Mapping[str, str]) -> list[Observation]:
        """What they say to turns that the policy has just written, by trajectory id."""

        def step(trajectory_id: str, turn: str) -> Observation:
            observation = self._each[trajectory_id].step(turn)
            _check(observation)
            return observation

        calls = {f"{one}, turn {turn[-60:]!r}": partial(step, one, turn) for one, turn in turns.items()}
        return _heard(lambda: _all(calls, self.timeout_s))


def _check(observation: Any) -> None:
    if not isinstance(observation, Observation):
        raise TypeError(f"step returned {observation!r}, which is no Observation")
    if not isfinite(observation.reward):
        raise ValueError(f"step gave the reward {observation.reward}")
    content = observation.content
    if content is None or isinstance(content, str):
        return
    messages = [each for each in content if isinstance(each, Mapping)] if isinstance(content, list | tuple) else []
    texts = [message.get(key) for message in messages for key in ("role", "content")]
    if not messages or len(messages) < len(content) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"step returned {content!r}: it should be a text, None, or messages [{{role, content}}]")


@dataclass(frozen=True)
class _Failure:
    what: str


def _all(calls: Mapping[str, Callable[[], T]], timeout_s: float) -> list[T]:
    """What the calls return, which are made at the same time; a key says where it was, if one fails."""
    todo: SimpleQueue[tuple[str, Callable[[], T]]] = SimpleQueue()
    done: SimpleQueue[tuple[str, T | _Failure]] = SimpleQueue()
    began: dict[str, float] = {}
    failed = Event()
    late = _Failure(f"took longer than {KEY}.timeout_s {timeout_s:g} s")
    for each in calls.items():
        todo.put(each)

    def ask() -> None:
        with suppress(Empty):
            while not failed.is_set():
                where, call = todo.get_nowait()
                began[where] = time.monotonic()
                try:
                    one: T | _Failure = call()
                except BaseException as error:  # sys.exit, too, which would end this thread without a word
                    one = _Failure(f"raised {raised(error)}")
                done.put((where, late if time.monotonic() - began[where] > timeout_s else one))

    for _ in range(min(len(calls), AT_ONCE)):
        Thread(target=ask, daemon=True).start()  # one that hangs shall not keep the process from ending
    told: dict[str, T] = {}
    while len(told) < len(calls):
        try:
            where, one = done.get(timeout=LOOK_S)
        except Empty:
            now = time.monotonic()
            hanging = [each for each in calls if each not in told and now - began.get(each, now) > timeout_s]
            if not hanging:
                continue
            where, one = hanging[0], late
        if isinstance(one, _Failure):
            failed.set()  # nothing more is asked
            raise EnvironmentFailed(
                f"{KEY} {one.what} ({where}): nothing of the shard is committed; mend it and resume"
            )
        told[where] = one
    return [told[where] for where in calls]


def _heard(ask: Callable[[], T]) -> T:
    """What rank 0 is told when it asks."""
    told: list[T] = []
    failed: EnvironmentFailed | None = None
    if ranks.rank() == 0:
        try:
            told = [ask()]
        except EnvironmentFailed as error:
            failed = error
    told, failed = ranks.gathered((told, failed))[0]
    if failed is not None:
        raise failed
    return told[0]


@dataclass
class Dialogue:
    """A trajectory that is being written."""

    request: Request
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

    def turns(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
        """Who wrote what, as messages of the roles `policy` and `environment`."""
        written = groupby(zip(self.ids, self.mask, strict=True), key=itemgetter(1))
        return [
            {
                "role": "policy" if mine else "environment",
                "content": tokenizer.decode([token for token, _ in tokens], skip_special_tokens=True),
            }
            for mine, tokens in written
        ]

    def heard(self, ids: Sequence[int]) -> None:
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
    """Write the dialogues to their ends: turns of the policy, drawn for all at once, and what it is told after each.

    A dialogue ends with `finish_reason` stop (the environment has no more to say), length (there is no room for
    another token), or turns (`max_turns` are written).
    """
    sampling = replace(sampling, stop=(*sampling.stop, *environments.stop))
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
        answered = [pair for pair in zip(going, written[0], strict=True) if not pair[0].finish_reason]
        turns = {
            each.request.trajectory_id: tokenizer.decode(list(generation.response_ids), skip_special_tokens=True)
            for each, generation in answered
        }
        for (each, generation), observation in zip(answered, environments.step(turns), strict=True):
            each.reward += observation.reward
            if observation.content is None:
                each.finish_reason = "stop"
                continue
            ids = content_ids(observation.content, generation.response_ids[-1], tokenizer)
            if turn + 1 == max_turns:
                each.finish_reason = "turns"
            elif len(each.ids) + len(ids) >= sampling.max_tokens:
                each.finish_reason = "length"
            else:
                each.heard(ids)


def content_ids(content: str | Messages, last: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that follow a turn whose last token is `last`: a text as it is; messages as the chat template writes
    them after a message of the assistant, up to where the next one begins."""
    if isinstance(content, str):
        text = content
    elif not tokenizer.chat_template:
        text = "\n" + "\n".join(message["content"] for message in content) + "\n"
    else:
        from jinja2 import TemplateError

        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            shown = str(tokenizer.apply_chat_template(before, tokenize=False))
            whole = str(tokenizer.apply_chat_template([*before, *content], tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in content)
            raise UserError(f"the chat template refuses what {KEY} says (messages of: {roles}): {error}") from None
        if not whole.startswith(shown):
            raise UserError("the chat template writes earlier messages otherwise as others follow: it has no turns")
        ends = shown[shown.rindex("!") + 1 :].removeprefix(str(tokenizer.decode([last])))
        text = ends + whole[len(shown) :]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
