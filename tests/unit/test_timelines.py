"""The timeline of a trajectory: its turns, its tools, its seconds, from the columns of old and new runs."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from rich.console import Console

from ratchet.flows.commands.tables import _timeline_tree
from ratchet.rlhf.agents.timelines import CalledTool, Timeline, timeline
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.rollout.engine import Chunk, Request, Sampling
from ratchet.tasks.analysis.reproduce import first_difference
from tests.stored import STORED

NAME = "it000000-p00000-s00"
CALL = {"id": "abc", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def seconds(model: float | None, tool: float | None, waiting: float | None) -> dict[str, float | None]:
    return {"model": model, "tool": tool, "waiting": waiting}


def agent_rows() -> list[dict[str, Any]]:
    """A conversation with a tool, and another one."""
    asked: list[Any] = [
        {"messages": [{"role": "user", "content": "1+1?"}], "tools": [{"function": {"name": "add"}}]},
        {"messages": [{"role": "tool", "tool_call_id": "abc", "content": "2"}, {"role": "user", "content": "so?"}]},
        {"messages": [{"role": "user", "content": "sum up"}]},
    ]
    answers: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "content": "done"},
    ]
    calls = [
        {"asked": json.dumps(one), "answer": json.dumps(two), "start": 0, "end": 3, "started": at, "seconds": took}
        for one, two, at, took in zip(asked, answers, (100.0, 102.0, 104.0), (1.0, 1.5, 0.5), strict=True)
    ]
    spent = [seconds(0.75, 1.0, 0.25), seconds(None, 0.5, None), seconds(0.5, None, None)]
    first = {"trajectory_id": NAME, "calls": calls[:2], "turn_seconds": spent[:2], "rollout_error": "it broke"}
    return [
        {"trajectory_id": f"{NAME}-b01", "calls": calls[2:], "turn_seconds": spent[2:], "rollout_error": "it broke"},
        first,
    ]


def test_the_answers_of_tools_are_with_their_calls() -> None:
    told = timeline(agent_rows())
    assert (told.id, told.errors, [part.id for part in told.conversations]) == (
        NAME,
        ("it broke",),
        [NAME, f"{NAME}-b01"],
    )
    (first, second), (other,) = (part.turns for part in told.conversations)
    assert first.calls == (CalledTool("add", '{"a": 1}', "2"),)
    assert [tuple(said) for said in first.heard] == [("tools", "add"), ("user", "1+1?")]
    assert [tuple(said) for said in second.heard] == [("user", "so?")], "the tool's answer is not said twice"
    assert (first.start_s, second.start_s, other.start_s) == (0.0, 2.0, 4.0)
    assert (first.seconds, second.seconds, other.seconds) == (2.0, 2.0, 0.5), "an answer of before a crash counts whole"
    assert told.seconds == 4.5


def test_the_turns_of_an_environment_follow_one_another() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    said = [("policy", call), ("environment", "2"), ("policy", "two")]
    row = {
        "trajectory_id": NAME,
        "turns": [{"role": role, "content": content} for role, content in said],
        "turn_ends": [3, 6],
        "response_mask": [1, 1, 1, 0, 1, 1],
        "turn_rewards": [0.5, 0.0],
        "turn_seconds": [seconds(1.0, 0.5, 0.0), seconds(1.0, None, None)],
    }
    [conversation] = timeline([row]).conversations
    first, second = conversation.turns
    assert first.calls == (CalledTool("add", '{"a": 1}', "2"),) and first.answer is None
    assert (first.tokens, second.tokens, first.reward, second.start_s) == (3, 2, 0.5, 1.5)
    old = {name: value for name, value in row.items() if name != "turn_seconds"}
    [conversation] = timeline([old]).conversations
    assert [(turn.start_s, turn.model_s, turn.seconds) for turn in conversation.turns] == [(None, None, 0.0)] * 2
    assert not any(part.turns for part in timeline([{"trajectory_id": NAME, "turns": None}]).conversations)


def test_the_tokens_of_an_image_are_counted_and_not_shown() -> None:
    said = [("policy", "look"), ("environment", "<s> <|image_pad|> <|image_pad|> </s>"), ("policy", "red")]
    row = {
        "trajectory_id": NAME,
        "turns": [{"role": role, "content": content} for role, content in said],
        "turn_ends": [1, 6],
        "response_mask": [1, 0, 0, 0, 0, 1],
    }
    for images, answer in ((np.array(["a", "b"]), "<s> [2 tokens of an image] </s>"), (None, said[1][1])):
        [conversation] = timeline([row | {"images": images}]).conversations
        assert conversation.turns[0].answer == answer


def printed(told: Timeline) -> str:
    console = Console(file=io.StringIO(), width=100, markup=False, emoji=False, force_terminal=True)
    for part in told.conversations:
        console.print(_timeline_tree(part, told.seconds))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_was_said_does_not_reach_the_terminal_raw() -> None:
    rows = agent_rows()
    hostile = "\x1b]0;mine\x07[red]"
    for row in rows:
        for call in row["calls"]:
            call["asked"] = call["asked"].replace("1+1?", json.dumps(hostile)[1:-1]).replace('"2"', json.dumps(hostile))
            call["answer"] = call["answer"].replace("two", json.dumps(hostile)[1:-1])
    text = printed(timeline(rows))
    assert "\x07" not in text and "\x1b]" not in text
    assert text.count("\\x1b]0;mine\\x07[red]") == 3
    assert "answered in 1.5 s" in text and "model 0.75 s · tool 1 s · waiting 0.25 s" in text


def test_seconds_are_added_to_the_newest_turn_and_survive_a_journal() -> None:
    dialogue = Dialogue(Request("a", (1,)))
    dialogue.spent(model=1.0)
    assert dialogue.turn_seconds == [], "no turn has begun"
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=9, seed=0)
    dialogue.next_request(sampling)
    before = dialogue.copy()
    dialogue.spent(model=1.0)
    dialogue.spent(model=0.5, waiting=0.25)
    assert before.turn_seconds == [seconds(None, None, None)], "a copy does not change"
    dialogue.wrote(Chunk((5,), (-0.5,), "stop"), 0)
    dialogue.spent(tool=2.0)
    dialogue.next_request(sampling)
    assert dialogue.turn_seconds == [seconds(1.5, 2.0, 0.25), seconds(None, None, None)]
    again, older = Dialogue(Request("a", (1,))), Dialogue(Request("a", (1,)))
    again.restore(dialogue.journaled())
    assert again.turn_seconds == dialogue.turn_seconds
    older.restore({name: value for name, value in dialogue.journaled().items() if name != "turn_seconds"})
    assert older.turn_seconds == [seconds(None, None, None)] * 2
    dialogue.restart()
    assert dialogue.turn_seconds == []


def test_measured_times_are_no_difference() -> None:
    import pyarrow as pa

    from ratchet.rlhf.schema import TRAJECTORY

    schema = TRAJECTORY.arrow(("trajectory_id", "turn_seconds", "score"))
    tables = [
        pa.Table.from_pylist(
            [{"trajectory_id": NAME, "turn_seconds": [seconds(took, None, None)], "score": 1.0}], schema
        )
        for took in (1.0, 2.0)
    ]
    assert first_difference(*tables) == ""
    assert "score" in first_difference(tables[0], tables[0].set_column(2, "score", pa.array([0.5], pa.float32())))


def test_an_older_run_has_no_seconds() -> None:
    from ratchet.infra.runs.run import open_run

    frame = open_run(f"file://{STORED}/run").trajectories(1, ["trajectory_id", "turn_seconds"])
    assert len(frame) and frame["turn_seconds"].isna().all()
