"""Agents' trajectories in Harbor's format, ATIF: out of a run, and in again."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from ratchet.flows.train import train
from ratchet.infra.runs.atif import document, export_trajectories
from ratchet.infra.runs.ingest import Ingested, ingest
from ratchet.infra.runs.joined_rows import JoinedRows
from ratchet.infra.runs.parquet_file import write_parquet
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.data.examples import supervised
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.schema import trajectory_of
from tests import agents, tiny
from tests.prefect_server import locked

TOKENS = ("prompt_ids", "response_ids", "rollout_log_probs", "response_mask")
COLUMNS = (*TOKENS, "score", "reward_parts", "finish_reason", "policy_version", "data_source")
"""What may not differ, to the last bit."""
AGENT_ONLY = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}


@pytest.fixture(scope="module")
def runs(common: Path, workspace: Path, prefect_server: str) -> dict[str, Run]:
    """A run with an environment of several turns, and one with an agent that calls tools and sums up; 64 trajectories
    each."""
    folder = common / "atif"
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if not (folder / "done").exists():
            _train(folder, workspace)
            (folder / "done").touch()
    return {name: open_run(f"file://{folder}/runs/{name}") for name in ("talks", "calls")}


def _train(folder: Path, workspace: Path) -> None:
    # the policy calls a tool by chance: one of its 16 tokens is a whole call
    letters: Any = ["numbers", *"aeinorst ,.", agents.TOOL_CALL]
    tiny.model_folder(folder / "model", letters=letters)
    (folder / "template.jinja").write_text(tiny.CHAT_TEMPLATE)
    caller = {"path": str(folder / "model"), "dtype": "float32", "chat_template": str(folder / "template.jinja")}
    shared: dict[str, Any] = {
        "run__store": f"file://{folder}/runs",
        "rollout__n": 8,
        "rollout__max_response_tokens": 90,
        "data__max_prompt_tokens": 400,
        "reward": {"function": None},
        "algorithm": {"advantage": {"type": "grpo"}},
        "critic": None,
        "actor__micro_batch_tokens": 2048,
        "train__iterations": 2,
    }
    talks = {"rollout__environment": {"name": "tests.environments:Chatty", "max_turns": 6}}
    calls = {"model": caller, "rollout__agent": {"name": "tests.agents:calls_tools", "options": {}, "on_error": "fail"}}
    for name, changes in (("talks", talks), ("calls", calls)):
        train(tiny.config(workspace, run__name=name, **shared | changes))


def rows_of(run: Run) -> list[dict[str, Any]]:
    joined = JoinedRows(run)
    tables = [joined.table(iteration, "train") for iteration in range(run.state.iteration)]
    return [row for table in tables if table is not None for row in table.to_pylist()]


def documents(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.iterdir())]


def parts_of(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [tree, *tree.get("subagent_trajectories", [])]


def test_there_and_back(runs: dict[str, Run], tmp_path: Path) -> None:
    rows = {name: rows_of(run) for name, run in runs.items()}
    assert sum(export_trajectories(run, _folder(tmp_path / name)) for name, run in runs.items()) == 128
    first = {name: ingest([str(tmp_path / name)]) for name in runs}
    for name, ingested in first.items():
        again = ingested.trajectories.to_pylist()
        assert [row["id"] for row in again] == [row["trajectory_id"] for row in rows[name]]
        for row, imported in zip(rows[name], again, strict=True):
            assert {column: imported[column] for column in COLUMNS} == {column: row[column] for column in COLUMNS}
        for of_one in _by_trajectory(again):
            path = _folder(tmp_path / f"{name}-again") / f"{of_one[0]['id']}.json"
            agent = {"name": "again", "version": "1", "model_name": "tiny"}
            path.write_text(json.dumps(document([{**row, "trajectory_id": row["id"]} for row in of_one], agent, name)))
        second = ingest([str(tmp_path / f"{name}-again")])
        assert _without_source(second) == _without_source(ingested), "the second export says the same"
        for tree, other in zip(documents(tmp_path / name), documents(tmp_path / f"{name}-again"), strict=True):
            for part, same in zip(parts_of(tree), parts_of(other), strict=True):
                assert part["final_metrics"] == same["final_metrics"]
                assert list(map(_shown, part["steps"])) == list(map(_shown, same["steps"]))
    assert sum(len(row["calls"]) > 1 for row in first["talks"].trajectories.to_pylist()) > 50
    assert any(0 in row["response_mask"] for row in first["talks"].trajectories.to_pylist())


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def _by_trajectory(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(group) for _, group in groupby(rows, key=lambda row: trajectory_of(row["id"]))]


def _without_source(ingested: Ingested) -> list[dict[str, Any]]:
    return [{**row, "source": ""} for row in ingested.trajectories.to_pylist()]


def _shown(step: dict[str, Any]) -> dict[str, Any]:
    """A step without what only the run knows."""
    metrics = {name: value for name, value in step.get("metrics", {}).items() if name != "extra"}
    return {**{name: value for name, value in step.items() if name != "timestamp"}, "metrics": metrics}


def test_the_files_follow_the_rules_of_the_format(runs: dict[str, Run], tmp_path: Path) -> None:
    for name, run in runs.items():
        export_trajectories(run, _folder(tmp_path / name))
    calls: Counter[str] = Counter()
    for tree in (*documents(tmp_path / "talks"), *documents(tmp_path / "calls")):
        for part in parts_of(tree):
            assert part["schema_version"] == "ATIF-v1.7" and part["agent"].keys() >= {"name", "version"}
            assert [step["step_id"] for step in part["steps"]] == list(range(1, len(part["steps"]) + 1))
            assert part["session_id"] == tree["session_id"] and part["trajectory_id"].startswith(tree["trajectory_id"])
            for step in part["steps"]:
                assert step["source"] == "agent" or not AGENT_ONLY & step.keys()
                known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
                for result in step.get("observation", {"results": []})["results"]:
                    calls["answered" if "source_call_id" in result else "observed"] += 1
                    assert result.get("source_call_id") in known | {None}
                for call in step.get("tool_calls", ()):
                    assert (call["function_name"], call["arguments"]) == ("f", {"a": 1})
                if metrics := step.get("metrics"):
                    drawn = len(metrics["completion_token_ids"])
                    assert metrics["completion_tokens"] == drawn == len(metrics["logprobs"]) > 0
                    assert metrics["prompt_tokens"] == len(metrics["prompt_token_ids"])
                    assert len(metrics["extra"]["advantages"]) == len(metrics["extra"]["loss_mask"]) == drawn
    assert calls["answered"] > 20 and calls["observed"] > 50


def test_an_agents_conversations_are_one_file(runs: dict[str, Run], tmp_path: Path) -> None:
    assert export_trajectories(runs["calls"], tmp_path, 1) == 32
    for tree in documents(tmp_path):
        [summary] = tree["subagent_trajectories"]
        assert "same agent" in tree["notes"] and summary["trajectory_id"] == f"{tree['trajectory_id']}-b01"
        assert tree["agent"]["tool_definitions"] == [agents.TOOL] and "tool_definitions" not in summary["agent"]
        assert tree["extra"]["ratchet"]["reward_parts"]["calls"] == pytest.approx(3 * tree["extra"]["reward"])
        assert summary["steps"][0]["message"] == "sum up" and summary["extra"]["reward"] == tree["extra"]["reward"]
        assert all("timestamp" in step for step in tree["steps"] if "metrics" in step)
    ingested = ingest([str(tmp_path)])
    rows = ingested.trajectories.to_pylist()
    assert [row["id"][-4:] == "-b01" for row in rows] == [False, True] * 32
    assert all(row["response"] is None for row in rows[::2]), "no text says which tokens called a tool"
    asked = [row["prompt"][0]["content"] for row in ingested.prompts.to_pylist()]
    assert len(asked) == 4 and "sum up" not in asked, "a summary answers no question of a dataset"
    assert all("target" in row["reward_model"]["ground_truth"] for row in ingested.prompts.to_pylist())


def test_trajectories_of_several_turns_are_learned_from(
    runs: dict[str, Run], workspace: Path, tmp_path: Path, prefect_server: str
) -> None:
    export_trajectories(runs["talks"], _folder(tmp_path / "talks"), 1)
    table = ingest([str(tmp_path / "talks")]).trajectories
    write_parquet(table, str(tmp_path / "talks.parquet"))
    config = tiny.config(
        workspace,
        run__name="again",
        run__store=f"file://{tmp_path}/runs",
        data__train=runs["talks"].config.data.train,
        data__max_prompt_tokens=400,
        data__replay={"files": [str(tmp_path / "talks.parquet")], "share": 1.0},
        rollout__n=3,
        rollout__max_response_tokens=90,
        reward__function="tests.rewards:letters",
        algorithm__advantage={"type": "grpo"},
        critic=None,
        actor__micro_batch_tokens=2048,
        train__iterations=2,
    )
    train(config)
    rows = [row for row in rows_of(open_run(f"file://{tmp_path}/runs/again")) if row["by_expert"]]
    assert len(rows) == 8, "one of each prompt's answers"
    known = table.to_pylist()
    for row in rows:
        source = known[int(row["replayed_from"].rpartition(" ")[2]) - 1]
        for column in ("prompt_ids", "response_ids", "response_mask", "finish_reason"):
            assert row[column] == source[column]
        assert row["loss_mask"] == source["response_mask"], "what the environment said is read, and not learned"
    assert any(0 in row["response_mask"] for row in rows)


def test_supervised_examples_have_the_tokens_of_the_policy(runs: dict[str, Run], tmp_path: Path) -> None:
    export_trajectories(runs["calls"], _folder(tmp_path / "calls"), 0)
    table = ingest([str(tmp_path / "calls")]).trajectories
    path = tmp_path / "calls.parquet"
    write_parquet(table, str(path))
    tokenizer = load_tokenizer(runs["calls"].config.model)
    columns = {"prompt": "prompt", "response": "response"}
    examples, left_out, _ = supervised(str(path), tokenizer, max_tokens=1000, **columns)
    several = [number for number, row in enumerate(table.to_pylist()) if row["response"] is None]
    assert len(examples) == len(table) and left_out == 0 and len(several) >= 32
    for number in several:
        row = table.to_pylist()[number]
        assert examples.list("response_ids")[number] == row["response_ids"]
        assert examples.list("loss_mask")[number] == row["response_mask"]
    other = tiny.character_tokenizer("ab")
    with pytest.raises(UserError, match=r"row 1: prompt_ids should be a list of numbers from 0 to 4: .* this model's"):
        supervised(str(path), other, max_tokens=1000, **columns)
