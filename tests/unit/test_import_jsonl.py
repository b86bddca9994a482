"""JSON lines of any program, imported as a run: once, again, and while they are written."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.infra.observe import importing
from ratchet.infra.observe.importing import Imported, import_run
from ratchet.infra.observe.sources.jsonl import JSONLines
from ratchet.infra.runs.run import Run, open_run
from ratchet.infra.runs.verify import verify
from ratchet.infra.store.log import Fenced
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.metrics import STEP
from tests import tiny
from tests.bare_run import claimed

MAP = {"iteration": "step", "response": "output", "score": "reward.total"}


def line(step: int, prompt: str = "2+2?", output: str = "4", **fields: Any) -> dict[str, Any]:
    return {"step": step, "prompt": prompt, "output": output, "reward": {"total": 1.0}, **fields}


def write(file: Path, *rows: Any) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.jsonl"


def imported(file: Path, name: str = "mine", mapping: dict[str, str] = MAP, **options: Any) -> Imported:
    return import_run(JSONLines(file, mapping), name, f"file://{file.parent}/runs", **options)


def stored(file: Path, name: str = "mine") -> Run:
    run = open_run(f"{file.parent}/runs/{name}")
    assert list(verify(run.store)) == []
    return run


def test_fields_are_mapped_and_the_rest_is_kept(file: Path) -> None:
    write(file, line(1, level=3), line(1, "3+3?", "6"), line(2, advantages=0.5, response_ids=[7, 8]))
    done = imported(file)
    assert (done.steps, done.validations, done.trajectories, done.already) == (2, 0, 3, 0)
    rows = stored(file).trajectories().to_dict("records")
    assert [(row["prompt"], row["response"], row["score"]) for row in rows][:2] == [
        ("2+2?", "4", 1.0),
        ("3+3?", "6", 1.0),
    ]
    assert rows[0]["source_level"] == 3 and list(rows[2]["advantages"]) == [0.5, 0.5]
    assert "source_reward" not in rows[0]  # a column takes a part of it
    assert stored(file).metrics()[STEP].tolist() == [1, 2]


def test_importing_again_adds_nothing_and_a_grown_file_its_new_steps(file: Path) -> None:
    write(file, line(1), line(2))
    imported(file)
    again = imported(file)
    assert (again.steps, again.already) == (0, 2) and stored(file).state.iteration == 2
    write(file, line(1), line(2), line(3))
    assert imported(file).steps == 1 and stored(file).metrics()[STEP].tolist() == [1, 2, 3]


def test_a_changed_step_is_refused_and_the_remedy_works(file: Path) -> None:
    write(file, line(1), line(2))
    imported(file)
    write(file, line(1), line(2, output="5"), line(3))
    with pytest.raises(UserError, match=r"rollouts.jsonl: step 2 has changed since it was imported: import .*--run"):
        imported(file)
    assert stored(file).trajectories()["response"].tolist() == ["4", "4"]
    assert imported(file, "another").steps == 3
    assert stored(file, "another").trajectories()["response"].tolist() == ["4", "5", "4"]


def test_a_step_before_the_newest_is_refused(file: Path) -> None:
    write(file, line(2))
    imported(file)
    write(file, line(1), line(2))
    with pytest.raises(UserError, match="step 1 comes before step 2, which the run has: import"):
        imported(file)
    write(file, line(2), line(1, split="validation"))
    done = imported(file)
    assert (done.validations, dict(done.left_out)) == (0, {"validations that come after later steps": 1})


def test_validations(file: Path) -> None:
    split = {"split": "validation"}
    write(file, line(0, **split, reward={"total": 0.0}), line(1), line(1, **split), line(2))
    done = imported(file)
    assert (done.steps, done.validations) == (2, 2)
    scores = [stored(file).store.validation_metrics(version) for version in (0, 1)]
    assert [metrics["val-core/jsonl/reward/mean@1"] for metrics in scores] == [0.0, 1.0]
    again = imported(file)
    assert (again.steps, again.validations, again.already) == (0, 0, 4)


def test_a_line_that_is_cut_is_left_for_later(file: Path) -> None:
    write(file, line(1), line(2), line(2))
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert imported(file).steps == 1
    file.write_bytes(whole[:-1])  # only the line feed is missing
    assert imported(file).steps == 1
    assert len(stored(file).trajectories()) == 3


def test_files_of_a_folder_may_share_steps(tmp_path: Path) -> None:
    (folder := tmp_path / "ranks").mkdir()
    write(folder / "0.jsonl", line(1), line(2))
    write(folder / "1.jsonl", line(1, output="5"), line(2), line(2, output="6"))
    whole = (folder / "1.jsonl").read_bytes()
    (folder / "1.jsonl").write_bytes(whole[:-5])
    assert imported(folder).steps == 1
    (folder / "1.jsonl").write_bytes(whole)
    assert imported(folder).steps == 1
    assert stored(folder).trajectories()["response"].tolist() == ["4", "5", "4", "4", "6"]


def test_separators_within_texts_and_numbers_that_are_none(file: Path) -> None:
    rows = [line(1, output="a\u2028b\x85c"), line(1, reward={"total": float("nan")})]
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    imported(file)
    assert stored(file).trajectories()["response"].tolist() == ["a\u2028b\x85c", "4"]
    assert stored(file).metrics()["reward/mean"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step": 1}\n{"step": }\n', r"rollouts.jsonl, line 2: this is no JSON"),
        ("[1]\n", r"rollouts.jsonl, line 1: this is no JSON object"),
        (
            '{"output": "a"}\n',
            r"line 1: the field 'step' is no number of a step: .*--map iteration=FIELD.*; fields are output",
        ),
        ('{"step": 1, "output": 5}\n', r"rollouts.jsonl: step 1: stage generate, row 0: response is no string"),
        ('{"step": 1, "prompt": "a"}\n', r"rollouts.jsonl: step 1: stage generate, row 0 has no response"),
        ('{"step": 1, "output": "a", "reward": {"total": "x"}}\n', r"step 1: stage score, row 0: score is no float"),
        ('{"step": NaN, "output": "a"}\n', r"line 1: the field 'step' is no number of a step"),
        ('{"step": 1, "output": "\\ud800"}\n', r"step 1: stage generate, row 0: response is no string"),
        ("", r"there is no complete step"),
    ],
)
def test_mistakes_name_file_and_row(text: str, says: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        imported(file)


def test_mappings_are_checked(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no JSON lines"):
        JSONLines(file, MAP)
    write(file, line(1))
    with pytest.raises(UserError, match=r"--map reponse=…: there is no such column"):
        JSONLines(file, {"reponse": "output"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there are no JSON lines"):
        JSONLines(tmp_path / "empty", MAP)


def test_runs_of_others_are_refused(file: Path) -> None:
    write(file, line(1))
    claimed(f"file://{file.parent}/runs/own")
    with pytest.raises(UserError, match="own is Ratchet's own run, and jsonl would write to it"):
        imported(file, "own")
    import_run(JSONLines(file, MAP, trainer="mine"), "theirs", f"file://{file.parent}/runs")
    with pytest.raises(UserError, match="theirs is mine's run, and jsonl would write to it"):
        imported(file, "theirs")


def test_tokens_are_made_of_texts(file: Path, workspace: Path) -> None:
    write(file, line(1, "3 + 4 =", "7"), line(1, "3 + 4 =", "7", response_ids=[1, 2, 3]))
    model = tiny.config(workspace).model.path
    imported(file, tokenizer=model)
    rows = stored(file).trajectories().to_dict("records")
    assert len(rows[0]["response_ids"]) > 0 and list(rows[1]["response_ids"]) == [1, 2, 3]
    config = stored(file).config
    assert config.model.path == model and config.observed is not None
    assert config.observed.config["tokens"] == f"made again from texts with {model}"


def in_background(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """Runs something beside the test, then interrupts the test as Ctrl-C does."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def wait_for_steps(store: RunStore, count: int) -> None:
    deadline = time.monotonic() + 120
    while store.log.read().iteration < count:
        assert time.monotonic() < deadline, f"{count} steps are not there"
        time.sleep(0.01)


def test_following_adds_steps_as_they_are_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "LOOK_S", 0.02)
    write(file, line(1), line(2))
    store = RunStore.at(f"file://{file.parent}/runs/mine")

    def trainer() -> None:
        wait_for_steps(store, 1)  # the newest may still grow
        with file.open("a") as opened:
            opened.write(json.dumps(line(2)) + "\n" + json.dumps(line(3)) + "\n")
        wait_for_steps(store, 2)
        with pytest.raises(Fenced, match="run mine is being driven"):
            imported(file)

    thread, errors = in_background(trainer)
    done = imported(file, follow=True)
    thread.join()
    assert not errors and (done.steps, done.trajectories) == (2, 3)
    assert imported(file).steps == 1
    assert len(stored(file).trajectories()) == 4
