"""Writes trajectories concurrently with a rollout engine: each is a separate coroutine.

A trajectory without an environment is one turn of the policy. Otherwise policy and environment take turns. Every
interruption of a turn (new weights, a lost engine, a crash) ends in the same way: the turn continues from the
trajectory's tokens.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ratchet.rlhf import event_loop, spans
from ratchet.rlhf.agents.sessions import Policy, Recorded, Recorder
from ratchet.rlhf.config.sections import OnError
from ratchet.rlhf.data.formats import Chat
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import Dialogue, content_ids
from ratchet.rlhf.environments.environment import EnvironmentFailed
from ratchet.rlhf.environments.guarded_calls import EnvironmentCalls
from ratchet.rlhf.errors import EngineLost, NotFinite
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling, limit_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_PER_CHARACTER = 4
"""A character has at most four bytes, each of which may be a token."""
TRIES = 3
"""Maximum number of starts of a trajectory, with `rollout.environment.on_error: retry`."""


class Callers(Protocol):
    """The callers of the policy: programs of agents, or clients."""

    @property
    def on_error(self) -> OnError:
        """What happens to a trajectory whose program fails."""

    async def run(self, dialogue: Dialogue, policy: Policy, recorded: Sequence[Recorded]) -> None:
        """Answers the calls of a trajectory until it ends.

        Raises:
            EnvironmentFailed: the program failed.
        """


class TurnRecorder(Protocol):
    """Stores the turns of trajectories with durable environments."""

    @property
    def scope(self) -> str:
        """The run and the stage, as no other run names its own."""

    async def record(self, dialogue: Dialogue) -> None:
        """Stores what is new in a trajectory durably: when this returns, a crash does not lose it."""


@dataclass(frozen=True)
class Rules:
    """Settings that the trajectories of a stage share."""

    sampling: Sampling
    """`max_tokens` limits the whole response."""
    environments: EnvironmentCalls | None = None
    """The environments that the policy talks to; None: none."""
    max_turns: int = 1
    """Maximum number of turns of the policy."""
    agents: Callers | None = None
    """The callers of the policy; None: none."""
    recorder: Recorder | None = None
    """Stores the answers that programs receive."""
    recorded: Mapping[str, Sequence[Recorded]] = field(default_factory=dict)
    """Answers of an earlier process, by trajectory id."""
    partner: str = ""
    """Name of the environment or the agent; spans have it."""
    turns: TurnRecorder | None = None
    """Stores the turns of durable environments; None: they are not stored, or there are none."""

    @property
    def on_error(self) -> OnError:
        """What happens to a trajectory whose environment or program fails."""
        talks = self.environments or self.agents
        return "fail" if talks is None else talks.on_error


@dataclass(eq=False)
class _Running:
    """A trajectory that is being written."""

    dialogue: Dialogue
    task: asyncio.Task[None] | None = None
    turns: set[asyncio.Task[None]] = field(default_factory=set)
    """The requests in the engine: at most one, unless an agent makes several calls at the same time."""
    is_past_gate: bool = False
    span: spans.Span = spans.NOTHING
    """The trajectory's span, if it talks to an environment or an agent."""
    is_announced: bool = True
    """True if a batch of the engine waits for its requests."""


@dataclass(frozen=True)
class _Ended:
    """A trajectory that is complete, or that met an error."""

    dialogue: Dialogue
    error: BaseException | None = None


