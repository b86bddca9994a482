"""Serves a policy to clients, and finds the conversation that each call continues."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.sessions import Asked, Policy, PolicyReply, Recorded, Refused, Session, SessionLimits
from ratchet.rlhf.config.sections import OnError
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.rollout.engine import Request

KEPT_TOKENS = 2**21
"""Tokens of the conversations that are remembered, about 300 MB.

A call that continues an older conversation is answered, too; its messages then start a new one.
"""
MOST_CALLS = 2**20
"""Maximum number of calls in a conversation; its token limit is reached long before."""


class Served:
    """The conversations of all clients that have the key. Used on the generation's event loop only."""

    on_error: OnError = "fail"

    def __init__(
        self, name: str, gateway: Gateway, key: str, *, context: int, listening: Callable[[str], None]
    ) -> None:
        """Serves nothing yet.

        Args:
            name: prefix of the names of conversations.
            listening: called with the base URL of the endpoint.
        """
        self._name, self._gateway, self._key, self._context = name, gateway, key, context
        self._listening = listening
        self._limits = SessionLimits(context=context, response=context, calls=MOST_CALLS)
        self._sessions: OrderedDict[Session, _Size] = OrderedDict()
        """The conversations; the last one called is at the end."""
        self._tokens = 0
        """Their number of tokens."""
        self._by_history: dict[str, Session] = {}
        """Conversations by the digest of their history's parts."""
        self._number = 0
        self.policy: Policy
        self.is_over = False

    async def run(self, dialogue: Dialogue, policy: Policy, recorded: Sequence[Recorded]) -> None:
        """Answers calls until it is cancelled; see `Callers.run`."""
        self.policy = policy
        base_url, _ = await self._gateway.open(self, self._key)
        self._listening(base_url)
        try:
            # never done: serves until this is cancelled
            await asyncio.get_running_loop().create_future()
        finally:
            self.is_over = True
            self._gateway.close(self._key)
            for session in list(self._sessions):
                await session.close()
            await self._gateway.stop()

    def refuse(self, message: str, *, code: str, param: str) -> Refused:
        """Returns the error for an unsupported call."""
        return Refused(message, code=code, param=param)

    def start(self, asked: Asked, on_text: Callable[[str], None] | None = None) -> asyncio.Task[PolicyReply]:
        """Starts to answer a call, in the conversation that it continues; see `Session.start`."""
        session = self._continued(asked)
        if session is None:
            self._number += 1
            name = f"{self._name}-{self._number:06d}"
            session = Session(Dialogue(Request(name, ())), self.policy, self._limits, recorded=())
            self._sessions[session] = _Size()
        self._sessions.move_to_end(session)
        task = session.start(asked, on_text)
        task.add_done_callback(lambda done: self._remember(session, asked, done))
        return task

    def _continued(self, asked: Asked) -> Session | None:
        """Returns the conversation that has most of a call's history, up to an answer; None if there is none."""
        digests = _digests(asked.conversation.setting, asked.conversation.parts)
        # the longest history first
        known = (self._by_history.get(digest) for digest in reversed(digests))
        return next((session for session in known if session is not None), None)

    def _remember(self, session: Session, asked: Asked, done: asyncio.Task[PolicyReply]) -> None:
        """Makes an answer available to later calls, and drops the oldest conversations if there are too many."""
        size = self._sessions[session]
        if not done.cancelled() and done.exception() is None:
            conversation = asked.conversation
            history = [*conversation.parts, conversation.answer_part(done.result().message)]
            digest = _digests(conversation.setting, history)[-1]
            self._by_history[digest] = session
            size.digests.append(digest)
        self._tokens -= size.tokens
        size.tokens = sum(
            len(branch.dialogue.request.prompt_ids) + len(branch.dialogue.ids) for branch in session.branches.values()
        )
        self._tokens += size.tokens
        # none of its calls was answered
        if not session.branches:
            self._forget(session)
        while self._tokens > KEPT_TOKENS:
            oldest = next((kept for kept in self._sessions if not kept.is_busy), None)
            if oldest is None:
                break
            self._forget(oldest)

    def _forget(self, session: Session) -> None:
        size = self._sessions.pop(session)
        self._tokens -= size.tokens
        for digest in size.digests:
            if self._by_history.get(digest) is session:
                del self._by_history[digest]


@dataclass
class _Size:
    """Memory use of a conversation."""

    tokens: int = 0
    digests: list[str] = field(default_factory=list)
    """Keys of `Served._by_history`."""


def _digests(setting: str, parts: Sequence[str]) -> list[str]:
    """Returns the digest of each prefix of a conversation."""
    sha256 = hashlib.sha256(setting.encode())
    digests = []
    for part in parts:
        # a digest of digests, so that the boundaries of parts count
        sha256.update(hashlib.sha256(part.encode()).digest())
        digests.append(sha256.copy().hexdigest())
    return digests
