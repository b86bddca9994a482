"""Calls environments: concurrently, with a time limit, and without an effect on other trajectories if one fails."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from ratchet.rlhf import spans
from ratchet.rlhf.config.sections import OnError
from ratchet.rlhf.data.formats import Chat, Messages, drafts_of, with_images
from ratchet.rlhf.data.images import check_image
from ratchet.rlhf.data.prompts import structures
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import Beginning
from ratchet.rlhf.environments.environment import (
    KEY,
    Closing,
    DurableEnvironment,
    Ending,
    Environment,
    EnvironmentFailed,
    Observation,
    check_returns,
    load_environment,
)
from ratchet.rlhf.errors import UserError, counted, raised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ratchet.rlhf.config.sections import EnvironmentConfig
    from ratchet.rlhf.data.prompts import Prompt
    from ratchet.rlhf.environments.dialogues import Dialogue


RESETS = 3
"""Attempts to reset an environment before the run starts, if a failure does not stop the run."""


class EnvironmentCalls:
    """The environments of trajectories that are being written. Used on the event loop only."""

    def __init__(
        self,
        make: Callable[..., Environment | DurableEnvironment],
        options: Mapping[str, Any],
        *,
        timeout_s: float = 60.0,
        concurrency: int = 64,
        on_error: OnError = "fail",
    ) -> None:
        """Starts without environments; `options` are keyword arguments of `make`.

        Args:
            timeout_s: time limit of a call, in seconds.
            on_error: what happens to a trajectory whose environment fails; see `Generator`.
        """
        self.on_error = on_error
        self.make, self._options, self._timeout_s = make, options, timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._environments: dict[int, Environment | DurableEnvironment] = {}

    @property
    def replayable(self) -> bool:
        """True if a new environment reaches the same state when it is given the same turns."""
        return bool(getattr(self.make, "replayable", False))

    @property
    def durable(self) -> bool:
        """True if the environments have the interface `DurableEnvironment`."""
        return hasattr(self.make, "restore")

    @property
    def rewards_ends(self) -> bool:
        """True if the environments have the interface `Ending`."""
        return hasattr(self.make, "ended")

    async def of(self, dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase) -> Environment | DurableEnvironment:
        """Returns the environment of a trajectory, in the state after its answered turns. Raises EnvironmentFailed."""
        trajectory_id = dialogue.request.trajectory_id
        if (existing := self._environments.get(id(dialogue))) is not None:
            return existing
        beginning = dialogue.beginning
        assert beginning is not None, "a trajectory with an environment has a beginning"

        if dialogue.states:
            where = f"{trajectory_id}, at restore"
            restored: DurableEnvironment = await self._call(partial(self.make, **self._options), where)
            self._environments[id(dialogue)] = restored  # before it may fail, so that it will be closed
            await self._call(partial(restored.restore, dialogue.states[-1]), where)
            return restored
        environment = await self.begin(beginning, f"{trajectory_id}, at reset")
        self._environments[id(dialogue)] = environment
        if not isinstance(environment, DurableEnvironment):
            # a new environment replays the trajectory's turns
            for turn in dialogue.answered_turns:
                text = response_text(turn, tokenizer)
                await self._call(partial(environment.step, text), f"{trajectory_id}, replaying a turn")
        return environment

    async def begin(self, beginning: Beginning, where: str) -> Environment | DurableEnvironment:
        """Creates an environment and resets it for a prompt; `where` names the place of an error."""
        environment: Environment | DurableEnvironment = await self._call(partial(self.make, **self._options), where)
        reset = partial(environment.reset, beginning.messages, *structures(*beginning[1:4]))
        try:
            await self._call(reset, where)
        except BaseException:
            _close(environment)
            raise
        return environment

    async def step(self, dialogue: Dialogue, turn: str, scope: str = "") -> Observation:
        """Answers a turn of the policy; the trajectory's environment is ready. Raises EnvironmentFailed.

        Args:
            scope: names the run and the stage in the key that a durable environment gets.
        """
        trajectory_id = dialogue.request.trajectory_id
        where = f"{trajectory_id}, turn {turn[-60:]!r}"
        environment = self._environments[id(dialogue)]
        if isinstance(environment, DurableEnvironment):
            # with the text: a trajectory that is generated again, such as under another config, makes other calls
            digest = hashlib.sha256(turn.encode()).hexdigest()[:16]
            key = f"{scope}/{trajectory_id}/{dialogue.attempt}/{dialogue.answered}/{digest}"
            call = partial(environment.step, turn, key)
        else:
            call = partial(environment.step, turn)
        # the tools of the environment `tools` have spans of their own
        opened = nullcontext(spans.NOTHING) if getattr(environment, "has_spans", False) else _span(environment, turn)
        with opened as span:
            observation = _checked(await self._call(call, where, dialogue), where)
            span.set(lambda: _answer_of(observation))
        return observation

    async def ended(self, dialogue: Dialogue) -> Observation:
        """Returns the reward of a trajectory that its environment, an `Ending`, has not ended.

        Raises EnvironmentFailed.
        """
        environment = self._environments[id(dialogue)]
        assert isinstance(environment, Ending)
        where = f"{dialogue.request.trajectory_id}, at its end"
        return _checked(await self._call(environment.ended, where), where)

    async def snapshot(self, dialogue: Dialogue) -> str:
        """Returns the state of a trajectory's durable environment. Raises EnvironmentFailed."""
        environment = self._environments[id(dialogue)]
        assert isinstance(environment, DurableEnvironment)
        where = f"{dialogue.request.trajectory_id}, at snapshot"
        state: object = await self._call(environment.snapshot, where, dialogue)
        if not isinstance(state, str):
            raise EnvironmentFailed(f"{KEY} snapshot returned {state!r:.60}, which is not a text ({where})")
        return state

    async def is_repeatable(self, dialogue: Dialogue, turn: str) -> bool:
        """Asks a durable environment whether a turn may be answered again. Raises EnvironmentFailed."""
        environment = self._environments[id(dialogue)]
        assert isinstance(environment, DurableEnvironment)
        where = f"{dialogue.request.trajectory_id}, at is_repeatable"
        return bool(await self._call(partial(environment.is_repeatable, turn), where))

    def forget(self, dialogue: Dialogue) -> None:
        """Closes and drops a trajectory's environment, if it has one."""
        _close(self._environments.pop(id(dialogue), None))

    async def _call(self, call: Callable[[], Any], where: str, dialogue: Dialogue | None = None) -> Any:
        """Makes a call of an environment; its seconds are added to the turn of `dialogue`."""
        asked = time.perf_counter()
        async with self._slots:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await in_thread(call)
            except TimeoutError:
                reason = f"took longer than {KEY}.timeout_s {self._timeout_s:g} s"
            except Raised as failure:
                reason = f"raised {raised(failure.error)}"
            finally:
                if dialogue is not None:
                    dialogue.spent(waiting=began - asked, tool=time.perf_counter() - began)
        raise EnvironmentFailed(f"{KEY} {reason} ({where})")


