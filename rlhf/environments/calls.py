"""Calls of environments: concurrent, with a time limit, and without an effect on other trajectories if one fails."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from rlhf.data.prompts import structures
from rlhf.environments import KEY, Environment, EnvironmentFailed, Observation
from rlhf.errors import raised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.environments.dialogues import Dialogue


OnError = Literal["retry", "drop", "fail"]


class EnvironmentCalls:
    """The environments of trajectories that are being written. Used on the event loop only."""

    def __init__(
        self,
        make: Callable[..., Environment],
        options: Mapping[str, Any],
        *,
        timeout_s: float = 60.0,
        concurrency: int = 64,
        on_error: OnError = "fail",
    ) -> None:
        """Start without environments.

        Args:
            make: makes an environment.
            options: keyword arguments of `make`.
            timeout_s: time limit of a call, in seconds.
            concurrency: largest number of calls at the same time.
            on_error: what becomes of a trajectory whose environment fails; see `Generator`.
        """
        self.on_error = on_error
        self._make, self._options, self._timeout_s = make, options, timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._environments: dict[int, Environment] = {}

    @property
    def replayable(self) -> bool:
        """Whether a new environment that is given the same turns reaches the same state."""
        return bool(getattr(self._make, "replayable", False))

    async def of(self, dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase) -> Environment:
        """The environment of a trajectory, in the state that follows its answered turns.

        Args:
            dialogue: the trajectory; its answered turns are replayed if it has no environment yet.
            tokenizer: tokenizer of the policy.

        Returns:
            The environment.

        Raises:
            EnvironmentFailed: it failed, or took too long.
        """
        trajectory_id = dialogue.request.trajectory_id
        if (existing := self._environments.get(id(dialogue))) is not None:
            return existing
        beginning = dialogue.beginning
        assert beginning is not None, "a trajectory with an environment has a beginning"

        where = f"{trajectory_id}, at reset"
        environment: Environment = await self._call(partial(self._make, **self._options), where)
        reset = partial(environment.reset, beginning.messages, *structures(*beginning[1:]))
        await self._call(reset, where)
        self._environments[id(dialogue)] = environment
        for turn in dialogue.answered_turns:
            text = tokenizer.decode(turn, skip_special_tokens=True)
            await self._call(partial(environment.step, text), f"{trajectory_id}, replaying a turn")
        return environment

    async def step(self, dialogue: Dialogue, turn: str) -> Observation:
        """Answer a turn of the policy.

        Args:
            dialogue: the trajectory, whose environment is ready.
            turn: text of the turn.

        Returns:
            The observation.

        Raises:
            EnvironmentFailed: the environment failed, or took too long.
        """
        trajectory_id = dialogue.request.trajectory_id
        where = f"{trajectory_id}, turn {turn[-60:]!r}"
        observation: Observation = await self._call(partial(self._environments[id(dialogue)].step, turn), where)
        try:
            _check(observation)
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvironmentFailed(f"{KEY} raised {raised(error)} ({where})") from None
        return observation

    def forget(self, dialogue: Dialogue) -> None:
        """Drop a trajectory's environment, if it has one."""
        self._environments.pop(id(dialogue), None)

    async def _call(self, call: Callable[[], Any], where: str) -> Any:
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await _in_thread(call)
            except TimeoutError:
                reason = f"took longer than {KEY}.timeout_s {self._timeout_s:g} s"
            except _Raised as failure:
                reason = f"raised {raised(failure.error)}"
        raise EnvironmentFailed(f"{KEY} {reason} ({where})")


class _Raised(Exception):
    """What an environment raised: also a time-out or a cancellation of its own, or `sys.exit`, which would otherwise
    pass for one of the event loop's."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Make a call in a thread, and await what it returns if that is awaitable.

    The thread is a daemon, because a call that hangs must not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def work() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=work, daemon=True).start()
    result, failure = await done
    if failure is not None:
        raise _Raised(failure)
    if not inspect.isawaitable(result):
        return result
    try:
        return await result
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _Raised(error) from None


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
