"""Jobs of Harbor and files of ATIF, imported as a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.infra.observe.importing import import_run
from ratchet.infra.observe.sources.atif import ATIF
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.agents.timelines import timeline
from ratchet.rlhf.errors import UserError

CALL = {"tool_call_id": "c1", "function_name": "bash", "arguments": {"keystrokes": "ls\n"}}
STEPS = [
    {"step_id": 1, "source": "user", "message": "Fix the failing test."},
    {
        "step_id": 2,
        "timestamp": "2026-10-01T10:00:05Z",
        "source": "agent",
        "message": "Listing files.",
        "tool_calls": [CALL],
        "observation": {"results": [{"source_call_id": "c1", "content": "a.py"}]},
        "metrics": {"prompt_tokens": 2, "prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]},
    },
    {
        "step_id": 3,
        "timestamp": "2026-10-01T10:00:09Z",
        "source": "agent",
        "message": "Done.",
        "metrics": {"prompt_token_ids": [1, 2, 3, 7], "completion_token_ids": [4, 5], "logprobs": [-0.25, -1.0]},
    },
]
REFUSED = {"exception_type": "AgentSetupError", "exception_message": "no pip", "exception_traceback": "…"}


def trajectory(*steps: Any, tokens: bool = True, **fields: Any) -> dict[str, Any]:
    own = [step if tokens else {k: v for k, v in step.items() if k != "metrics"} for step in steps or STEPS]
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "t", "version": "2"}, "steps": own, **fields}


def write(file: Path, tree: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(tree))


def trial(job: Path, name: str, rewards: dict[str, float] | None, tree: Any = None, **fields: Any) -> Path:
    """Writes the folder of a trial as Harbor does."""
    result = {
        "task_name": name.partition("__")[0],
        "trial_name": name,
        "task_checksum": "ab",
        "source": "terminal-bench",
        "agent_info": {"name": "terminus-2", "version": "2.0", "model_info": {"name": "Qwen3-4B"}},
        "agent_result": {"n_input_tokens": 812, "cost_usd": 0.01},
        "verifier_result": None if rewards is None else {"rewards": rewards},
        "exception_info": None,
        "reward_valid": bool(rewards),
        "started_at": f"2026-10-01T10:00:0{len(list(job.glob('*/')))}Z",
        **fields,
    }
    write(job / name / "result.json", result)
    (job / name / "trial.log").touch()
    if tree is not None:
        write(job / name / "agent" / "trajectory.json", tree)
    return job / name


def end(job: Path, finished: str | None = "2026-10-01T11:00:00Z") -> None:
    write(job / "result.json", {"id": "x", "started_at": "2026-10-01T10:00:00Z", "finished_at": finished})


def imported(path: Path, tmp_path: Path) -> Run:
    return open_run(import_run(ATIF(path), "agents", f"file://{tmp_path}/runs").url)


def test_a_job_is_a_step(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "2026-10-01__10-00-00"
    write(job / "config.json", {"n_attempts": 2, "env": {"OPENAI_API_KEY": "sk-123"}})
    trial(job, "fix__b", {"reward": 1.0, "style": 0.5}, trajectory())
    trial(job, "fix__a", {"reward": 0.0}, trajectory(tokens=False))
    trial(job, "other__c", {"reward": 1.0}, None, exception_info=REFUSED, reward_valid=False)
    write(job / "running__d" / "trial.log", "")
    end(job)
    run = imported(tmp_path / "jobs", tmp_path)
    rows = run.trajectories().set_index("source_trial")
    assert list(rows.index) == ["fix__b", "fix__a", "other__c"]
    assert rows["prompt_id"].nunique() == 2 and list(rows["sample"]) == [0, 1, 0]
    assert set(rows["data_source"]) == {"terminal-bench"} and rows["source_cost_usd"]["fix__b"] == 0.01
    # a void reward is missing, and does not count as 0
    assert rows["score"].tolist()[:2] == [1.0, 0.0] and rows["score"].isna()["other__c"]
    assert rows["reward_error"]["other__c"] == rows["rollout_error"]["other__c"] == "AgentSetupError: no pip"
    assert rows["reward_parts"]["fix__b"] == {"reward": 1.0, "style": 0.5}
    assert run.metrics()["reward/mean"].tolist() == [0.5] and run.metrics()["reward/style/mean"].tolist() == [0.5]
    assert list(rows["response_ids"]["fix__b"]) == [3, 7, 4, 5] and list(rows["response_mask"]["fix__b"]) == [
        1,
        0,
        1,
        1,
    ]
    assert list(rows["rollout_log_probs"]["fix__b"]) == [-0.5, 0, -0.25, -1.0]
    assert rows["response_ids"]["fix__a"] is None
    assert run.config.observed is not None and "sk-123" not in str(run.config.observed)


def test_conversations_without_tokens_are_shown_turn_by_turn(tmp_path: Path) -> None:
    job = tmp_path / "job"
    trial(job, "fix__a", {"reward": 1.0}, trajectory(tokens=False))
    [row] = imported(job, tmp_path).trajectories().to_dict("records")
    assert json.loads(row["messages"]) == [{"role": "user", "content": "Fix the failing test."}]
    assert "Listing files." in row["response"] and "a.py\nDone." in row["response"]
    [conversation] = timeline([row]).conversations
    assert [(turn.text, turn.tokens, turn.start_s) for turn in conversation.turns] == [
        ("Listing files.", None, 0.0),
        ("Done.", None, 4.0),
    ]
    assert [(call.name, call.answer) for call in conversation.turns[0].calls] == [("bash", "a.py")]


def test_times_may_be_missing(tmp_path: Path) -> None:
    steps = [{name: value for name, value in step.items() if name != "timestamp"} for step in STEPS]
    write(tmp_path / "atif" / "one.json", trajectory(*steps))
    [row] = imported(tmp_path / "atif", tmp_path).trajectories().to_dict("records")
    assert [turn.start_s for turn in timeline([row]).conversations[0].turns] == [None, None]


def test_several_jobs_are_steps_in_order_of_name(tmp_path: Path) -> None:
    for name, score in (("b", 1.0), ("a", 0.0)):
        trial(tmp_path / "jobs" / name, "fix__x", {"score": score}, trajectory())
    end(tmp_path / "jobs" / "b", finished=None)
    run = imported(tmp_path / "jobs", tmp_path)
    assert run.trajectories()["score"].tolist() == [0.0]
    end(tmp_path / "jobs" / "b")
    assert imported(tmp_path / "jobs", tmp_path).trajectories()["score"].tolist() == [0.0, 1.0]


def test_subagents_are_further_conversations_of_the_trajectory(tmp_path: Path) -> None:
    tree = trajectory(tokens=False, subagent_trajectories=[trajectory(STEPS[0], STEPS[2])])
    job = tmp_path / "job"
    trial(job, "fix__a", {"reward": 1.0}, tree)
    trial(job, "fix__b", {"reward": 0.0}, trajectory())
    rows = imported(job, tmp_path).trajectories()
    ids = ["it000000-p00000-s00", "it000000-p00000-s00-b01", "it000000-p00000-s01"]
    assert rows["trajectory_id"].tolist() == ids and rows["score"].tolist() == [1.0, 1.0, 0.0]


def test_steps_of_a_task_and_continued_conversations_are_conversations(tmp_path: Path) -> None:
    job = tmp_path / "job"
    trial(job, "fix__a", {"reward": 1.0})
    for name in (
        "steps/1/agent/trajectory.json",
        "steps/1/agent/trajectory.cont-1.json",
        "steps/2/agent/trajectory.json",
    ):
        write(job / "fix__a" / name, trajectory())
    assert imported(job, tmp_path).trajectories()["branch"].tolist() == [0, 1, 2]


def test_several_rewards_without_a_total(tmp_path: Path) -> None:
    trial(tmp_path / "job", "fix__a", {"tests": 1.0, "style": 0.5}, trajectory())
    [row] = imported(tmp_path / "job", tmp_path).trajectories().to_dict("records")
    assert row["reward_parts"] == {"tests": 1.0, "style": 0.5} and row["score"] != row["score"]
    assert "none is called reward" in row["reward_error"]


def test_files_of_atif(tmp_path: Path) -> None:
    write(tmp_path / "atif" / "one.json", trajectory(extra={"reward": 2}))
    picture = {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}
    seen = {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "See."}, picture]}
    lines = [json.dumps(trajectory(seen, STEPS[2], tokens=False)), json.dumps(trajectory())]
    (tmp_path / "atif" / "two.jsonl").write_text("\n".join(lines))
    run = imported(tmp_path / "atif", tmp_path)
    rows = run.trajectories()
    assert rows["prompt"].tolist() == ["Fix the failing test.", "See.\n[image: a.png]", "Fix the failing test."]
    assert rows["score"].tolist()[0] == 2.0 and rows["reward_error"].tolist()[1:] == ["the file has no reward"] * 2
    assert set(rows["data_source"]) == {"atif"} and run.config.observed is not None


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"messages": []}, r"one.json.*no ATIF"),
        ({"schema_version": "ATIF-v1.8", "agent": {}, "steps": []}, r"one.json.*steps"),
    ],
)
def test_malformed_files(tree: Any, says: str, tmp_path: Path) -> None:
    write(tmp_path / "atif" / "one.json", tree)
    with pytest.raises(UserError, match=says):
        imported(tmp_path / "atif", tmp_path)


def test_malformed_rewards(tmp_path: Path) -> None:
    trial(tmp_path / "job", "fix__a", {"reward": "good"}, trajectory())  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"fix__a/result.json: verifier_result.rewards.reward is no number"):
        imported(tmp_path / "job", tmp_path)
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither trials of Harbor nor files of ATIF"):
        ATIF(empty)
