"""Runs the programs of agents: each in its own thread, or as a task of an event loop, with a key to the endpoint."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ratchet.rlhf import event_loop
from ratchet.rlhf.agents.agent import KEY, AgentFailed, Program
from ratchet.rlhf.agents.dialects import MODEL
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.sessions import Policy, Recorded, Recorder, Session, SessionLimits
from ratchet.rlhf.config.sections import OnError
from ratchet.rlhf.data.formats import openai_parts
from ratchet.rlhf.data.prompts import structures
from ratchet.rlhf.environments.dialogues import Dialogue, Result
from ratchet.rlhf.environments.guarded_calls import Raised, in_thread
from ratchet.rlhf.errors import raised

LOOP = "agents"
"""The event loop of async programs: one that blocks it delays other programs, but never the engine."""


class AgentCalls:
    """The programs of trajectories that are being written. Used on the generation's event loop only."""

    def __init__(
        self,
        program: Program,
        options: Mapping[str, Any],
        *,
        gateway: Gateway,
        context: int,
        max_calls: int,
        timeout_s: float,
        on_error: OnError,
        must_reward: bool,
    ) -> None:
        """Starts without programs.

        Args:
            options: the program's keyword arguments, in addition to those of `ARGUMENTS`.
            timeout_s: maximum time without a call in progress, in seconds.
            on_error: what happens to a trajectory whose program fails; see `Generator`.
            must_reward: the program has to return a reward, because there is no other.
        """
        self.on_error = on_error
        self._program, self._options, self._gateway = program, options, gateway
        self._context, self._max_calls, self._timeout_s = context, max_calls, timeout_s
        self._must_reward = must_reward

    async def run(self, dialogue: Dialogue, policy: Policy, recorded: Sequence[Recorded]) -> None:
        """Runs the program of a trajectory to its end, and gives the trajectory its branches.

        Raises:
            AgentFailed: the program failed, or made a call that does not fit the run.
        """
        loop, name = asyncio.get_running_loop(), dialogue.request.trajectory_id
        fatal: asyncio.Future[None] = loop.create_future()
        limits = SessionLimits(self._context, policy.sampling.max_tokens, self._max_calls)
        session = Session(dialogue, policy, limits, recorded, fatal=fatal)
        base_url, key = await self._gateway.open(session)
        running = asyncio.ensure_future(self._returned(dialogue, base_url, key, policy.recorder))
        try:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:

                    def set_limit(idle: bool) -> None:
                        # the program's own time is limited, not that of the policy's answers; once it has no more
                        # calls, its time does not begin again with each one that is refused
                        if not session.has_calls_left and limit.when() is not None:
                            return
                        limit.reschedule(loop.time() + self._timeout_s if idle else None)

                    session.on_idle = set_limit
                    await asyncio.wait({running, fatal}, return_when=asyncio.FIRST_COMPLETED)
            except TimeoutError:
                raise AgentFailed(
                    f"{KEY} neither made a call nor returned for {KEY}.timeout_s {self._timeout_s:g} s ({name})"
                ) from None
            if fatal.done():
                fatal.result()
            result = _result(await running)
        except Raised as failure:
            # an exception that follows a refused call or a reached limit is not the program's fault
            if session.error is None and session.limit is None:
                raise AgentFailed(f"{KEY} raised {raised(failure.error)} ({name})") from None
            result = Result(0.0 if self._must_reward else None, {})
        except (TypeError, ValueError, OverflowError) as error:
            raise AgentFailed(f"{KEY} {error} ({name})") from None
        finally:
            session.on_idle = lambda idle: None
            self._gateway.close(key)
            await session.close()
            running.cancel()
            fatal.cancel()
            # also those of a program that failed: people read how it came to that
            dialogue.branches = [branch.dialogue for _, branch in sorted(session.branches.items())]
        if session.error is not None:
            raise AgentFailed(f"{KEY} made a call that was refused: {session.error} ({name})")
        if not dialogue.branches:
            raise AgentFailed(f"{KEY} returned without an answer of the policy ({name})")
        if self._must_reward and result.reward is None:
            raise AgentFailed(
                f"{KEY} returned None, and reward.function and reward.model are null: return a reward, or set one of "
                f"them ({name})"
            )
        dialogue.result = result
        dialogue.finish_reason = session.limit or "stop"

    async def _returned(self, dialogue: Dialogue, base_url: str, api_key: str, recorder: Recorder | None) -> Any:
        """Returns the program's result. Raises `Raised`."""
        beginning = dialogue.beginning
        assert beginning is not None, "a trajectory of an agent has a beginning"
        truth, extra = structures(*beginning[1:4])
        task = {
            "messages": openai_parts(beginning.messages, dialogue.request.images),
            "tools": list(beginning.tools),
            "ground_truth": truth,
            "extra_info": extra,
            # after a crash the program runs again: with the same key, and the same answers of the policy
            "key": f"{'' if recorder is None else recorder.scope}/{dialogue.request.trajectory_id}",
        }

        def call() -> Any:
            return self._program(task=task, base_url=base_url, api_key=api_key, model=MODEL, **self._options)

        if not inspect.iscoroutinefunction(self._program):
            return await in_thread(call)

        async def awaited() -> Any:
            try:
                return await call()
            except BaseException as error:
                raise Raised(error) from None

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(awaited(), event_loop.loop(LOOP)))


def _result(returned: Any) -> Result:
    """Reads a program's result."""
    parts: dict[str, float] = {}
    if isinstance(returned, Mapping):
        parts = {str(name): _number(value) for name, value in returned.items()}
        rewards = [parts.pop(name) for name in ("reward", "score") if name in parts]
        if len(rewards) != 1:
            raise TypeError(f"returned {returned!r}: a dictionary has the key reward, and perhaps named parts")
        return Result(rewards[0], parts)
    return Result(None if returned is None else _number(returned), parts)


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError(f"returned {value!r:.60}, a text: a reward is a number, a dictionary with one, or None")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"returned {value!r}: a reward is a number, a dictionary with one, or None") from None
    if not isfinite(number):
        raise ValueError(f"returned the reward {number}, which is not finite")
    return number
