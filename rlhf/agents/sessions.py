"""Continues the tokens of one trajectory, call by call, and records the policy's replies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ratchet.rlhf import spans
from ratchet.rlhf.agents.conversations import Branch, CannotRender, Continuation, Conversation
from ratchet.rlhf.data.chat_turns import state_of
from ratchet.rlhf.data.prompts import BYTES_A_TOKEN
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import AgentCall, Dialogue
from ratchet.rlhf.environments.tools import MalformedCall, ToolCall, tool_calls
from ratchet.rlhf.rollout.engine import Chunk, Sampling
from ratchet.rlhf.schema import branch_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Possible beginnings of a tool call; the text before it is the message's content."""
CALL_END = "</tool_call>"
"""The end of a tool call, in the only format that has one."""


@dataclass(frozen=True)
class Recorded:
    """A stored answer, which the program has, or is about to receive."""

    trajectory_id: str
    branch: str
    """Name of the conversation: the trajectory's id, or one that ends with the number of a branch."""
    call_id: str
    """The id of the completion, which the program receives."""
    digest: str
    """sha256 of the question."""
    heard_ids: list[int]
    """Tokens that the call added to the conversation, before the answer."""
    ids: list[int]
    """Tokens of the answer."""
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    """stop, or length."""
    asked: str
    """The messages that the call added to its branch, as JSON; see `AgentCall.asked`."""
    answer: str
    """The message of the assistant, as JSON."""
    started: float
    """Time of the call, in seconds since 1970."""
    seconds: float
    """Time until it was answered."""
    routes: bytes = b""
    """The conversation's `Dialogue.routes` that no earlier answer has."""
    slots: int = 0
    """See `Dialogue.slots`."""


class Recorder(Protocol):
    """Stores answers."""

    @property
    def scope(self) -> str:
        """The run and the stage, as no other run names its own; empty for callers outside of a run."""

    async def record(self, answer: Recorded) -> None:
        """Stores an answer durably: when this returns, a crash does not lose it."""


class Refused(Exception):
    """The endpoint refuses a call."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True)
class SessionLimits:
    """Limits on the calls of a trajectory."""

    context: int
    """Maximum number of tokens of a conversation, with the answers."""
    response: int
    """Maximum number of tokens of a branch after its prompt."""
    calls: int
    """Maximum number of calls."""


@dataclass(frozen=True)
class Asked:
    """One call."""

    conversation: Conversation
    call_id: str
    """The id of the completion."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    """Names of the tools that the answer may call; empty: the answer is text."""
    one_call: bool = False
    """End the answer after its first call of a tool."""

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        return (*self.stop, CALL_END) if self.one_call and self.tools else self.stop


@dataclass(frozen=True)
class PolicyReply:
    """The policy's answer to a call."""

    text: str
    """Without the stop text and special tokens."""
    calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop, or length."""
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-prob of each token, in nats."""
    prompt_tokens: int
    digest: str
    message: Mapping[str, Any]
    """The assistant's message."""
    stop: str | None = None
    """The stop text of the call that ended the answer."""


Generate = Callable[[Dialogue, Sampling, Callable[[], None]], Awaitable[None]]
"""Generates the next turn of a dialogue; the last argument is called whenever there are new tokens."""


@dataclass(frozen=True)
class Policy:
    """The policy behind the endpoint."""

    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    generate: Generate
    recorder: Recorder | None
    """Stores answers before the caller receives them; None: they are not stored."""
    span: spans.Span = spans.NOTHING
    """The span of the trajectory."""


