"""Dialogues: trajectories that a policy writes, alone or in turns with an environment."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from ratchet.rlhf.data.chat_turns import (
    CONTENT,
    around_content,
    by_template,
    check_sees,
    in_parts,
    render_contents,
    text_ids,
    token_ids,
    with_image_tokens,
)
from ratchet.rlhf.data.formats import Chat, Message, Messages, Tools
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.environment import KEY
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Chunk, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Beginning(NamedTuple):
    """The start of a trajectory, as its environment receives it."""

    messages: Messages
    ground_truth: str | None
    ground_truth_is_json: bool
    extra_info: str
    """JSON."""
    tools: Tools = ()
    """The functions that the row offers."""


JOURNALED = (
    "ids",
    "log_probs",
    "mask",
    "versions",
    "turn_starts",
    "turn_ends",
    "turn_rewards",
    "turn_seconds",
    "parts",
    "finish_reason",
    "tool_error",
    "attempt",
    "states",
    "routes",
    "slots",
    "images",
    "turn_images",
)
"""The fields of a trajectory that a journal stores."""
ROUTE_BYTES = np.dtype(np.int16).itemsize
OF_TOKENS = ("ids", "log_probs", "mask", "versions")
"""Those with one entry per token."""
CONTINUED = ("turn_starts", "turn_ends", "turn_rewards", "turn_images")
"""Those with one entry per turn, which a trajectory that continues another one has of it."""
CALL_ID = "000000000"
"""Id of a tool call for chat templates that require one, such as Mistral's, with nine characters."""


class TurnSeconds(TypedDict):
    """What a turn took, in seconds. None: it was not measured, or nothing of the kind happened."""

    model: float | None
    """In the rollout engine."""
    tool: float | None
    """In the environment, or in the agent's program before its next call."""
    waiting: float | None
    """For new weights, for a free slot of `rollout.environment.concurrency`, and for the store."""


@dataclass(frozen=True)
class AgentCall:
    """A call of an agent, which the policy has answered."""

    asked: str
    """The messages that it added, as JSON: {messages} or {prompt}, and in the first call {tools}."""
    answer: str
    """The assistant's message, as JSON."""
    start: int
    """Position of the answer's first token in the response."""
    end: int
    """Position after the answer's last token."""
    started: float
    """Time of the call, in seconds since 1970."""
    seconds: float
    """Time until it was answered."""


@dataclass(frozen=True)
class Result:
    """The result of an agent's program."""

    reward: float | None
    """None: the reward comes from elsewhere."""
    parts: Mapping[str, float]
    """Named parts of the reward."""