class Generator:
    """The trajectories that one rollout engine is writing.

    All methods may be called from any thread except the event loop's.
    """

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, *, interruptible: bool) -> None:
        """Starts without trajectories.

        Args:
            interruptible: new weights interrupt a trajectory, which then continues with them; otherwise `pause` waits
                until all running trajectories are complete.
        """
        self.engine, self.tokenizer, self.interruptible = engine, tokenizer, interruptible
        self.version = 0
        """Version of the policy that the engine's weights have."""
        self._gate = asyncio.Event()  # cleared while the weights are about to change
        self._running: dict[int, _Running] = {}
        """Incomplete trajectories, by `id`: two stages may use the same trajectory ids."""
        self._idle = asyncio.Condition()
        self._ended = deque[_Ended]()
        self._has_ended = threading.Condition()  # `_ended` is changed on the event loop, and read by `wait`

    @property
    def is_paused(self) -> bool:
        """True if nothing is generated until `resume`."""
        return not self._gate.is_set()

    def submit(self, submitted: Sequence[tuple[Dialogue, Rules]]) -> None:
        """Starts or continues trajectories. Those of one call are announced to the engine together."""
        event_loop.run(self._submit(submitted))

    def wait(self, timeout_s: float) -> list[Dialogue]:
        """Waits until a trajectory is complete; returns those completed since the last call, none after the time limit.

        Raises:
            EngineLost: the engine died. Trajectories keep their tokens, and continue after `resume`.
            NotFinite: a log-prob is not finite.
            EnvironmentFailed: an environment failed, and `on_error` is `fail`.
        """
        complete: list[Dialogue] = []
        with self._has_ended:
            self._has_ended.wait_for(lambda: self._ended, timeout_s)
            while self._ended:
                ended = self._ended[0]
                if ended.error is not None and complete:
                    break  # the next call raises it, so that no complete trajectory is lost
                self._ended.popleft()
                if ended.error is not None:
                    raise ended.error
                complete.append(ended.dialogue)
        return complete

    def copies(self, dialogues: Iterable[Dialogue]) -> list[Dialogue]:
        """Copies trajectories as they are, while they are being written."""
        return event_loop.run(self._copies(list(dialogues)))

    def cancel(self, dialogues: Iterable[Dialogue]) -> None:
        """Drops those of the trajectories that are incomplete."""
        event_loop.run(self._cancel(list(dialogues)))

    def pause(self) -> None:
        """Ends the engine's requests, so that its weights can change; see `interruptible`."""
        event_loop.run(self._pause())

    def resume(self, version: int, engine: RolloutEngine | None = None) -> None:
        """Continues with the engine's new weights, or with an engine that replaces a lost one."""
        event_loop.run(self._resume(version, engine))

    # On the event loop.

    async def _submit(self, submitted: Sequence[tuple[Dialogue, Rules]]) -> None:
        self.engine.join(sum(rules.agents is None for _, rules in submitted))
        for dialogue, rules in submitted:
            # all at once: a batch with trajectories on both sides of the gate would never start
            # agents are not announced: their programs may wait for one another, so a batch that waits for all of them
            # might never start
            running = self._running[id(dialogue)] = _Running(
                dialogue, is_past_gate=self._gate.is_set(), is_announced=rules.agents is None
            )
            running.task = asyncio.create_task(self._write(running, rules))

    async def _copies(self, dialogues: list[Dialogue]) -> list[Dialogue]:
        return [dialogue.copy() for dialogue in dialogues]

    async def _cancel(self, dialogues: list[Dialogue]) -> None:
        tasks = [self._running[id(dialogue)].task for dialogue in dialogues if id(dialogue) in self._running]
        for task in tasks:
            assert task is not None
            task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        dropped = set(map(id, dialogues))
        # a lost engine concerns the other trajectories, too
        self._forget_ended(lambda ended: id(ended.dialogue) in dropped and not isinstance(ended.error, EngineLost))

    def _end(self, dialogue: Dialogue, error: BaseException | None = None) -> None:
        with self._has_ended:
            self._ended.append(_Ended(dialogue, error))
            self._has_ended.notify_all()

    def _forget_ended(self, is_forgotten: Callable[[_Ended], bool]) -> None:
        with self._has_ended:
            self._ended = deque(ended for ended in self._ended if not is_forgotten(ended))

    async def _pause(self) -> None:
        self._gate.clear()
        if self.interruptible:
            for running in self._running.values():
                for turn in running.turns:
                    turn.cancel()
        async with self._idle:
            await self._idle.wait_for(self._is_idle)

    def _is_idle(self) -> bool:
        running = self._running.values()
        return all(not one.turns if self.interruptible else not one.is_past_gate for one in running)

    async def _resume(self, version: int, engine: RolloutEngine | None) -> None:
        self.version = version
        if engine is not None and engine is not self.engine:
            engine.join(sum(running.is_announced for running in self._running.values()))
            self.engine = engine
            self._forget_ended(lambda ended: isinstance(ended.error, EngineLost))
        self._gate.set()

    async def _write(self, running: _Running, rules: Rules) -> None:
        """Writes one trajectory to its end."""
        dialogue = running.dialogue
        try:
            if not running.is_past_gate:
                await self._gate.wait()
                running.is_past_gate = True
            with self._span(dialogue, rules) as running.span:
                await self._write_turns(running, rules)
            self._end(dialogue)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._end(dialogue, error)
        finally:
            if running.is_announced:
                self.engine.leave()
            del self._running[id(dialogue)]
            if rules.environments is not None:
                rules.environments.forget(dialogue)
            await self._tell_idle()

    async def _write_turns(self, running: _Running, rules: Rules) -> None:
        """Writes turns until the trajectory ends."""
        dialogue, tries = running.dialogue, TRIES
        while not dialogue.finish_reason:
            try:
                if rules.agents is not None:
                    await self._run_agent(running, rules, rules.agents)
                else:
                    await self._take_turn(running, rules)
            except EnvironmentFailed as error:
                tries -= 1
                if rules.on_error == "fail":
                    raise
                if rules.on_error == "retry" and tries:
                    if rules.environments is not None:
                        rules.environments.forget(dialogue)
                    dialogue.restart()
                else:
                    dialogue.error, dialogue.finish_reason = str(error), "error"
        if dialogue.error is not None:
            running.span.failed("EnvironmentFailed")

    @contextmanager
    def _span(self, dialogue: Dialogue, rules: Rules) -> Iterator[spans.Span]:
        """Opens the span of a trajectory, if it talks to an environment or an agent."""
        if rules.environments is None and rules.agents is None:
            yield spans.NOTHING
            return
        conversation = dialogue.request.trajectory_id
        with spans.span(
            spans.AGENT,
            lambda: rules.partner,
            lambda: {"gen_ai.agent.name": rules.partner, "gen_ai.conversation.id": conversation, **self._provided()},
        ) as opened:
            yield opened

    def _provided(self) -> spans.Attributes:
        return {"gen_ai.provider.name": "ratchet", "gen_ai.request.model": self._model}

    @property
    def _model(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", ""))

    def _asked(self, request: Request, sampling: Sampling) -> spans.Attributes:
        """Returns the attributes of a model call."""
        asked: spans.Attributes = {
            **self._provided(),
            "gen_ai.conversation.id": request.trajectory_id,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.max_tokens": request.max_tokens or sampling.max_tokens,
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
        }
        if spans.has_content():
            text = str(self.tokenizer.decode(request.prompt_ids))
            return {**asked, "gen_ai.input.messages": spans.text_message("user", text)}
        return asked

    def _answered(self, dialogue: Dialogue) -> spans.Attributes:
        """Returns the attributes of the answer to a model call."""
        turn = dialogue.ids[dialogue.turn_starts[-1] :]
        reason = dialogue.finish_reason or "stop"
        answered: spans.Attributes = {
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [reason],
            "gen_ai.usage.output_tokens": len(turn),
            "ratchet.policy_version": self.version,
        }
        if spans.has_content():
            text = response_text(turn, self.tokenizer)
            return {**answered, "gen_ai.output.messages": spans.text_message("assistant", text, reason)}
        return answered

    async def _tell_idle(self) -> None:
        async with self._idle:
            self._idle.notify_all()

    async def _run_agent(self, running: _Running, rules: Rules, agents: Callers) -> None:
        """Runs the program of a trajectory."""

        async def generate(dialogue: Dialogue, sampling: Sampling, on_tokens: Callable[[], None]) -> None:
            await self._policy_turn(running, dialogue, sampling, answers=("stop",), on_tokens=on_tokens)

        recorded = rules.recorded.get(running.dialogue.request.trajectory_id, ())
        policy = Policy(self.tokenizer, rules.sampling, generate, rules.recorder, running.span)
        await agents.run(running.dialogue, policy, recorded)

    async def _take_turn(self, running: _Running, rules: Rules) -> None:
        """Generates a turn of the policy, and passes it to the environment."""
        dialogue = running.dialogue
        environments, sampling = rules.environments, rules.sampling
        if environments is not None:
            environment = await environments.of(dialogue, self.tokenizer)
            sampling = replace(sampling, stop=(*sampling.stop, *environment.stop))
        is_new, turn, record = False, dialogue.unanswered_turn, rules.turns
        if turn is None:
            # an environment that rewards the end has to do so before the trajectory counts as complete
            ends = () if environments is None else (("stop", "length") if environments.rewards_ends else ("stop",))
            await self._policy_turn(running, dialogue, sampling, answers=ends)
            if dialogue.finish_reason:
                return
            is_new, turn = True, dialogue.unanswered_turn
        assert environments is not None and turn is not None
        if environments.rewards_ends and len(dialogue.ids) >= limit_of(dialogue.request, sampling):
            end = await environments.ended(dialogue)
            dialogue.answered_by(end.reward, end.parts)
            dialogue.finish_reason = "length"
            return
        if is_new:
            if record is not None:  # else a crash could draw another turn after the environment has read this one
                began = time.perf_counter()
                await record.record(dialogue)
                dialogue.spent(waiting=time.perf_counter() - began)
        elif environments.durable:
            text = response_text(turn, self.tokenizer)
            if not await environments.is_repeatable(dialogue, text):
                reason = f"a crash lost the environment's answer to {text[-60:]!r}, which must not be asked for again"
                dialogue.error, dialogue.finish_reason = reason, "error"
                return
        scope = "" if record is None else record.scope
        observation = await environments.step(dialogue, response_text(turn, self.tokenizer), scope)
        content = observation.content
        assert content is None or isinstance(content, str | Chat), "it has been read"
        ids = [] if content is None else content_ids(content, turn[-1], self.tokenizer)
        reason = ""
        if content is None:
            reason = "stop"
        elif dialogue.answered + 1 == rules.max_turns:
            reason = "turns"
        elif len(dialogue.ids) + len(ids) >= limit_of(dialogue.request, sampling):
            reason = "length"
        reward, parts = observation.reward, [observation.parts]
        if reason in ("turns", "length") and environments.rewards_ends:
            end = await environments.ended(dialogue)
            reward, parts = reward + end.reward, [*parts, end.parts]
        dialogue.answered_by(reward, *parts)
        dialogue.tool_error = dialogue.tool_error or observation.error
        if reason:
            dialogue.finish_reason = reason
        else:
            dialogue.heard(ids, content.images if isinstance(content, Chat) else ())
        if environments.durable and not reason:
            dialogue.states.append(await environments.snapshot(dialogue))
        if record is not None:
            await record.record(dialogue)

    async def _policy_turn(
        self,
        running: _Running,
        dialogue: Dialogue,
        sampling: Sampling,
        *,
        answers: tuple[str, ...],
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        """Generates the rest of the policy's turn.

        Args:
            answers: the finish reasons of turns that something answers. The last chunk of another turn also ends the
                trajectory, so that no copy has one without the other.
        """

        began, in_engine = time.perf_counter(), 0.0

        async def generate(engine: RolloutEngine, request: Request) -> None:
            nonlocal in_engine
            interrupted_at, since = len(dialogue.ids), time.perf_counter()
            async with aclosing(engine.stream(request, sampling)) as chunks:
                async for chunk in chunks:
                    if dialogue.turn_starts[-1] < interrupted_at:
                        chunk = self._cut(dialogue, interrupted_at, chunk, sampling.stop)
                    if not all(map(math.isfinite, chunk.log_probs)):
                        raise NotFinite(
                            "the model gave log-probs that are not finite while generating: nothing is committed"
                        )
                    dialogue.wrote(chunk, self.version)
                    # after each chunk, because a journal may be written now
                    now = time.perf_counter()
                    dialogue.spent(model=now - since)
                    in_engine, since = in_engine + now - since, now
                    on_tokens()
                    if chunk.finish_reason is not None:
                        if chunk.finish_reason not in answers:
                            dialogue.finish_reason = chunk.finish_reason
                        return

        if dialogue.unanswered_turn is not None:
            return
        asked = dialogue.next_request(sampling)
        with spans.span(
            spans.CHAT, lambda: self._model, lambda: self._asked(asked, sampling), parent=running.span
        ) as chat:
            await self._continued(running, dialogue, sampling, generate)
            chat.set(lambda: self._answered(dialogue))
        dialogue.spent(waiting=max(0.0, time.perf_counter() - began - in_engine))

    async def _continued(
        self,
        running: _Running,
        dialogue: Dialogue,
        sampling: Sampling,
        generate: Callable[[RolloutEngine, Request], Coroutine[Any, Any, None]],
    ) -> None:
        """Sends requests to the engine until the policy's turn is complete."""
        # after an interruption, another request continues from the tokens so far
        while dialogue.unanswered_turn is None:
            if self.interruptible or not running.is_past_gate:
                await self._gate.wait()
                running.is_past_gate = True
            engine = self.engine
            turn = asyncio.create_task(generate(engine, dialogue.next_request(sampling)))
            running.turns.add(turn)
            try:
                await turn
            except asyncio.CancelledError:
                trajectory = asyncio.current_task()
                if trajectory is not None and trajectory.cancelling():  # not only its request, by `pause`
                    turn.cancel()
                    raise
            except EngineLost as error:
                if engine is self.engine and self._gate.is_set():  # only the first to notice reports it
                    self._gate.clear()
                    self._end(running.dialogue, error)
                running.is_past_gate = False  # it waits for an engine, so `pause` must not wait for it
            finally:
                running.turns.discard(turn)
                await self._tell_idle()

    def _cut(self, dialogue: Dialogue, interrupted_at: int, chunk: Chunk, stop: tuple[str, ...]) -> Chunk:
        """Ends a chunk at a stop text that begins before an interruption, where the engine cannot see it."""
        longest = max(map(len, stop), default=0)
        if not longest or len(dialogue.ids) - interrupted_at >= TOKENS_PER_CHARACTER * longest:
            return chunk
        first = max(dialogue.turn_starts[-1], interrupted_at - TOKENS_PER_CHARACTER * longest)
        written = dialogue.ids[first:]
        for count in range(1, len(chunk.response_ids) + 1):
            text = str(self.tokenizer.decode([*written, *chunk.response_ids[:count]]))
            if any(ending in text for ending in stop):
                return Chunk(chunk.response_ids[:count], chunk.log_probs[:count], "stop", chunk.routes)
        return chunk