@dataclass(eq=False)
class Session:
    """One trajectory's conversations with the policy. Used on the generation's event loop only."""

    dialogue: Dialogue
    """The trajectory; it has branches once the program has returned."""
    policy: Policy
    limits: SessionLimits
    recorded: Iterable[Recorded]
    """Answers of an earlier process, which the same questions get again."""
    on_idle: Callable[[bool], None] = lambda idle: None
    """Called with True when no call is in progress any more, and with False when one starts."""
    error: str | None = None
    """Why the trajectory is not trained on: the first call that does not fit the run."""
    limit: str | None = None
    """The limit that a call reached: length or turns."""
    is_over: bool = False
    fatal: asyncio.Future[None] | None = None
    """Fails with an error that ends the whole generation, not only this trajectory."""

    def __post_init__(self) -> None:
        self.branches: dict[int, Branch] = {}
        self._calls = 0
        self._tools: dict[str, tuple[Mapping[str, str], float]] = {}
        """The calls of tools whose results the program has not brought yet, by id, if there are spans: the function,
        and when the program got the call."""
        self._answered: Dialogue | None = None
        """The conversation that got the last answer."""
        self._idle_since: float | None = None
        """When the last call ended, if none is in progress."""
        self._tasks: set[asyncio.Task[PolicyReply]] = set()
        self._known: dict[str, deque[Recorded]] = defaultdict(deque)
        for answer in self.recorded:
            self._known[answer.digest].append(answer)

    @property
    def is_busy(self) -> bool:
        """True if a call is in progress."""
        return bool(self._tasks)

    @property
    def has_calls_left(self) -> bool:
        """True if another call may be answered."""
        return self._calls < self.limits.calls

    def refuse(self, message: str, **details: Any) -> Refused:
        """Returns the error for a call that does not fit the run, and marks the trajectory with it."""
        self.error = self.error or message
        return Refused(message, **details)

    def start(self, asked: Asked, on_text: Callable[[str], None] | None = None) -> asyncio.Task[PolicyReply]:
        """Starts to answer a call; `on_text` receives the answer's text as it grows.

        Cancelling the task drops the call. It raises `Refused` if the call does not fit the run.
        """
        task = asyncio.create_task(self._answer(asked, on_text))
        self._tasks.add(task)
        self._end_of_idle()
        self.on_idle(False)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[PolicyReply]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle_since = time.perf_counter()
            self.on_idle(True)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Refused) and self.fatal is not None and not self.fatal.done():
            self.fatal.set_exception(error)

    def _end_of_idle(self) -> None:
        """Adds the program's own time since the last call to the seconds of the turn that was answered last."""
        if self._idle_since is not None and self._answered is not None:
            self._answered.spent(tool=time.perf_counter() - self._idle_since)
        self._idle_since = None

    async def close(self) -> None:
        """Refuses further calls, and cancels those in progress."""
        self.is_over = True
        self._end_of_idle()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, asked: Asked, on_text: Callable[[str], None] | None) -> PolicyReply:
        if self.is_over:
            raise Refused("the trajectory has ended: its program has returned", code="trajectory_ended")
        if not self.has_calls_left:
            self.limit = self.limit or "turns"
            raise Refused(
                f"the trajectory has made rollout.agent.max_calls {self.limits.calls} calls", code="max_calls"
            )
        self._calls += 1
        self._check_size(asked.conversation)
        try:
            branch, continuation = self._branch(asked.conversation)
        except CannotRender as error:
            raise self.refuse(str(error)) from None
        dialogue = branch.dialogue
        # a call that fails leaves its branch as it was
        before = dialogue.copy()
        branch.is_busy = True
        started, began = time.time(), time.perf_counter()
        try:
            heard_ids = list(dialogue.request.prompt_ids if continuation is None else continuation.ids)
            if continuation is not None:
                dialogue.heard(continuation.ids, continuation.images)
            start, routed = len(dialogue.ids), len(dialogue.routes)
            prompt_tokens = len(dialogue.request.prompt_ids) + start
            self._limit(dialogue, asked)
            digest = self._digest(asked)
            known = self._known.get(digest)
            # a question that was asked several times gets its answers in their order
            earlier = known.popleft() if known else None
            if earlier is not None:
                dialogue.next_request(self.policy.sampling)  # starts the turn
                _append(dialogue, earlier)
            else:
                sampling = replace(self.policy.sampling, stop=(*self.policy.sampling.stop, *asked.ends))
                growing = _GrowingText(partial(self._text, stop=sampling.stop), dialogue, on_text, sampling.stop)
                await self.policy.generate(dialogue, sampling, growing.tell)
            reason = dialogue.finish_reason or "stop"
            # the branch may continue
            dialogue.finish_reason = ""
            # marks the turn as answered; the program's reward is for the whole trajectory
            dialogue.turn_rewards.append(0.0)
            answer = self._read(dialogue, start, asked, reason, prompt_tokens, digest)
            news = asked.conversation.whole if continuation is None else continuation.news
            recorded = Recorded(
                trajectory_id=self.dialogue.request.trajectory_id,
                branch=dialogue.request.trajectory_id,
                call_id=asked.call_id,
                digest=digest,
                heard_ids=heard_ids,
                ids=list(answer.ids),
                log_probs=list(answer.log_probs),
                versions=dialogue.versions[start:],
                finish_reason=reason,
                asked=json.dumps(news, ensure_ascii=False),
                answer=json.dumps(answer.message, ensure_ascii=False),
                # an answer of an earlier process keeps its times
                started=started if earlier is None else earlier.started,
                seconds=time.perf_counter() - began if earlier is None else earlier.seconds,
                routes=dialogue.routes[routed:],
                slots=dialogue.slots,
            )
            # stored before the program receives it: a resumed run must give the same answer
            if self.policy.recorder is not None and earlier is None:
                asking = time.perf_counter()
                await self.policy.recorder.record(recorded)
                dialogue.spent(waiting=time.perf_counter() - asking)
        except BaseException:
            dialogue.take_back(before)
            branch.is_busy = False
            if not branch.after:
                # frees the number of a branch whose first call failed
                del self.branches[branch.number]
            raise
        branch.is_busy = False
        if spans.is_on():
            self._tell_tools(news, answer.message, started)
        history = asked.conversation.parts if continuation is None else continuation.history
        branch.history = [*history, asked.conversation.answer_part(answer.message)]
        branch.after.append(len(branch.history))
        self._answered = dialogue
        dialogue.calls.append(
            AgentCall(
                asked=recorded.asked,
                answer=recorded.answer,
                start=start,
                end=len(dialogue.ids),
                started=recorded.started,
                seconds=recorded.seconds,
            )
        )
        return answer

    def _tell_tools(self, news: Mapping[str, Any], answer: Mapping[str, Any], started: float) -> None:
        """Adds the spans of the tools whose results a call brought: from the answer that asked for them to the call."""
        for message in news.get("messages", ()):
            made = self._tools.pop(message.get("tool_call_id"), None)
            if made is not None:
                function, since = made
                details = {"gen_ai.tool.call.id": message["tool_call_id"]}
                if spans.has_content():
                    details["gen_ai.tool.call.arguments"] = function["arguments"]
                    details["gen_ai.tool.call.result"] = str(message.get("content"))
                spans.add_tool(function["name"], details, since, started, self.policy.span)
        now = time.time()
        self._tools |= {call["id"]: (call["function"], now) for call in answer.get("tool_calls", ())}

    def _check_size(self, conversation: Conversation) -> None:
        """Refuses a far too long conversation before it is tokenized, which keeps the engine waiting."""
        size = sum(map(len, conversation.parts))
        if size > BYTES_A_TOKEN * self.limits.context:
            raise self._too_long(f"the conversation has {size:,} characters")

    def _too_long(self, size: str) -> Refused:
        self.limit = "length"
        return Refused(
            f"{size}, and there is no room for an answer: the maximum context length is {self.limits.context} tokens "
            "(data.max_prompt_tokens plus rollout.max_response_tokens), of which what follows the first messages has "
            f"at most {self.limits.response}",
            code="context_length_exceeded",
            param="messages",
        )

    def _branch(self, conversation: Conversation) -> tuple[Branch, Continuation | None]:
        """Returns the branch that a conversation continues, or a new one, possibly with the first tokens of another."""
        best: tuple[Branch, Continuation] | None = None
        for branch in self.branches.values():
            continuation = conversation.continues(branch, self.policy.tokenizer)
            if continuation is not None and (best is None or _fit(branch, continuation) > _fit(*best)):
                best = branch, continuation
        if best is not None and _extends(*best):
            return best
        number = next(n for n in range(len(self.branches) + 1) if n not in self.branches)
        if best is None:
            ids, images = conversation.ids(self.policy.tokenizer), conversation.images
        else:  # the answers that both have are trained on in the other branch
            dialogue, continuation = best[0].dialogue, best[1]
            end, heard = (
                dialogue.turn_ends[continuation.answers - 1],
                sum(dialogue.turn_images[: continuation.answers - 1]),
            )
            said = dialogue.ids[:end]
            if (processor := state_of(self.policy.tokenizer).images) is not None:  # a prompt has no drawn placeholders
                said = processor.readable(np.array(said), np.array(dialogue.mask[:end], dtype=bool)).tolist()
            ids = [*dialogue.request.prompt_ids, *said, *continuation.ids]
            images = (*dialogue.request.images, *dialogue.images[:heard], *continuation.images)
        name = branch_id(self.dialogue.request.trajectory_id, number)
        request = replace(self.dialogue.request, trajectory_id=name, prompt_ids=tuple(ids), images=images)
        branch = Branch(number, Dialogue(request), conversation.setting)
        self.branches[number] = branch
        return branch, None

    def _limit(self, dialogue: Dialogue, asked: Asked) -> None:
        """Sets the answer's token limit."""
        used = len(dialogue.ids)
        room = min(self.limits.context - len(dialogue.request.prompt_ids), self.limits.response) - used
        if room < 1:
            raise self._too_long(f"the conversation has {len(dialogue.request.prompt_ids) + used} tokens")
        room = room if asked.max_tokens is None else min(room, asked.max_tokens)
        dialogue.request = replace(dialogue.request, max_tokens=used + room)

    def _digest(self, asked: Asked) -> str:
        whole = [asked.conversation.setting, asked.conversation.parts, asked.max_tokens, asked.ends, asked.tools]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()

    def _text(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        text = response_text(ids, self.policy.tokenizer)
        ends = [at for ending in stop if (at := text.rfind(ending)) >= 0]
        return text[: min(ends)] if ends else text

    def _read(
        self, dialogue: Dialogue, start: int, asked: Asked, reason: str, prompt_tokens: int, digest: str
    ) -> PolicyReply:
        """Reads the answer that begins at `start`: its text, and its tool calls."""
        ids = dialogue.ids[start:]
        raw = response_text(ids, self.policy.tokenizer)
        text = self._text(ids, (*self.policy.sampling.stop, *asked.ends))
        calls: list[ToolCall] = []
        if asked.tools:
            try:
                calls = tool_calls(raw, asked.tools)[: 1 if asked.one_call else None]
            except MalformedCall:  # the program gets the policy's text as it is
                calls = []
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            begins = [at for mark in CALL_MARKS if (at := text.find(mark)) >= 0]
            content = text[: min(begins)].strip() if begins else ""
            message = {
                "role": "assistant",
                "content": content or None,
                "tool_calls": [
                    {
                        "id": _call_id(digest, len(dialogue.turn_ends), number),
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                    }
                    for number, call in enumerate(calls)
                ],
            }
            text = content
        return PolicyReply(
            text=text,
            calls=tuple(calls),
            finish_reason=reason,
            ids=tuple(ids),
            log_probs=tuple(dialogue.log_probs[start:]),
            prompt_tokens=prompt_tokens,
            digest=digest,
            message=message,
            # a stop text ends the answer, so it is the last thing that the policy wrote
            stop=next((ending for ending in asked.stop if ending in raw[len(text) :]), None) if not calls else None,
        )


class _GrowingText:
    """Reports the text of an answer while it is written, but no beginning of a stop text or half a character."""

    def __init__(
        self,
        text_of: Callable[[Sequence[int]], str],
        dialogue: Dialogue,
        on_text: Callable[[str], None] | None,
        stop: Sequence[str],
    ) -> None:
        self._text_of, self._dialogue, self._on_text = text_of, dialogue, on_text
        self._held = max(map(len, stop), default=0)
        self._start, self._told = len(dialogue.ids), 0

    def tell(self) -> None:
        if self._on_text is None:
            return
        text = self._text_of(self._dialogue.ids[self._start :])
        sure = len(text) - self._held
        if sure > self._told and not text.endswith("\ufffd"):
            self._on_text(text[self._told : sure])
            self._told = sure


def _fit(branch: Branch, continuation: Continuation) -> tuple[int, bool]:
    """Ranks branches by how much of a conversation they contain; on a tie, a branch that it extends wins."""
    return branch.after[continuation.answers - 1], _extends(branch, continuation)


def _extends(branch: Branch, continuation: Continuation) -> bool:
    """Returns True if the conversation continues the branch at its end."""
    return not branch.is_busy and continuation.answers == len(branch.after)


def _call_id(digest: str, turn: int, number: int) -> str:
    """Returns the id of a tool call, equal for equal answers."""
    # Mistral's template requires nine characters
    return hashlib.sha256(f"{digest} {turn} {number}".encode()).hexdigest()[:9]


def _append(dialogue: Dialogue, answer: Recorded) -> None:
    for token, log_prob, version in zip(answer.ids, answer.log_probs, answer.versions, strict=True):
        dialogue.wrote(Chunk((token,), (log_prob,)), version)
    dialogue.turn_ends.append(len(dialogue.ids))
    dialogue.routes, dialogue.slots = dialogue.routes + answer.routes, answer.slots
    dialogue.finish_reason = "length" if answer.finish_reason == "length" else ""