@dataclass
class Dialogue:
    """A trajectory that is being written. The lists have one entry per token of the response, except those of turns.

    Example:
        >>> from ratchet.rlhf.environments.dialogues import Dialogue
        >>> from ratchet.rlhf.rollout.engine import Chunk, Request
        >>> dialogue = Dialogue(Request("p0-s0", prompt_ids=(1, 2)), turn_starts=[0])
        >>> dialogue.wrote(Chunk((5, 6), (-0.1, -0.2), "stop"), version=3)
        >>> dialogue.heard([7])
        >>> dialogue.ids, dialogue.mask, dialogue.turn_ends
        ([5, 6, 7], [1, 1, 0], [2])
    """

    request: Request
    """The prompt."""
    beginning: Beginning | None = None
    """None without an environment or an agent."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 if the policy wrote the token, else 0."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that drew the token."""
    turn_starts: list[int] = field(default_factory=list)
    """Position of the first token of each turn of the policy."""
    turn_ends: list[int] = field(default_factory=list)
    """Position after the last token of each complete turn of the policy."""
    turn_rewards: list[float] = field(default_factory=list)
    """The environment's reward for each turn that it has answered."""
    turn_seconds: list[TurnSeconds] = field(default_factory=list)
    """What each turn that the policy has started took. The items are replaced, never changed: copies share them."""
    parts: list[dict[str, str | float]] = field(default_factory=list)
    """The name and the value of each number that the environment's observations have."""
    finish_reason: str = ""
    """stop (ended by the policy or the environment), length (no room for another token), turns (the policy wrote
    `max_turns`), or error (the environment failed). Empty until the dialogue ends."""
    error: str | None = None
    """The error of the environment that ended the dialogue."""
    tool_error: str | None = None
    """The first error that did not end the dialogue, such as a tool's."""
    attempt: int = 0
    """Number of times that the trajectory restarted."""
    states: list[str] = field(default_factory=list)
    """The state of a durable environment after each turn that it has answered; empty for other environments."""
    routes: bytes = b""
    """The experts that the tokens went to, int16, token by token from the prompt's first on; empty if the engine does
    not record them. A token's are those of the pass that read it first: later turns read it again."""
    slots: int = 0
    """Number of experts for each token: those of all layers. 0: not known."""
    images: list[bytes] = field(default_factory=list)
    """The encoded images among the tokens of the environment, in order."""
    turn_images: list[int] = field(default_factory=list)
    """How many of them answered each turn of the policy; it may end with the last turn that has any."""
    stored: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Numbers of tokens, states, bytes of routes and images in the rows that `new_row` has returned."""
    prefix: Mapping[str, Any] | None = None
    """The values of `JOURNALED` fields with which the trajectory begins; None: it begins after its prompt."""
    calls: list[AgentCall] = field(default_factory=list)
    """The calls of an agent, one per turn."""
    branches: list[Dialogue] = field(default_factory=list)
    """The conversations of an agent's trajectory, which itself has no tokens."""
    result: Result | None = None
    """The result of the agent's program."""
    replayed_from: str | None = None
    """The trajectory that this one repeats, or the file and row of an expert's answer; None if it is generated."""
    by_expert: bool = False
    """True if an expert wrote it."""

    @property
    def conversations(self) -> Sequence[Dialogue]:
        """The trained conversations: the branches of an agent's trajectory, or the trajectory itself."""
        return self.branches or (self,)

    @property
    def answered(self) -> int:
        """Number of turns that the environment has answered."""
        return len(self.turn_rewards)

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards."""
        return sum(self.turn_rewards, 0.0)

    @property
    def sums_of_parts(self) -> dict[str, float]:
        """Sums of the environment's named numbers."""
        sums: dict[str, float] = defaultdict(float)
        for part in self.parts:
            sums[str(part["name"])] += float(part["value"])
        return dict(sums)

    @property
    def answered_turns(self) -> list[list[int]]:
        """The tokens of each turn of the policy that the environment has answered."""
        pairs = zip(self.turn_starts, self.turn_ends[: self.answered], strict=False)
        return [self.ids[start:end] for start, end in pairs]

    @property
    def unanswered_turn(self) -> list[int] | None:
        """The tokens of the policy's last turn, if it is complete and the environment has not answered it."""
        if self.answered == len(self.turn_ends):
            return None
        return self.ids[self.turn_starts[-1] : self.turn_ends[-1]]

    @classmethod
    def continuing(cls, request: Request, beginning: Beginning, prefix: Mapping[str, Any]) -> Dialogue:
        """Returns a trajectory that continues another one.

        Args:
            prefix: values of `JOURNALED` fields: the other trajectory after an answer of its environment.
        """
        dialogue = cls(request, beginning, prefix=prefix)
        dialogue._begin_again()
        return dialogue

    def copy(self) -> Dialogue:
        """Returns a copy that does not change with this trajectory."""
        return replace(self, **{name: copy(getattr(self, name)) for name in JOURNALED})

    def restore(self, row: Mapping[str, Any]) -> None:
        """Continues from a row of a journal."""
        for name in JOURNALED:
            if name in row:  # a journal of an older version lacks the newest
                setattr(self, name, copy(row[name]))
        self._pad_seconds()
        self.stored = self._sizes

    def take_back(self, before: Dialogue) -> None:
        """Drops the tokens written since a copy was made."""
        for name in JOURNALED:
            setattr(self, name, getattr(before, name))

    def journaled(self) -> dict[str, Any]:
        """Returns the row of a journal."""
        return {"trajectory_id": self.request.trajectory_id, **{name: getattr(self, name) for name in JOURNALED}}

    def new_row(self) -> dict[str, Any]:
        """Returns a row of a journal with the tokens, states, routes and images since the last call, which follow the
        tokens with the digest `before`."""
        (start, states, routes, images), self.stored = self.stored, self._sizes
        row = {name: copy(value) for name, value in self.journaled().items()}
        new = {name: row[name][start:] for name in OF_TOKENS}
        new |= {"states": row["states"][states:], "routes": row["routes"][routes:], "images": row["images"][images:]}
        return row | new | {"before": _digest(self.ids[:start])}

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return len(self.ids), len(self.states), len(self.routes), len(self.images)

    def next_request(self, sampling: Sampling) -> Request:
        """Returns the request for the tokens that follow, starting a turn if none is open."""
        if len(self.turn_starts) == len(self.turn_ends):
            self.turn_starts.append(len(self.ids))
            self._pad_seconds()
        limit = sampling.max_tokens if self.request.max_tokens is None else self.request.max_tokens
        return replace(
            self.request,
            prompt_ids=(*self.request.prompt_ids, *self.ids),
            mask=tuple(self.mask),
            images=(*self.request.images, *self.images),
            max_tokens=min(limit, sampling.max_tokens) - len(self.ids),
        )

    def wrote(self, chunk: Chunk, version: int) -> None:
        """Appends tokens of the policy."""
        self.ids += chunk.response_ids
        self.log_probs += chunk.log_probs
        self.mask += [1] * len(chunk.response_ids)
        self.versions += [version] * len(chunk.response_ids)
        if chunk.finish_reason is not None:
            self.turn_ends.append(len(self.ids))
        if chunk.routes is not None:
            self.slots = chunk.routes.shape[1]
            self.routes += chunk.routes[len(self.routes) // (ROUTE_BYTES * self.slots) :].tobytes()

    @property
    def routed_experts(self) -> np.ndarray:
        """The experts of each token that the policy has read, flat, with -1 where they are not known; empty if none
        is."""
        read = len(self.request.prompt_ids) + max(len(self.ids) - 1, 0)
        known = np.frombuffer(self.routes, dtype=np.int16)[: read * self.slots]
        return np.pad(known, (0, read * self.slots - len(known)), constant_values=-1)

    def spent(self, *, model: float = 0.0, tool: float = 0.0, waiting: float = 0.0) -> None:
        """Adds seconds to those of the newest turn, if there is one."""
        if self.turn_seconds:
            last = self.turn_seconds[-1]
            self.turn_seconds[-1] = {
                "model": _sum(last["model"], model),
                "tool": _sum(last["tool"], tool),
                "waiting": _sum(last["waiting"], waiting),
            }

    def _pad_seconds(self) -> None:
        """Adds what was not measured: the seconds of a new turn, or those of a journal of an older version."""
        missing = len(self.turn_starts) - len(self.turn_seconds)
        self.turn_seconds += [{"model": None, "tool": None, "waiting": None} for _ in range(missing)]

    def restart(self) -> None:
        """Drops all tokens but those of the prefix."""
        attempt = self.attempt + 1
        self._begin_again()
        self.attempt = attempt

    def _begin_again(self) -> None:
        self.take_back(Dialogue(self.request))
        for name, value in (self.prefix or {}).items():
            setattr(self, name, copy(value))
        # the files of turns begin with the prefix, too
        self.stored, self.branches = (0, 0, 0, 0), []
        self._pad_seconds()

    def answered_by(self, reward: float, *parts: Mapping[str, float]) -> None:
        """Adds the environment's reward for the policy's last turn, and the named numbers of its observations."""
        self.turn_rewards.append(float(reward))
        self.parts += [{"name": name, "value": float(value)} for part in parts for name, value in part.items()]

    def heard(self, ids: Sequence[int], images: Sequence[bytes] = ()) -> None:
        """Appends tokens of the environment, and the images among them."""
        self.ids += ids
        self.log_probs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        # the environment's tokens count as of the turn that they answer
        self.versions += [self.versions[-1]] * len(ids)
        if images:
            self.images += images
            self.turn_images += [0] * (len(self.turn_ends) - len(self.turn_images))
            self.turn_images[-1] += len(images)

    @property
    def _turns(self) -> list[tuple[str, list[int]]]:
        """Role and tokens of each turn: `policy` and `environment` alternate, so an observation may have no tokens."""
        turns: list[tuple[str, list[int]]] = []
        heard_from = 0
        for start, end in zip(self.turn_starts, [*self.turn_ends, len(self.ids)], strict=False):
            if turns:
                turns.append(("environment", self.ids[heard_from:start]))
            turns.append(("policy", self.ids[start:end]))
            heard_from = end
        unanswered = self.ids[heard_from:]
        return [*turns, ("environment", unanswered)] if unanswered else turns

    @property
    def num_turns(self) -> int:
        """Number of turns, the first of which is the prompt."""
        return 1 + len(self._turns)

    def turns(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
        """Returns the turns as messages with the roles `policy` and `environment`, which alternate."""
        return [{"role": role, "content": response_text(tokens, tokenizer)} for role, tokens in self._turns]


def joined(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the rows of `Dialogue.new_row` of one trajectory, in any order.

    Returns:
        The row of the last attempt that goes furthest. Rows that do not follow others are left out, such as those after
        a missing one.
    """
    empty: dict[str, Any] = {name: [] for name in (*OF_TOKENS, "states", "images")} | {"routes": b""}
    furthest: dict[str, Any] = {}
    wholes: dict[tuple[int, str], dict[str, Any]] = {}
    for row in sorted(rows, key=_progress):
        before = empty if row["before"] == _digest([]) else wholes.get((row["attempt"], row["before"]))
        if before is not None:
            whole = {name: [*before[name], *row[name]] for name in OF_TOKENS}
            # answers without tokens leave the digest as it is, so two rows may tell of the same state
            earlier = before["states"][: len(row["turn_rewards"]) - len(row["states"])]
            whole["states"] = [*earlier, *row["states"]]
            whole["routes"] = before["routes"] + (row.get("routes") or b"")
            whole["images"] = [*before["images"], *row.get("images", ())]
            wholes[row["attempt"], _digest(whole["ids"])] = whole
            furthest = {**row, **whole}
    return furthest


def _sum(seconds: float | None, more: float) -> float | None:
    return seconds if not more else (seconds or 0.0) + more


def _progress(row: Mapping[str, Any]) -> tuple[int, int, int, bool]:
    return row["attempt"], len(row["turn_ends"]), len(row["turn_rewards"]), bool(row["finish_reason"])


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(array("i", ids).tobytes()).hexdigest()[:16]


def content_ids(content: str | Chat, last: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes an observation that follows a turn of the policy, which ends with the token `last`.

    Args:
        content: text, which is tokenized unchanged, or messages, which the chat template renders after a message of the
            assistant, with the start of the assistant's next message.

    Raises:
        UserError: there are images, and the model sees none.
    """
    if isinstance(content, str):
        return text_ids(content, tokenizer)
    check_sees(content, tokenizer, KEY)
    if not tokenizer.chat_template:
        return text_ids("\n" + "\n".join(message["content"] for message in content.messages) + "\n", tokenizer)
    end = str(tokenizer.decode([last]))
    messages = in_parts(content.messages, tokenizer)
    rendered = render_contents(lambda messages: _after_turn(messages, end, tokenizer), messages, tokenizer)
    return with_image_tokens(token_ids(rendered, tokenizer), content, tokenizer, KEY)


def is_prefix_stable(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns True if the chat template renders earlier messages in the same way when others follow.

    Otherwise (Qwen3's drops earlier reasoning), the tokens of a trajectory differ from those that the template would
    write for the whole conversation.
    """
    if not tokenizer.chat_template:
        return True
    messages: Messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nso"},
    ]
    more: Message = {"role": "user", "content": "more"}
    return by_template([*messages, more], tokenizer).startswith(by_template(messages, tokenizer))


def _after_turn(messages: Messages, last: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what the chat template writes after a message of the assistant when `messages` follow.

    Some templates render the assistant's message differently when it is not the last one (Qwen3's drops its reasoning).
    The policy's tokens stay as it wrote them, so only what follows the message matters.

    Args:
        last: last token of the policy's turn, which may be the one that ends its message.
    """
    from jinja2 import TemplateError

    question: Message = {"role": "user", "content": "?"}
    answers: list[Message] = [{"role": "assistant", "content": CONTENT}]
    if messages[0]["role"] == "tool":  # some templates allow it only after a call
        call = {"type": "function", "id": CALL_ID, "function": {"name": "f", "arguments": {"a": CONTENT}}}
        answers.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages = [{**message, "tool_call_id": CALL_ID} for message in messages]

    for number, answer in enumerate(answers, 1):
        try:
            _, *rest = around_content([question, answer, *messages], tokenizer, is_prompt=True)
        except TemplateError as error:
            if number == len(answers):
                roles = ", ".join(message["role"] for message in messages)
                raise UserError(f"the chat template refuses the messages of {KEY} (roles: {roles}): {error}") from None
        else:
            break
    if len(rest) != 1:
        does = "repeats" if rest else "leaves out"
        raise UserError(f"the chat template {does} the assistant's messages: use another chat template")
    if "tool_calls" in answer:  # the turn ends before the messages, which may contain its last token, too
        first: Message = {**messages[0], "content": CONTENT}
        call_end = around_content([question, answer, first], tokenizer, is_prompt=True)[1]
        if last in call_end:
            return rest[0].partition(last)[2]
    return rest[0].removeprefix(last)
