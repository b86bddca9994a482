"""Evaluations of verifiers as a run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ratchet
from ratchet.flows.commands.app import app
from ratchet.infra.observe.importing import Imported, import_run
from ratchet.infra.observe.sources.verifiers import Verifiers
from ratchet.rlhf.agents import verifiers
from ratchet.rlhf.errors import UserError
from tests.extras import needs

TASKSETS = Path(__file__).parents[1] / "tasksets"
ASKED = {
    "message": {"role": "user", "content": "7*8?"},
    "timestamp": 1.0,
    "token_ids": [1, 2, 3],
    "mask": [False] * 3,
    "is_content": [False, True, True],
}


def said(text: str, parent: int = 0, **fields: Any) -> dict[str, Any]:
    """An answer of two tokens after one of the template."""
    return {
        "parent": parent,
        "message": {"role": "assistant", "content": text},
        "sampled": True,
        "token_ids": [4, 5, 6],
        "mask": [False, True, True],
        "logprobs": [-0.5, -0.25],
        **fields,
    }


def trace(*nodes: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "id": "t",
        "task": {"type": "T", "data": {"idx": 17, "prompt": "7*8?", "answer": "56"}},
        "agent": {"name": "agent", "config": {"model": "m"}, "trainable": True},
        "nodes": list(nodes),
        "calls": [{"node": 1, "finish_reason": "stop", "time": {"start": 5.0, "end": 7.5}}],
        "rewards": {"correct": {"score": 1.0, "weight": 0.5}, "style": {"score": 2.0}},
        "metrics": {"turns": 1.0},
        "ok": True,
        "stop_condition": "agent_completed",
        **fields,
    }


def episode(id: str, *traces: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    task = {"type": "T", "data": {"idx": 17, "prompt": "7*8?", "answer": "56"}, "hash": "h"}
    return {"id": id, "env": {"id": "gsm8k"}, "task": task, "ok": True, "traces": list(traces), **fields}


def write(file: Path, *records: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def imported(tmp_path: Path, path: Path) -> Imported:
    return import_run(Verifiers(path), "run", f"file://{tmp_path}/runs")


def opened(tmp_path: Path) -> ratchet.Run:
    return ratchet.open_run(f"file://{tmp_path}/runs/run")


def test_an_evaluation(tmp_path: Path) -> None:
    failed = trace(ASKED, rewards={"correct": None}, ok=False, errors=[{"type": "ModelError", "message": "gone"}])
    cut = trace(ASKED, said("5"), stop_condition="max_turns")
    write(
        tmp_path / "eval" / "traces.jsonl",
        episode("a", trace(ASKED, said("56"), info={"judged": [1]})),
        episode("b", cut),
        episode("c", failed, ok=False),
        episode("d", ok=False, errors=[{"type": "TaskError", "message": "no box"}]),
        episode("b", cut),
    )
    (tmp_path / "eval" / "configs" / "resolved").mkdir(parents=True)
    (tmp_path / "eval" / "configs" / "resolved" / "eval.json").write_text('{"model": "org/model", "num_rollouts": 4}')
    assert imported(tmp_path, tmp_path / "eval").trajectories == 4, "the same episode counts once"
    assert opened(tmp_path).config.model.path == "org/model"
    rows = opened(tmp_path).trajectories()
    first = rows.iloc[0]
    assert list(rows["trajectory_id"][:3]) == [f"it000000-p00000-s0{sample}" for sample in range(3)]
    assert json.loads(first["messages"]) == [{"role": "user", "content": "7*8?"}]
    assert (first["response"], first["ground_truth"], first["dataset_row"]) == ("56", "56", 17)
    assert list(first["prompt_ids"]) == [1, 2, 3, 4] and list(first["response_ids"]) == [5, 6]
    assert list(first["response_mask"]) == [1, 1] and list(first["rollout_log_probs"]) == [-0.5, -0.25]
    assert list(rows["score"][:2]) == [2.5, 2.5] and rows["score"].isna().tolist() == [False, False, True, True]
    assert first["reward_parts"] == {"turns": 1.0, "correct": 1.0, "style": 2.0}
    assert list(rows["finish_reason"]) == ["stop", "turns", "error", "error"]
    assert list(rows["rollout_error"][2:]) == ["ModelError: gone", "TaskError: no box"]
    assert list(rows["reward_error"][2:]) == ["ModelError: gone", "TaskError: no box"]
    [call] = first["calls"]
    assert json.loads(call["answer"]) == {"role": "assistant", "content": "56"}
    assert (call["start"], call["end"], call["started"], call["seconds"]) == (0, 2, 5.0, 2.5)
    assert first["source_episode_id"] == "a" and json.loads(first["source_info"]) == {"judged": [1]}
    assert json.loads(first["source_nodes"])[0] == {"timestamp": 1.0, "is_content": [False, True, True]}
    assert opened(tmp_path).metrics()["reward/mean"][0] == 2.5
    again = imported(tmp_path, tmp_path / "eval")
    assert (again.steps, again.already) == (0, 1)


def test_turns_and_branches(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "name": "add", "arguments": '{"a": 1}'}
    calls = said("", message={"role": "assistant", "tool_calls": [call]}, advantages=[0.5, 0.25])
    tool = {
        "parent": 1,
        "message": {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "2"}]},
        "token_ids": [7, 8],
        "mask": [False, False],
    }
    # after the second answer, the history was rewritten
    other = {"message": {"role": "user", "content": "summary"}, "token_ids": [9], "mask": [False]}
    nodes = (ASKED, calls, tool, said("two", 2, advantages=[0.1, 0.2]), other, said("done", 4))
    add = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}}
    write(tmp_path / "traces.jsonl", episode("a", trace(*nodes, tools=[add])), episode("b", trace(ASKED, said("56"))))
    imported(tmp_path, tmp_path / "traces.jsonl")
    rows = opened(tmp_path).trajectories()
    assert list(rows["trajectory_id"]) == [f"it000000-p00000-{end}" for end in ("s00", "s00-b01", "s01")]
    first, second = rows.iloc[0], rows.iloc[1]
    assert list(first["response_ids"]) == [5, 6, 7, 8, 4, 5, 6]
    assert list(first["response_mask"]) == [1, 1, 0, 0, 0, 1, 1]
    assert list(first["advantages"]) == pytest.approx([0.5, 0.25, 0, 0, 0, 0.1, 0.2])
    assert list(first["turn_starts"]) == [0, 5] and list(first["turn_ends"]) == [2, 7]
    assert [turn["role"] for turn in first["turns"]] == ["policy", "environment", "policy"]
    assert [turn["content"] for turn in first["turns"]][1:] == ["2", "two"]
    asked = [json.loads(one["asked"]) for one in first["calls"]]
    assert asked[0]["tools"][0]["function"]["name"] == "add" and "tools" not in asked[1]
    assert asked[1]["messages"][0]["role"] == "tool"
    function = json.loads(first["calls"][0]["answer"])["tool_calls"][0]["function"]
    assert function == {"name": "add", "arguments": '{"a": 1}'}
    assert json.loads(first["tools"]) == [asked[0]["tools"][0]]
    assert json.loads(second["messages"]) == [{"role": "user", "content": "summary"}]
    assert list(second["prompt_ids"]) == [9, 4] and second["response"] == "done"


def test_agents_have_groups_of_their_own(tmp_path: Path) -> None:
    solver, judge = ({"agent": {"name": name}} for name in ("solver", "judge"))
    played = [trace(ASKED, said("56"), **solver), trace(ASKED, said("5"), **solver), trace(ASKED, said("no"), **judge)]
    write(tmp_path / "traces.jsonl", episode("a", *played), episode("b", *played))
    imported(tmp_path, tmp_path)
    rows = opened(tmp_path).trajectories()
    assert [name[-7:] for name in rows["trajectory_id"]] == [
        "000-s00",
        "000-s01",
        "001-s00",
        "000-s02",
        "000-s03",
        "001-s01",
    ]
    assert json.loads(rows["source_agent"][2]) == {"name": "judge"}


def test_steps_of_a_trainer(tmp_path: Path) -> None:
    def at(step: int, kind: str, id: str) -> dict[str, Any]:
        work = {"type": kind, "step": step, "policy": {"start": step - 1, "end": step}}
        return episode(
            id, trace(ASKED, said("56")), run={"type": "train", "id": "r", "work": work}, group={"id": id[0]}
        )

    lines = [at(1, "eval", "v"), at(1, "train", "a1"), at(1, "train", "b1"), at(1, "train", "a2"), at(2, "train", "c1")]
    write(tmp_path / "traces.jsonl", *lines)
    with (tmp_path / "traces.jsonl").open("a") as file:
        file.write('{"id": "c2", "task')
    done = imported(tmp_path, tmp_path)
    assert (done.steps, done.validations) == (1, 1), "step 2 is still being written"
    write(tmp_path / "traces.jsonl", *lines, at(2, "train", "c2"))
    assert imported(tmp_path, tmp_path).steps == 1
    rows = opened(tmp_path).trajectories()
    groups = ["it000000-p00000", "it000000-p00001", "it000000-p00000", "it000001-p00000", "it000001-p00000"]
    assert list(rows["prompt_id"]) == groups and list(rows["policy_version"]) == [0, 0, 0, 1, 1]
    answers = opened(tmp_path).validation()
    assert list(answers["iteration"]) == [0] and answers["source_episode_id"][0] == "v"


def test_traces_of_older_versions_and_what_is_malformed(tmp_path: Path) -> None:
    info = {"env_name": "math", "group_id": "g", "episode_id": "e"}
    write(
        tmp_path / "traces.jsonl", trace(ASKED, said("56"), info=info), trace(ASKED, said("5"), info={"group_id": "g"})
    )
    imported(tmp_path, tmp_path)
    rows = opened(tmp_path).trajectories()
    assert list(rows["sample"]) == [0, 1] and rows["data_source"][0] == "math"
    for record, says in (
        ({"example_id": 3, "reward": 1.0}, "neither an episode nor a trace of verifiers. It is of verifiers' old API"),
        (episode("a", trace(said("56", parent=3))), r"message 0 follows message 3"),
        (episode("a", trace({**ASKED, "mask": [True]})), r"a message has 3 token_ids, and a mask of 1"),
        (episode("a", trace(ASKED, {"sampled": True})), r"KeyError: 'message'"),
    ):
        write(tmp_path / "wrong" / "traces.jsonl", episode("b", trace(ASKED)), record)
        with pytest.raises(UserError, match=rf"wrong/traces\.jsonl, line 2: .*{says}"):
            import_run(Verifiers(tmp_path / "wrong"), "wrong", f"file://{tmp_path}/runs")
    with pytest.raises(UserError, match=r"results\.jsonl is imported with --from jsonl"):
        Verifiers(tmp_path / "nowhere")


class _Answers(BaseHTTPRequestHandler):
    """A model that answers how many messages it was given."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f"b{len(asked['messages'])}"
        message = {"role": "assistant", "content": text}
        answer = {
            "id": "r",
            "object": "chat.completion",
            "created": 1,
            "model": asked["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def model_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def evaluate(taskset: str, url: str, folder: Path) -> list[Any]:
    """Plays two tasks twice, and writes them as an evaluation of verifiers does."""
    from verifiers import v1
    from verifiers.v1.cli.output import save_config
    from verifiers.v1.configs.cli.eval import EvalConfig
    from verifiers.v1.episode import EvalRunInfo
    from verifiers.v1.utils.trace_store import append_episode

    from ratchet.rlhf.agents.verifiers_harness import API_KEY

    API_KEY.set("none")
    loaded = verifiers._loaded(taskset, {})
    folder.mkdir(parents=True)
    save_config(EvalConfig(model="org/model"), folder)
    client = v1.EvalClientConfig(base_url=url, api_key_var="RATCHET_HAS_NO_SUCH_KEY")
    context = v1.ModelContext(model="org/model", client=client)
    episodes, lock = [], asyncio.Lock()
    async with loaded.serving():
        for task in [*islice(loaded.environment.taskset, 2)] * 2:
            episode = await loaded.environment.run_episode(task, context)
            episode.record_run(EvalRunInfo(id="r", name="eval"))
            await append_episode(folder, episode, lock)
            episodes.append(episode)
    return episodes


@needs("verifiers")
@pytest.mark.parametrize("taskset", ["words_single", "words_several"])
def test_files_of_verifiers(tmp_path: Path, taskset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TASKSETS)
    folder = tmp_path / "outputs" / "eval"
    with model_server() as url:
        episodes = asyncio.run(evaluate(taskset, url, folder))
    arguments = ["import", str(folder), "--from", "verifiers", "--run", "run", "--store", f"file://{tmp_path}/runs"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = opened(tmp_path).trajectories()
    by_id = {one.id: one for one in episodes}
    assert set(rows["source_episode_id"]) == set(by_id) and rows["prompt_id"].nunique() == 2
    for _, row in rows.iterrows():
        [played] = by_id[row["source_episode_id"]].traces
        assert row["score"] == pytest.approx(played.reward) and row["score"] > 0
        assert row["response"].split("\n")[-1] == played.assistant_messages[-1].content
        assert len(row["calls"]) == played.num_turns == (1 if taskset == "words_single" else 3)
        assert row["ground_truth"] == getattr(played.task.data, "answer", None) or taskset == "words_several"
    assert opened(tmp_path).config.model.path == "org/model"
    assert opened(tmp_path).metrics()["reward/letters/mean"][0] > 0
    assert "1 were there" in CliRunner().invoke(app, arguments).output