def try_environment(environment: EnvironmentConfig, prompts: Sequence[Prompt], system_prompt: str | None) -> list[str]:
    """Resets an environment for a few prompts, before anything is generated; returns a line for each that failed.

    Args:
        environment: `rollout.environment`. Unless `on_error` is `fail`, a prompt has `RESETS` attempts.

    Raises:
        UserError: the class cannot be loaded.
    """
    calls = EnvironmentCalls(
        load_environment(environment.name),
        environment.options,
        timeout_s=environment.timeout_s,
        concurrency=environment.concurrency,
    )
    attempts = 1 if environment.on_error == "fail" else RESETS

    async def failure_of(prompt: Prompt) -> str | None:
        truth = prompt.ground_truth, prompt.ground_truth_is_json
        beginning = Beginning(prompt.after(system_prompt), *truth, prompt.extra_info, prompt.tools)
        reason = ""
        for _ in range(attempts):
            try:
                tried = await calls.begin(beginning, "at reset, which is tried before the run starts")
            except EnvironmentFailed as error:
                reason = str(error)
            else:
                _close(tried)
                return None
        return f"{prompt.where}: {reason}{_about_json(prompt)}"

    async def failures_of_all() -> list[str | None]:
        return await asyncio.gather(*map(failure_of, prompts))

    with ThreadPoolExecutor(1) as thread:  # the caller's thread may already run an event loop
        return [failure for failure in thread.submit(asyncio.run, failures_of_all()).result() if failure is not None]


def check_continues(prompt: Prompt, name: str, make: Callable[..., Any]) -> None:
    """Checks that an environment can be brought to the state after the stored turns that a prompt continues.

    Args:
        name: `rollout.environment.name`.
        make: the environment's class.

    Raises:
        UserError: it can neither be restored nor replayed, or its states after these turns are not stored.
    """
    assert prompt.continues is not None
    check_returns(make, name, f"{prompt.where}, which continues stored turns,")
    prefix = json.loads(prompt.continues)
    turns = len(prefix["turn_ends"])
    if hasattr(make, "restore") and len(prefix["states"]) != turns:
        raise UserError(
            f"{prompt.where}: continues after {counted(turns, 'turn')}, but the states of {KEY} {name} after them are "
            "not stored, so it cannot be restored: continue a trajectory that has turn_states"
        )


