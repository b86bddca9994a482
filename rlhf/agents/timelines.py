"""Describes what happened in a trajectory, turn by turn, for people: from the columns of its rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.rlhf.agents.transcripts import Said, arguments_text, content_text
from ratchet.rlhf.data.placeholders import without_patches
from ratchet.rlhf.environments.tools import MalformedCall, tool_calls
from ratchet.rlhf.schema import IMAGES, trajectory_of

COLUMNS = (
    "turns",
    "turn_ends",
    "turn_rewards",
    "turn_seconds",
    "response_mask",
    "calls",
    "rollout_error",
    "tool_error",
    IMAGES,
)
"""The columns that a timeline is made of, in addition to `trajectory_id`; those that a run lacks may be missing."""


@dataclass(frozen=True)
class CalledTool:
    """A call of a tool that the policy wrote."""

    name: str
    arguments: str
    """JSON, as the policy wrote it."""
    answer: str | None
    """What the policy read in answer; None: it is not known, or it is in `Turn.answer`."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy, with what it read before and what answered it."""

    heard: tuple[Said, ...]
    """What an agent's program added before the turn, without the answers of tools."""
    text: str
    """What the policy wrote, without the calls of tools if an agent's program parsed them."""
    calls: tuple[CalledTool, ...]
    answer: str | None
    """What the environment answered; None: nothing, or there is no environment."""
    tokens: int | None
    """Number of tokens that the policy wrote."""
    reward: float | None
    """The environment's reward for the turn."""
    start_s: float | None
    """Seconds from the first call of the trajectory, or from the conversation's first turn."""
    answered_s: float | None
    """Seconds in which an agent's call was answered."""
    model_s: float | None
    tool_s: float | None
    waiting_s: float | None
    """Seconds of each kind; None: not measured. The column `turn_seconds` describes them."""

    @property
    def seconds(self) -> float:
        """What is known of the turn's length, in seconds."""
        in_call = (self.model_s or 0.0) + (self.waiting_s or 0.0)
        return max(in_call, self.answered_s or 0.0) + (self.tool_s or 0.0)


@dataclass(frozen=True)
class Conversation:
    """A row of a trajectory: all of it, or one of the conversations of an agent."""

    id: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Timeline:
    """All conversations of a trajectory."""

    id: str
    conversations: tuple[Conversation, ...]
    errors: tuple[str, ...]
    """The error that ended the trajectory, and the first error of a tool."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first turn to the end of the last one, as far as they are known."""
        ends = [(turn.start_s or 0.0) + turn.seconds for part in self.conversations for turn in part.turns]
        return max(ends, default=0.0)


def timeline(rows: Sequence[Mapping[Any, Any]]) -> Timeline:
    """Describes a trajectory.

    Args:
        rows: All rows of the trajectory: one, or one for each conversation of an agent.

    Returns:
        The conversations in the order of the rows' ids. One has no turns if its run has neither an environment nor an
        agent.
    """
    ordered = sorted(rows, key=lambda row: str(row["trajectory_id"]))
    calls = (call for row in ordered for call in _list(row.get("calls")))
    starts = [start for call in calls if (start := _number(call["started"])) is not None]
    first = min(starts, default=0.0)
    conversations = tuple(Conversation(row["trajectory_id"], tuple(_turns(row, first))) for row in ordered)
    texts = [_text(row.get(name)) for name in ("rollout_error", "tool_error") for row in ordered]
    return Timeline(
        trajectory_of(ordered[0]["trajectory_id"]), conversations, tuple(dict.fromkeys(filter(None, texts)))
    )


def _turns(row: Mapping[Any, Any], first: float) -> Iterator[Turn]:
    """Yields the turns of a row; `first` is the time of the trajectory's first call, in seconds since 1970."""
    seconds, rewards = _list(row.get("turn_seconds")), _list(row.get("turn_rewards"))
    turns = _of_agent(_list(row["calls"]), first) if len(_list(row.get("calls"))) else _of_environment(row)
    passed = 0.0
    for number, turn in enumerate(turns):
        took = seconds[number] if number < len(seconds) else {}
        turn = replace(
            turn,
            reward=float(rewards[number]) if number < len(rewards) else None,
            model_s=_number(took.get("model")),
            tool_s=_number(took.get("tool")),
            waiting_s=_number(took.get("waiting")),
        )
        if turn.answered_s is None and len(seconds):
            turn = replace(turn, start_s=passed)
        passed += turn.seconds
        yield turn


def _of_agent(calls: Sequence[Mapping[str, Any]], first: float) -> Iterator[Turn]:
    asked = [json.loads(call["asked"]) for call in calls]
    results: dict[str, str] = {}
    for added in asked:
        results |= {
            message["tool_call_id"]: content_text(message)
            for message in added.get("messages", ())
            if message["role"] == "tool" and message.get("tool_call_id")
        }
    written = {
        call["id"] for one in calls for call in json.loads(one["answer"]).get("tool_calls") or () if call.get("id")
    }
    for call, added in zip(calls, asked, strict=True):
        heard: list[Said] = []
        if "tools" in added:
            heard.append(Said("tools", ", ".join(tool["function"]["name"] for tool in added["tools"])))
        if "prompt" in added:
            heard.append(Said("prompt", str(added["prompt"])))
        heard += [
            Said(message["role"], content_text(message))
            for message in added.get("messages", ())
            if message.get("tool_call_id") not in written
        ]
        answer = json.loads(call["answer"])
        yield Turn(
            heard=tuple(heard),
            text=_text(answer.get("content")),
            calls=tuple(
                CalledTool(
                    made["function"]["name"],
                    arguments_text(made["function"]["arguments"]),
                    results.get(made.get("id") or ""),
                )
                for made in answer.get("tool_calls") or ()
            ),
            answer=None,
            tokens=int(call["end"] - call["start"]) or None,
            reward=None,
            start_s=None if (started := _number(call["started"])) is None else started - first,
            answered_s=_number(call["seconds"]),
            model_s=None,
            tool_s=None,
            waiting_s=None,
        )


def _of_environment(row: Mapping[Any, Any]) -> Iterator[Turn]:
    said = _list(row.get("turns"))
    mask, ends = _list(row.get("response_mask")), _list(row.get("turn_ends"))
    before, sees = 0, len(_list(row.get(IMAGES))) > 0
    for number, turn in enumerate(said):
        if turn["role"] != "policy":
            continue
        answer = said[number + 1]["content"] if number + 1 < len(said) else None
        if answer is not None and sees:
            answer = without_patches(answer)
        place = number // 2
        tokens = None
        if place < len(ends):
            tokens = int(sum(mask[before : ends[place]]))
            before = int(ends[place])
        calls = tuple(_written_calls(turn["content"]))
        if len(calls) == 1:
            calls, answer = (replace(calls[0], answer=answer),), None
        yield Turn(
            heard=(),
            text=turn["content"],
            calls=calls,
            answer=answer,
            tokens=tokens,
            reward=None,
            start_s=None,
            answered_s=None,
            model_s=None,
            tool_s=None,
            waiting_s=None,
        )


def _written_calls(text: str) -> Iterable[CalledTool]:
    """Yields the calls of tools in a turn. Llama's format, which needs their names, is not recognized."""
    try:
        calls = tool_calls(text, ())
    except MalformedCall:
        return
    for call in calls:
        yield CalledTool(call.name, json.dumps(call.arguments, ensure_ascii=False), None)


def _list(value: Any) -> Sequence[Any]:
    """Returns the items of a cell; none if it is missing, which pandas may represent as NaN."""
    return [] if value is None or isinstance(value, float) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
