"""Writes trajectories concurrently with a rollout engine: each is a coroutine that waits for nobody else.

A trajectory that has no environment is one turn of the policy. Otherwise policy and environment take turns. Everything
that interrupts a turn (new weights, an engine that is lost, a crash) ends in the same way: the turn continues from the
tokens that the trajectory has.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from rlhf.engines import event_loop
from rlhf.engines.base import Request, RolloutEngine, Sampling
from rlhf.environments.calls import EnvironmentCalls
from rlhf.environments.dialogues import Dialogue, content_ids
from rlhf.errors import EngineLost, NotFinite

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rules:
    """What the trajectories of a stage have in common."""

    sampling: Sampling
    """`max_tokens` limits the whole response."""
    environments: EnvironmentCalls | None = None
    """The environments that the policy talks to; None: it answers alone."""
    max_turns: int = 1
    """Largest number of turns of the policy."""


class Generator:
    """The trajectories that one rollout engine is writing.

    All methods may be called from any thread except the event loop's.
    """

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, *, interruptible: bool) -> None:
        """Start without trajectories.

        Args:
            engine: the rollout engine.
            tokenizer: tokenizer of the policy.
            interruptible: whether new weights interrupt a trajectory, which then continues with them; otherwise
                `pause` waits until all running trajectories are complete.
        """
        self.engine, self.tokenizer, self.interruptible = engine, tokenizer, interruptible
        self.version = 0
        """Version of the policy whose weights the engine has."""
        self._gate = asyncio.Event()  # closed while the weights are about to change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._dialogues: dict[str, Dialogue] = {}
        """Trajectories that are not complete, by id."""
        self._writing: set[str] = set()
        """Those that are past the gate."""
        self._turns: dict[str, asyncio.Task[None]] = {}
        """The requests that the engine works on, by trajectory."""
        self._idle = asyncio.Condition()
        self._ended = SimpleQueue[Dialogue | BaseException]()

    def submit(self, dialogues: Sequence[Dialogue], rules: Rules) -> None:
        """Start or continue trajectories.

        Args:
            dialogues: the trajectories, with the tokens that they have so far.
            rules: what they have in common.
        """
        event_loop.run(self._submit(dialogues, rules))

    def wait(self, timeout_s: float) -> list[Dialogue]:
        """Wait until a trajectory is complete.

        Args:
            timeout_s: time limit in seconds.

        Returns:
            The trajectories that are complete since the last call; none after the time limit.

        Raises:
            EngineLost: the engine died. Trajectories keep their tokens, and continue after `resume`.
            NotFinite: a log-prob is not finite.
            EnvironmentFailed: an environment failed, and the config stops the run then.
        """
        complete: list[Dialogue] = []
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                ended = self._ended.get(timeout=0 if complete else max(deadline - time.monotonic(), 0))
            except Empty:
                return complete
            if isinstance(ended, BaseException):
                raise ended
            complete.append(ended)

    def incomplete(self) -> list[Dialogue]:
        """Copies of the trajectories that are not complete, as they are now."""
        return event_loop.run(self._copies())

    def cancel(self, trajectory_ids: Iterable[str]) -> None:
        """Drop trajectories that are not complete."""
        event_loop.run(self._cancel(list(trajectory_ids)))

    def pause(self) -> None:
        """Let the engine's requests end, so that its weights can change; see `interruptible`."""
        event_loop.run(self._pause())

    def resume(self, version: int, engine: RolloutEngine | None = None) -> None:
        """Continue with new weights.

        Args:
            version: version of the policy whose weights the engine has now.
            engine: the engine that replaces a lost one.
        """
        event_loop.run(self._resume(version, engine))

    # On the event loop.

    async def _submit(self, dialogues: Sequence[Dialogue], rules: Rules) -> None:
        self.engine.join(len(dialogues))
        for dialogue in dialogues:
            trajectory_id = dialogue.request.trajectory_id
            self._dialogues[trajectory_id] = dialogue
            self._tasks[trajectory_id] = asyncio.create_task(self._write(dialogue, rules))

    async def _copies(self) -> list[Dialogue]:
        return [deepcopy(dialogue) for dialogue in self._dialogues.values()]

    async def _cancel(self, trajectory_ids: list[str]) -> None:
        tasks = [self._tasks[trajectory_id] for trajectory_id in trajectory_ids if trajectory_id in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pause(self) -> None:
        self._gate.clear()
        if self.interruptible:
            for turn in self._turns.values():
                turn.cancel()
        async with self._idle:
            await self._idle.wait_for(lambda: not (self._turns if self.interruptible else self._writing))

    async def _resume(self, version: int, engine: RolloutEngine | None) -> None:
        self.version = version
        if engine is not None:
            engine.join(len(self._dialogues))
            self.engine = engine
        self._gate.set()

    async def _write(self, dialogue: Dialogue, rules: Rules) -> None:
        """Write one trajectory to its end."""
        trajectory_id = dialogue.request.trajectory_id
        try:
            await self._gate.wait()
            self._writing.add(trajectory_id)
            while not dialogue.finish_reason:
                await self._take_turn(dialogue, rules)
            self._ended.put(dialogue)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._ended.put(error)
        finally:
            self.engine.leave()
            del self._tasks[trajectory_id], self._dialogues[trajectory_id]
            self._writing.discard(trajectory_id)
            if rules.environments is not None:
                rules.environments.forget(trajectory_id)
            async with self._idle:
                self._idle.notify_all()

    async def _take_turn(self, dialogue: Dialogue, rules: Rules) -> None:
        """A turn of the policy, and the environment's answer to it."""
        environments, sampling = rules.environments, rules.sampling
        if environments is not None:
            environment = await environments.of(dialogue, self.tokenizer)
            sampling = replace(sampling, stop=(*sampling.stop, *environment.stop))
        turn = dialogue.unanswered_turn
        if turn is None:
            reason = await self._policy_turn(dialogue, sampling)
            if environments is None or reason == "length":
                dialogue.finish_reason = reason
                return
            turn = dialogue.unanswered_turn
        assert environments is not None and turn is not None
        text = str(self.tokenizer.decode(turn, skip_special_tokens=True))
        observation = await environments.step(dialogue, text)
        dialogue.answered += 1
        dialogue.reward += observation.reward
        if observation.content is None:
            dialogue.finish_reason = "stop"
            return
        ids = content_ids(observation.content, turn[-1], self.tokenizer)
        if dialogue.answered == rules.max_turns:
            dialogue.finish_reason = "turns"
        elif len(dialogue.ids) + len(ids) >= sampling.max_tokens:
            dialogue.finish_reason = "length"
        else:
            dialogue.heard(ids)

    async def _policy_turn(self, dialogue: Dialogue, sampling: Sampling) -> str:
        """Generate the rest of the policy's turn; returns the finish reason."""
        trajectory_id, reasons = dialogue.request.trajectory_id, list[str]()

        async def generate(request: Request) -> None:
            async with aclosing(self.engine.stream(request, sampling)) as chunks:
                async for chunk in chunks:
                    if not all(map(math.isfinite, chunk.log_probs)):
                        raise NotFinite(
                            "the model gave log-probs that are not finite while generating: nothing is committed"
                        )
                    dialogue.wrote(chunk, self.version)
                    if chunk.finish_reason is not None:
                        reasons.append(chunk.finish_reason)

        while not reasons:
            if self.interruptible:
                await self._gate.wait()
            turn = self._turns[trajectory_id] = asyncio.create_task(generate(dialogue.next_request(sampling)))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled() or self._gate.is_set():  # the trajectory was cancelled, not its request
                    turn.cancel()
                    raise
            except EngineLost as error:
                if self._gate.is_set():  # the first to notice; the others wait for `resume`, too
                    self._gate.clear()
                    self._ended.put(error)
                await self._gate.wait()
            finally:
                del self._turns[trajectory_id]
                async with self._idle:
                    self._idle.notify_all()
        return reasons[0]