def _about_json(prompt: Prompt) -> str:
    truth = prompt.ground_truth
    if truth is None or prompt.ground_truth_is_json or not truth.lstrip().startswith(("{", "[")):
        return ""
    return (
        f"; ground_truth is the text {truth[:60]!r} in this file: decode it in reset (json.loads(ground_truth)), or "
        "store it as a structure"
    )


def _span(environment: Environment | DurableEnvironment, turn: str) -> AbstractContextManager[spans.Span]:
    """Opens the span of an environment's answer."""
    kind = type(environment)
    name = kind.__module__ if kind.__name__ == "Environment" else kind.__qualname__

    def asked() -> spans.Attributes:
        known: spans.Attributes = {"gen_ai.tool.name": name, "gen_ai.tool.type": "function"}
        return {**known, "gen_ai.tool.call.arguments": json.dumps({"turn": turn})} if spans.has_content() else known

    return spans.span(spans.TOOL, lambda: name, asked)


def _answer_of(observation: Observation) -> spans.Attributes:
    if not spans.has_content() or observation.content is None:
        return {}
    content = observation.content
    said = content.messages if isinstance(content, Chat) else content
    return {"gen_ai.tool.call.result": said if isinstance(said, str) else json.dumps(said)}


class Raised(Exception):
    """Wraps an exception of an environment.

    A time-out, a cancellation or `sys.exit` of its own would otherwise look like one of the event loop's.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def in_thread(call: Callable[[], Any]) -> Any:
    """Makes a call in a thread, and awaits its result if that is awaitable."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        # the caller may have given up
        if not done.done():
            done.set_result((result, error))

    def work() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        loop.call_soon_threadsafe(finish, result, failure)

    # a daemon, because a call that hangs must not keep the process alive
    threading.Thread(target=work, daemon=True).start()
    result, failure = await done
    if failure is not None:
        raise Raised(failure)
    if not inspect.isawaitable(result):
        return result
    try:
        return await result
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise Raised(error) from None


def _close(environment: object) -> None:
    """Closes an environment that has something to close, in a thread."""

    def close(closing: Closing) -> None:
        try:
            closing.close()
        except Exception as error:  # the trajectory is complete without it
            warnings.warn(f"{KEY} raised {raised(error)} at close", RuntimeWarning, stacklevel=2)

    if isinstance(environment, Closing):
        threading.Thread(target=close, args=[environment], daemon=True).start()


def _checked(observation: Any, where: str) -> Observation:
    """Returns an observation with its messages as a `Chat`. Raises EnvironmentFailed if it is none."""
    try:
        return _read(observation)
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFailed(f"{KEY} raised {raised(error)} ({where})") from None
    except UserError as error:
        raise EnvironmentFailed(f"{KEY} answered wrongly ({where}): {error}") from None


def _read(observation: Any) -> Observation:
    if not isinstance(observation, Observation):
        raise TypeError(f"step returned {observation!r}, which is not an Observation")
    if not isfinite(observation.reward):
        raise ValueError(f"step gave the reward {observation.reward}")
    if not isinstance(observation.error, str | None):
        raise TypeError(f"step gave the error {observation.error!r}: it should be a text, or None")
    if not isinstance(observation.parts, Mapping):
        raise TypeError(f"step gave the parts {observation.parts!r}: they should be numbers by name")
    for name, value in observation.parts.items():
        if not isfinite(value):
            raise ValueError(f"step gave the part {name} {value}")
    content = observation.content
    if content is None or isinstance(content, str | Chat):
        return observation
    items = content if isinstance(content, list | tuple) else []
    messages = [item for item in items if isinstance(item, Mapping)]
    if any(isinstance(message.get("content"), list) for message in messages):
        given, images = with_images(drafts_of(list(content), "an observation", "content"), {}, "an observation", "")
        for number, image in enumerate(images, 1):
            check_image(image, f"an observation: image {number}")
        return replace(observation, content=Chat(given, images=images))
    texts = [message.get(key) for message in messages for key in ("role", "content")]
    if not messages or len(messages) < len(content) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"step returned {content!r:.2000}: it should be a text, None, or messages [{{role, content}}]")
    return replace(observation, content=Chat(cast(Messages, messages)))
