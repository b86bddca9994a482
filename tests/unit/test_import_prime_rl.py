"""Rollouts and metrics of prime-rl as a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ratchet
from ratchet.flows.commands.app import app
from ratchet.infra.observe.importing import Imported, import_run
from ratchet.infra.observe.sources.prime_rl import PrimeRL
from ratchet.rlhf.errors import UserError


def episode(id: str, reward: float = 1.0, env: str = "gsm8k", advantage: float | None = None, **fields: Any) -> Any:
    """An episode of the group that its id begins with."""
    asked = {"message": {"role": "user", "content": "7*8?"}, "token_ids": [1, 2], "mask": [False, False]}
    said = {
        "parent": 0,
        "message": {"role": "assistant", "content": f"56 by {id}"},
        "sampled": True,
        "token_ids": [3, 4],
        "mask": [False, True],
        "logprobs": [-0.5],
        **({} if advantage is None else {"advantages": [advantage]}),
    }
    task = {"type": "T", "data": {"idx": 17, "prompt": "7*8?", "answer": "56"}}
    rewards = {"correct": {"score": reward, "weight": 1.0}}
    trace = {"id": f"t{id}", "task": task, "nodes": [asked, said], "rewards": rewards, "ok": True}
    trace["agent"] = {"name": "agent"}
    work = {"type": "train", "step": 1, "policy": {"start": 3, "end": 4}}
    run = {"type": "train", "id": "r", "work": work}
    common = {"id": id, "env": {"id": env, "name": env}, "task": task, "group": {"id": id[0]}, "run": run, "ok": True}
    return {**common, "traces": [trace], **fields}


def failed(id: str) -> Any:
    return episode(id, traces=[], ok=False, errors=[{"type": "TaskError", "message": "no box"}])


def write(folder: Path, place: str, *episodes: Any) -> Path:
    file = folder / "rollouts" / place / "traces.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(one) + "\n" for one in episodes))
    return file


def trained(folder: Path, step: int, *episodes: Any) -> None:
    """Writes a step: what arrived, what was trained on, and the metrics of both processes."""
    write(folder, f"step_{step}/train/all", *(one for one in episodes if one["ok"]), failed(f"z{step}"))
    write(folder, f"step_{step}/train/effective", *episodes)
    logged(folder, step, {"train/agg/all/agent/reward/mean": 0.25, "progress/tokens": 7, "time/step": 1.0})
    logged(folder, step, {"optim/lr": step * 1e-6, "perf/mfu": 20.0})
    logged(folder, step, {"time/step": 9.0, "time/forward_backward": 4.0})


def logged(folder: Path, step: int, metrics: Mapping[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 1.5, **metrics}) + "\n")


def imported(tmp_path: Path) -> Imported:
    return import_run(PrimeRL(tmp_path / "out"), "run", f"file://{tmp_path}/runs")


def opened(tmp_path: Path) -> ratchet.Run:
    return ratchet.open_run(f"file://{tmp_path}/runs/run")


def test_steps(tmp_path: Path) -> None:
    out = tmp_path / "out"
    trained(out, 9, episode("a1", advantage=0.5), episode("b1", 0.0, advantage=0.0), episode("a2", 0.0, advantage=-0.5))
    trained(out, 10, episode("c1", advantage=0.25))
    write(out, "step_9/train/all", episode("a1"), episode("later"), failed("a3"))
    done = imported(tmp_path)
    assert (done.steps, done.trajectories) == (2, 6)
    assert list(done.left_out) == ["time of metrics", "episodes of all/ that this step did not train on"]
    rows = opened(tmp_path).trajectories()
    first = rows[rows["iteration"] == 0]
    assert list(first["source_episode_id"]) == ["a1", "b1", "a2", "a3"]
    assert list(first["prompt_id"]) == [f"it000000-p0000{group}" for group in (0, 1, 0, 0)]
    assert list(first["source_episode_subset"]) == ["effective"] * 3 + ["all"]
    assert [list(value) for value in first["advantages"][:3]] == [[0.5], [0.0], [-0.5]]
    assert list(first["score"][:3]) == [1.0, 0.0, 0.0] and first["reward_error"][3] == "TaskError: no box"
    assert list(first["response_ids"][0]) == [4] and first["policy_version"][0] == 3
    metrics = opened(tmp_path).metrics()
    assert list(metrics["training/global_step"]) == [9, 10]
    assert list(metrics["actor/lr"]) == pytest.approx([9e-6, 1e-5])
    assert metrics["reward/mean"][0] == 0.25 and metrics["timing_s/step"][0] == 9.0
    assert metrics["prime-rl/perf/mfu"][0] == 20.0
    again = imported(tmp_path)
    assert (again.steps, again.already) == (0, 2)


def test_a_step_is_complete_with_its_metrics(tmp_path: Path) -> None:
    out = tmp_path / "out"
    trained(out, 1, episode("a1", advantage=0.5))
    whole = write(out, "step_2/train/effective", episode("b1", advantage=0.5))
    assert imported(tmp_path).steps == 1
    logged(out, 2, {"optim/lr": 2e-6})  # the trainer has more to say
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "time/forw')
    assert imported(tmp_path).steps == 0
    text = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text(text[: text.rindex("\n") + 1])
    logged(out, 2, {"time/forward_backward": 4.0})
    content = whole.read_bytes()
    whole.write_bytes(content[:-20])
    assert imported(tmp_path).steps == 0
    whole.write_bytes(content)
    assert imported(tmp_path).steps == 1
    assert list(opened(tmp_path).trajectories()["source_episode_id"]) == ["a1", "z1", "b1"]


def test_evaluations_come_before_the_update(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in (1, 2, 3):
        trained(out, step, episode(f"a{step}", advantage=0.5))
    write(out, "step_1/eval/all", episode("v1", 0.5), failed("v2"))
    write(out, "step_1/eval/effective", episode("v1", 0.5))
    write(out, "step_3/eval/all", episode("w1", 0.75), episode("x1", env="math"))
    evaluated = write(out, "step_3/eval/effective", episode("w1", 0.75))  # math goes on
    done = imported(tmp_path)
    assert (done.steps, done.validations) == (2, 1)
    with evaluated.open("a") as file:
        file.write(json.dumps(episode("x1", env="math")) + "\n")
    done = imported(tmp_path)
    assert (done.steps, done.validations, done.already) == (1, 1, 3)
    rows = opened(tmp_path).validation()
    assert list(rows["iteration"]) == [0, 2, 2] and list(rows["score"]) == [0.5, 0.75, 1.0]
    assert list(rows["data_source"]) == ["gsm8k", "gsm8k", "math"]
    again = imported(tmp_path)
    assert (again.steps, again.validations, again.already) == (0, 0, 5)


def test_older_traces_without_metrics(tmp_path: Path) -> None:
    def trace(id: str) -> dict[str, Any]:
        info = {"env_name": "gsm8k", "group_id": 7, "episode_id": id}
        [one] = episode(id)["traces"]
        return {**one, "run": {"type": "train", "id": "r", "step": 1}, "info": info}

    write(tmp_path / "out", "step_1/train/all", trace("a1"), trace("b1"))
    write(tmp_path / "out", "step_2/train/all", trace("c1"))
    assert imported(tmp_path).steps == 1, "step 2 goes on"
    rows = opened(tmp_path).trajectories()
    assert list(rows["trajectory_id"]) == ["it000000-p00000-s00", "it000000-p00000-s01"]


def test_files_of_older_releases_are_refused(tmp_path: Path) -> None:
    step = tmp_path / "out" / "rollouts" / "step_1"
    step.mkdir(parents=True)
    PrimeRL(tmp_path / "out")  # a step has just begun
    (step / "train_rollouts.jsonl").touch()
    with pytest.raises(UserError, match=r"its steps have no traces\.jsonl, which prime-rl writes since 0\.7"):
        PrimeRL(tmp_path / "out")


def test_what_is_malformed_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder rollouts"):
        PrimeRL(tmp_path)
    trained(tmp_path / "out", 1, episode("a1"), {"id": "b", "ok": True})
    with pytest.raises(UserError, match=r"step_1/train/effective/traces\.jsonl, line 2: this is neither an episode"):
        imported(tmp_path)
    with (tmp_path / "out" / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 4: there is no step"):
        imported(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    trained(tmp_path / "out", 1, episode("a1", advantage=0.5))
    (tmp_path / "out" / "configs").mkdir()
    (tmp_path / "out" / "configs" / "trainer.json").write_text('{"model": {"name": "org/model"}, "max_steps": 5}')
    arguments = ["--from", "prime-rl", "--run", "run", "--store", f"file://{tmp_path}/runs"]
    done = CliRunner().invoke(app, ["import", str(tmp_path / "out" / "rollouts"), *arguments])
    assert done.exit_code == 0, done.output
    assert "run: 1 step and 0 validations imported, 2 trajectories" in done.output
    config = opened(tmp_path).config
    assert config.model.path == "org/model"
    assert config.observed is not None and config.observed.config["trainer"]["max_steps"] == 5
