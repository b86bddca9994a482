"""ATIF files that other programs wrote: what becomes of them, and what is said about malformed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.infra.runs.ingest import FAILED, NO_TEXT, Ingested, ingest
from ratchet.rlhf.errors import UserError

QUESTION = {"step_id": 1, "source": "user", "message": "2+2?"}


def answer(prompt: list[int] | None = None, drawn: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    step: dict[str, Any] = {"step_id": 2, "source": "agent", "message": "4", **fields}
    if drawn is not None:
        step["metrics"] = {
            "prompt_token_ids": prompt,
            "completion_token_ids": drawn,
            "logprobs": [-0.1] * len(drawn),
            "cost_usd": 0.5,
        }
    return step


def said(text: str) -> dict[str, Any]:
    return {"observation": {"results": [{"content": text}]}}


def tree(*steps: Any, **fields: Any) -> dict[str, Any]:
    agent = {"name": "terminus-2", "version": "2.0", "model_name": "m"}
    return {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "steps": list(steps), **fields}


def read(folder: Path, *trees: Any) -> Ingested:
    for number, one in enumerate(trees):
        (folder / f"{number}.json").write_text(json.dumps(one, indent=number))
    return ingest([str(folder)])


def test_steps_that_go_on_are_one_conversation(tmp_path: Path) -> None:
    steps = [QUESTION, answer([1, 2], [3], **said("ok")), answer([1, 2, 3, 9, 9], [4, 5])]
    [row] = read(tmp_path, tree(*steps, extra={"reward": 1})).trajectories.to_pylist()
    assert (row["id"], row["score"], row["prompt"]) == ("s", 1.0, [{"role": "user", "content": "2+2?"}])
    assert (row["prompt_ids"], row["response_ids"]) == ([1, 2], [3, 9, 9, 4, 5])
    assert row["response_mask"] == [1, 0, 0, 1, 1] and row["response"] is None
    assert row["rollout_log_probs"] == pytest.approx([-0.1, 0, 0, -0.1, -0.1])
    assert [(call["start"], call["end"]) for call in row["calls"]] == [(0, 1), (3, 5)]
    assert json.loads(row["calls"][1]["asked"]) == {"messages": [{"role": "environment", "content": "ok"}]}


def test_an_edited_conversation_is_another_one(tmp_path: Path) -> None:
    ingested = read(tmp_path, tree(QUESTION, answer([1, 2], [3]), answer([7], [4])))
    rows = ingested.trajectories.to_pylist()
    assert [(row["id"], row["prompt_ids"], row["response_ids"]) for row in rows] == [
        ("s", [1, 2], [3]),
        ("s-b01", [7], [4]),
    ]
    assert len(ingested.prompts) == 1


def test_what_the_model_did_not_draw_is_not_learned(tmp_path: Path) -> None:
    copied = answer([1], [2], is_copied_context=True)
    scripted = answer(llm_call_count=0)
    [row] = read(tmp_path, tree(QUESTION, copied, scripted, answer([1, 2, 5], [3]))).trajectories.to_pylist()
    assert (row["prompt_ids"], row["response_ids"], row["response_mask"]) == ([1, 2, 5], [3], [1])
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant", "assistant"]


def test_files_without_tokens_are_texts(tmp_path: Path) -> None:
    call = {"tool_call_id": "1", "function_name": "f", "arguments": {}}
    failed = {"ratchet": {"rollout_error": "no"}}
    ingested = read(
        tmp_path,
        tree(QUESTION, answer()),
        tree(QUESTION, answer(**said("ok")), answer(message="5")),
        tree(QUESTION, answer(tool_calls=[call])),
        tree(QUESTION, answer([1], [2]), extra=failed),
        tree(QUESTION),
        tree(QUESTION, answer(message=[{"type": "text", "text": "4"}])),
    )
    rows = ingested.trajectories.to_pylist()
    assert [row["response"] for row in rows] == ["4", "5", "4"] and {row["response_ids"] is None for row in rows} == {
        True
    }
    assert [message["role"] for message in rows[1]["prompt"]] == ["user", "assistant", "user"]
    assert ingested.left_out == {NO_TEXT: 2, FAILED: 1}


def test_the_reward_of_a_trial_of_harbor(tmp_path: Path) -> None:
    for name, rewards in (("a", {"reward": 0.5}), ("b", None)):
        (tmp_path / name / "agent").mkdir(parents=True)
        (tmp_path / name / "agent" / "trajectory.json").write_text(
            json.dumps(tree(QUESTION, answer(), session_id=name))
        )
        (tmp_path / name / "result.json").write_text(json.dumps({"verifier_result": {"rewards": rewards}}))
    files = [str(tmp_path / name / "agent" / "trajectory.json") for name in "ab"]
    assert [row["score"] for row in ingest(files).trajectories.to_pylist()] == [0.5, None]
    (tmp_path / "a" / "result.json").write_text('{"verifier_result": {"rewards": {"reward": "good"}}}')
    with pytest.raises(UserError, match=r"a/result.json: verifier_result.rewards.reward is no number .*good"):
        ingest(files)


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    image = [{"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}]
    short = answer([1], [2, 3])
    short["metrics"]["logprobs"] = [-0.1]
    with pytest.raises(UserError) as refused:
        read(
            tmp_path,
            tree(QUESTION, {"source": "robot", "message": "\x1b[1m"}, answer([1], [True])),
            tree(QUESTION, short, answer([2**31], [1], message=image)),
            tree(schema_version="ATIF-v2.0"),
            tree(QUESTION, extra={"reward": float("nan")}, subagent_trajectories=[tree({"source": "user"})]),
        )
    (tmp_path / "4.json").write_text("{\n" + '"a": ' + "[" * 100_000)
    with pytest.raises(UserError, match=r"4.json is not JSON: maximum recursion depth exceeded"):
        ingest([str(tmp_path / "4.json")])
    lines = str(refused.value).splitlines()
    assert [line.removeprefix(f"{tmp_path}/") for line in lines] == [
        "0.json, row 1: step 2, source: input should be 'system', 'user' or 'agent', and is 'robot'",
        "0.json, row 1: step 3, metrics.completion_token_ids[0]: input should be a valid integer, and is True",
        "1.json, row 1: step 2, metrics: logprobs has 1 numbers, and completion_token_ids 2: write one for each token, "
        "or leave logprobs out",
        "1.json, row 1: step 3, message: holds 'image', and models see text only: leave the trajectory out",
        "1.json, row 1: step 3, metrics.prompt_token_ids[0]: input should be less than 2147483648, and is 2147483648",
        "2.json, row 1: schema_version: string should match pattern '^ATIF-v1\\.\\d+$', and is 'ATIF-v2.0'",
        "2.json, row 1: steps: list should have at least 1 item after validation, not 0, and is []",
        "3.json, row 1: extra.reward: input should be a finite number, and is nan",
        "3.json, row 1: subagent 1: step 1, message: field required",
    ]


def test_many_mistakes_are_counted(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        read(tmp_path, tree(QUESTION, answer([-1] * 30, [1])))
    assert len(str(refused.value).splitlines()) == 21 and str(refused.value).endswith("and 10 more mistakes")
