"""Generations and metrics of verl as a run."""

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
from ratchet.infra.observe.sources.verl import Verl
from ratchet.rlhf.errors import UserError

GROUPS = ("0c8e2f0e-7a43-4f57-9a3e-0d5a6a3f8f11", "1d8e2f0e-7a43-4f57-9a3e-0d5a6a3f8f12")


def generation(output: str, score: float, step: int, uid: str | None = None, **fields: Any) -> dict[str, Any]:
    of_group = {} if uid is None else {"uid": uid}
    return {"input": "user\n7*8?", "output": output, "gts": "56", "score": score, "step": step, **fields, **of_group}


def write(file: Path, *rows: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def trained(folder: Path, step: int) -> None:
    """Writes a step of verl 0.9: two groups, of which the first has two samples, and a row that fills up the batch."""
    write(
        folder / f"{step}.jsonl",
        generation("56\u2028!", 1.0, step, f"{GROUPS[0]}_0_0"),
        generation("54", 0.0, step, f"{GROUPS[0]}_1_0"),
        generation("56", 1.0, step, f"{GROUPS[1]}_0_0", input="user\n8*7?"),
        generation("", 0.0, step, f"pad{'5f' * 16}_0_0", input=""),
    )


def imported(tmp_path: Path, *folders: Path, metrics: Path | None = None) -> Imported:
    return import_run(Verl(*folders, metrics=metrics), "run", f"file://{tmp_path}/runs")


def opened(tmp_path: Path) -> ratchet.Run:
    return ratchet.open_run(f"file://{tmp_path}/runs/run")


def test_groups_by_uid(tmp_path: Path) -> None:
    for step in (9, 10):  # in the order of numbers
        trained(tmp_path / "rollouts", step)
    assert imported(tmp_path, tmp_path / "rollouts").trajectories == 6
    rows = opened(tmp_path).trajectories()
    assert list(rows["iteration"]) == [0, 0, 0, 1, 1, 1]
    assert list(rows["trajectory_id"][:3]) == ["it000000-p00000-s00", "it000000-p00000-s01", "it000000-p00001-s00"]
    assert list(rows["response"][:3]) == ["56\u2028!", "54", "56"]
    assert list(rows["prompt"][:3]) == ["user\n7*8?", "user\n7*8?", "user\n8*7?"]
    assert list(rows["score"][:3]) == [1.0, 0.0, 1.0]
    assert set(rows["ground_truth"]) == {"56"}
    assert rows["source_uid"][1] == f"{GROUPS[0]}_1_0"
    assert list(opened(tmp_path).metrics()["training/global_step"]) == [9, 10]
    again = imported(tmp_path, tmp_path / "rollouts")
    assert (again.steps, again.already) == (0, 2)
    trained(tmp_path / "rollouts", 11)
    assert imported(tmp_path, tmp_path / "rollouts").steps == 1


def test_conversations_of_a_session_are_branches(tmp_path: Path) -> None:
    group = GROUPS[0]
    write(
        tmp_path / "rollouts" / "1.jsonl",
        generation("first", 1.0, 1, f"{group}_0_0"),
        generation("second", 1.0, 1, f"{group}_0_1"),
        generation("other", 0.0, 1, f"{group}_1_0"),
    )
    imported(tmp_path, tmp_path / "rollouts")
    rows = opened(tmp_path).trajectories()
    first = "it000000-p00000-s00"
    assert list(rows["trajectory_id"]) == [first, f"{first}-b01", "it000000-p00000-s01"]
    assert opened(tmp_path).metrics()["reward/mean"][0] == 0.5, "a trajectory counts once"


def test_older_rows_have_parts_and_no_groups(tmp_path: Path) -> None:
    write(
        tmp_path / "rollouts" / "1.jsonl",
        generation("56", 1.0, 1, acc=True, pred="56", overlong_reward=-0.5, request_id="r1"),
        generation("8", 1.0, 1, input="user\n2*4?", gts=["8", "eight"], acc=True, pred="8", overlong_reward=None),
        generation("54", float("nan"), 1, acc=False, pred="54", overlong_reward=float("-inf"), request_id="r3"),
    )
    imported(tmp_path, tmp_path / "rollouts")
    rows = opened(tmp_path).trajectories()
    assert list(rows["prompt_id"]) == ["it000000-p00000", "it000000-p00001", "it000000-p00000"]
    assert list(rows["sample"]) == [0, 0, 1]
    assert rows["reward_parts"][0] == {"acc": 1.0, "overlong_reward": -0.5}
    assert rows["reward_parts"][1] == {"acc": 1.0}
    assert list(rows["source_pred"]) == ["56", "8", "54"]
    assert list(rows["source_request_id"].fillna("")) == ["r1", "", "r3"]
    assert json.loads(rows["ground_truth"][1]) == ["8", "eight"] and rows["ground_truth_is_json"][1]
    assert opened(tmp_path).metrics()["reward/acc/mean"][0] == pytest.approx(2 / 3)


def test_validations_come_before_the_next_step(tmp_path: Path) -> None:
    for step in (1, 2):
        trained(tmp_path / "rollouts", step)
    for step, score in ((0, 0.0), (1, 1.0), (2, 0.5)):
        # verl's score is the shaped reward; a part of the same name hides it
        write(tmp_path / "val" / f"{step}.jsonl", generation("56", 3.0, step, reward=score, acc=score > 0, pred="x"))
    done = imported(tmp_path, tmp_path / "rollouts", tmp_path / "val")
    assert (done.steps, done.validations) == (2, 3)
    rows = opened(tmp_path).validation()
    assert list(rows["iteration"]) == [0, 1, 2]
    assert list(rows["score"]) == [0.0, 1.0, 0.5]
    assert rows["reward_parts"][1] == {"acc": 1.0, "score": 3.0}
    assert list(rows["source_pred"]) == ["x", "x", "x"]
    again = imported(tmp_path, tmp_path / "rollouts", tmp_path / "val")
    assert (again.steps, again.validations, again.already) == (0, 0, 5)


def test_a_validation_that_comes_too_late_is_left_out(tmp_path: Path) -> None:
    for step in (1, 2):
        trained(tmp_path / "rollouts", step)
    imported(tmp_path, tmp_path / "rollouts")
    write(tmp_path / "val" / "1.jsonl", generation("56", 1.0, 1, reward=1.0))
    done = imported(tmp_path, tmp_path / "rollouts", tmp_path / "val")
    assert done.validations == 0 and list(done.left_out) == ["validations that come after later steps"]


def test_metrics_keep_their_names(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        trained(tmp_path / "rollouts", step)
    write(
        tmp_path / "logs.jsonl",
        {"step": 1, "data": {"actor/lr": 1e-6, "actor/entropy": None, "note": "x"}},
        {"step": 2, "data": {"actor/lr": 2e-6, "training/global_step": 7}},
        {"step": 2, "data": {"critic/score/mean": 0.25}},
    )
    with (tmp_path / "logs.jsonl").open("a") as file:
        file.write('{"step": 3, "data": {"actor/')
    done = imported(tmp_path, tmp_path / "rollouts", metrics=tmp_path / "logs.jsonl")
    assert set(done.left_out) == {"metric actor/entropy", "metric note"}
    metrics = opened(tmp_path).metrics()
    assert list(metrics["training/global_step"]) == [1, 2], "step 3 waits for its metrics"
    assert list(metrics["actor/lr"]) == [1e-6, 2e-6]
    assert metrics["critic/score/mean"][1] == 0.25, "verl's own value counts"


def test_a_file_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    trained(tmp_path / "rollouts", 1)
    trained(tmp_path / "rollouts", 2)
    whole = (tmp_path / "rollouts" / "2.jsonl").read_bytes()
    for size in (0, whole.index("\u2028".encode()) + 1, len(whole) - 5):
        (tmp_path / "rollouts" / "2.jsonl").write_bytes(whole[:size])
        imported(tmp_path, tmp_path / "rollouts")
        assert opened(tmp_path).state.iteration == 1
    (tmp_path / "rollouts" / "2.jsonl").write_bytes(whole)
    assert imported(tmp_path, tmp_path / "rollouts").steps == 1
    trained(tmp_path / "rollouts", 1)
    with (tmp_path / "rollouts" / "1.jsonl").open("a") as file:
        file.write(json.dumps(generation("55", 0.0, 1)) + "\n")
    with pytest.raises(UserError, match=r"1\.jsonl: step 1 has changed since it was imported"):
        imported(tmp_path, tmp_path / "rollouts")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"input": "a", "output": 1, "score": 1}', r"1\.jsonl, line 2: there is no text 'output'"),
        ('{"input": "a", "output": "b", "score": "good"}', r"1\.jsonl, line 2: score is 'good', and no number"),
        ("[1]", r"1\.jsonl, line 2: this is no JSON object"),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, line: str, says: str) -> None:
    write(tmp_path / "rollouts" / "1.jsonl", generation("56", 1.0, 1))
    with (tmp_path / "rollouts" / "1.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=says):
        imported(tmp_path, tmp_path / "rollouts")


def test_the_command(tmp_path: Path) -> None:
    trained(tmp_path / "out" / "rollouts", 1)
    write(tmp_path / "out" / "val" / "0.jsonl", generation("56", 1.0, 0, reward=1.0))
    write(tmp_path / "logs.jsonl", {"step": 0, "data": {}}, {"step": 1, "data": {"actor/lr": 1e-6}})
    (tmp_path / "out" / ".hydra").mkdir()
    (tmp_path / "out" / ".hydra" / "config.yaml").write_text(
        "actor_rollout_ref: {model: {path: org/model}}\ntrainer: {api_key: secret}\n"
    )
    arguments = ["import", str(tmp_path / "out" / "rollouts"), "--from", "verl", "--run", "run"]
    arguments += ["--store", f"file://{tmp_path}/runs", "--validation", str(tmp_path / "out" / "val")]
    arguments += ["--metrics", str(tmp_path / "logs.jsonl")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "run: 1 step and 1 validation imported, 4 trajectories" in done.output
    config = opened(tmp_path).config
    assert config.model.path == "org/model"
    assert config.observed is not None
    assert config.observed.config["trainer"] == {"api_key": "(left out)"}
    wrong = CliRunner().invoke(app, [*arguments[:2], "--from", "trl", *arguments[4:]])
    assert wrong.exit_code != 0 and "--validation is for --from verl" in str(wrong.exception or wrong.output)
