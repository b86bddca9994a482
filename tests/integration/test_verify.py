"""Runs that were damaged, and what looks at all of them: verify, vacuum, resume, fork. Nothing committed is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.processes import Fault, Processes


@pytest.fixture(scope="module")
def begun(workspace: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A store with a run of which one iteration is closed, and the next has got to its advantages."""
    folder = tmp_path_factory.mktemp("begun")
    processes = Processes(folder)
    config = run_config(workspace, folder / "runs")
    fault = Fault("put", "trajectories/advantages/iteration=000001/", "before")
    assert processes.train(config, fault).wait(600) == -9
    processes.close()
    return folder / "runs"


def run_config(workspace: Path, store: Path) -> RunConfig:
    return tiny.config(
        workspace,
        run__name="run",
        run__store=f"file://{store}",
        reward__function="tests.rewards:letters",
        train__iterations=2,
    )


@pytest.fixture
def config(begun: Path, workspace: Path, tmp_path: Path) -> RunConfig:
    shutil.copytree(begun, tmp_path / "runs")
    return run_config(workspace, tmp_path / "runs")


@pytest.fixture
def run(config: RunConfig) -> Path:
    return Path(config.run.store.removeprefix("file://")) / "run"


Ratchet = Callable[..., tuple[int, str]]


@pytest.fixture
def ratchet(processes: Processes, config: RunConfig) -> Ratchet:
    """A command on the store; its exit code and what it said, without a traceback."""

    def ratchet(*arguments: object) -> tuple[int, str]:
        child = processes.cli(*arguments, "--store", config.run.store)
        code = child.wait(600)
        assert "Traceback" not in child.text, child.text
        return code, child.text

    return ratchet


def files(run: Path) -> dict[Path, bytes]:
    """But for what a heartbeat or a temporary file is."""
    names = (path for path in run.rglob("*") if path.is_file() and "heartbeat" not in path.name)
    return {path: path.read_bytes() for path in names if ".writing" not in path.parts}


def records(run: Path) -> list[Path]:
    return sorted((run / "log").glob("0*.json"))


def closing(run: Path) -> Path:
    """The record that closes iteration 0."""
    return next(path for path in records(run) if b'"kind":"close"' in path.read_bytes())


@pytest.fixture
def closed(run: Path, ratchet: Ratchet) -> Path:
    """A run of several iterations."""
    assert ratchet("resume", "run")[0] == 0
    return run


def test_vacuum_deletes_nothing_if_one_byte_of_the_log_is_not_as_it_was(ratchet: Ratchet, closed: Path) -> None:
    path = closing(closed)
    data = path.read_bytes()
    assert b"index/000000.1-0" in data
    path.write_bytes(data.replace(b"index/000000.1-0", b"index/000000.3-0"))
    before = files(closed)
    for command in (["vacuum", "run", "--dry-run"], ["vacuum", "run"]):
        code, text = ratchet(*command)
        assert code == 1
        assert "nothing is deleted, because it is unknown" in text or "does not follow" in text
    assert files(closed) == before
    path.write_bytes(data)
    code, text = ratchet("vacuum", "run")
    assert code == 0, text
    assert not open_run(f"file://{closed}").metrics().empty


@pytest.mark.parametrize("place", [1, -5, -2])
def test_a_lost_record_stops_whoever_would_write_and_put_back_all_is_well(
    ratchet: Ratchet, run: Path, config: RunConfig, place: int
) -> None:
    lost = records(run)[place]
    data = lost.read_bytes()
    lost.unlink()
    hint = run / "log" / "tail.json"
    hidden = hint.read_bytes()
    if place > 0:
        hint.unlink()  # else the log is read from the newest index on, and what is before it does not matter
    before = files(run)
    for command in (["resume", "run"], ["fork", "run", "--at", "1", "--run", "child"], ["vacuum", "run"]):
        code, text = ratchet(*command)
        if command[0] != "fork" or place < 0:
            assert code == 1, text
            assert f"log/{lost.name} is gone" in text
    assert files(run) == before
    code, text = ratchet("verify", "run")
    assert code == 1
    assert f"log/{lost.name} is gone" in text
    lost.write_bytes(data)
    hint.write_bytes(hidden)
    assert ratchet("resume", "run")[0] == 0
    history = History.of(config)
    history.check_sound()
    assert history.state.iteration == 2


def test_a_changed_setting_in_the_newest_claim_is_not_trained_with(ratchet: Ratchet, run: Path) -> None:
    for path in records(run)[1:]:
        path.unlink()
    (run / "log" / "tail.json").unlink()
    [claim] = records(run)
    assert b'"lr":0.001' in claim.read_bytes()
    claim.write_bytes(claim.read_bytes().replace(b'"lr":0.001', b'"lr":0.003'))
    code, text = ratchet("resume", "run")
    assert code == 1
    assert f"log/{claim.name} is damaged: restore it from a backup" in text


@pytest.mark.parametrize("left", ["run.json", ".writing/0123456789abcdef"])
def test_a_name_that_was_taken_by_nothing_but_leavings_is_free(ratchet: Ratchet, run: Path, left: str) -> None:
    """What a fork or a start leaves that is killed before its first record."""
    path = run.parent / "child" / left
    path.parent.mkdir(parents=True)
    path.write_text('{"schema_version": 2, "config": {}, "parent": null}')
    code, text = ratchet("fork", "run", "--at", "1", "--run", "child")
    assert code == 0, text
    assert ratchet("resume", "child")[0] == 0
    first = json.loads((run.parent / "child" / "run.json").read_text())
    assert (first["parent"], first["at"]) == (f"file://{run}", "1")
    code, text = ratchet("fork", "run", "--at", "1", "--run", "child")
    assert code == 2
    assert "a run exists at" in text


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_fork_that_was_killed_can_be_made_again(
    processes: Processes, ratchet: Ratchet, run: Path, config: RunConfig, at: str
) -> None:
    command = ("fork", "run", "--at", "1", "--run", "child", "--store", config.run.store)
    killed = processes.cli(*command, faults=(Fault("create", '{"kind":"fork"', at),))  # type: ignore[arg-type]
    assert killed.wait(600) == -9, killed.text
    code, text = ratchet("fork", "run", "--at", "1", "--run", "child")
    assert (code, "a run exists at" in text) == ((0, False) if at == "before" else (2, True)), text
    assert ratchet("resume", "child")[0] == 0
    assert json.loads((run.parent / "child" / "run.json").read_text())["at"] == "1"


def test_verify_finds_every_kind_of_damage_and_mends_copies(ratchet: Ratchet, run: Path) -> None:
    code, text = ratchet("verify", "run")
    assert code == 0, text
    assert "run is intact" in text
    assert "(is not referenced by any record)" not in text

    kinds = ("trajectories/score", "manifests", "index", "metrics", "checkpoints/actor")
    for kind in kinds:
        path = sorted(path for path in (run / kind).rglob("*") if path.is_file())[0]
        data = path.read_bytes()
        name = path.relative_to(run).as_posix()
        for damage, says in ((data[:-1] + bytes([data[-1] ^ 1]), "is damaged"), (None, "is gone")):
            path.unlink()
            if damage is not None:
                path.write_bytes(damage)
            code, text = ratchet("verify", "run")
            assert code == 1
            assert f"{name} {says}" in text
        path.write_bytes(data)

    (run / "run.json").write_text("{")
    (run / "log" / "tail.json").write_text("{")
    leftover = "trajectories/score/iteration=000000/1-9-part-00000.parquet"
    (run / leftover).write_bytes(b"PAR1")
    (run / "notes.md").write_text("mine")
    (run.parent / "victim").mkdir()
    (run.parent / "victim" / "a.txt").write_text("precious")
    (run / "x").symlink_to("../victim")
    code, text = ratchet("verify", "run", "--repair")
    assert code == 0, text
    assert "run.json is gone or damaged: repaired" in text
    assert "log/tail.json is damaged, or names no index: repaired" in text
    assert f"{leftover} is not referenced by any record: `ratchet vacuum` deletes it" in text
    assert "notes.md is not referenced by any record: Ratchet did not write it, and leaves it alone" in text
    assert json.loads((run / "run.json").read_text())["config"]["run"]["name"] == "run"
    code, text = ratchet("vacuum", "run", "--foreign")
    assert (code, text) == (0, "notes.md\n1 file that Ratchet did not write and never deletes\n")
    code, text = ratchet("vacuum", "run")
    assert (code, text) == (0, f"{leftover}\n1 file deleted\n")
    assert (run / "notes.md").read_text() + (run.parent / "victim" / "a.txt").read_text() == "mineprecious"
    code, text = ratchet("verify", "run")
    assert (code, leftover in text, "notes.md" in text) == (0, False, True)
    assert ratchet("resume", "run")[0] == 0


def test_verify_of_no_run(ratchet: Ratchet) -> None:
    code, text = ratchet("verify", "nothing")
    assert code == 2
    assert "there is no run at" in text


def test_a_damaged_registration_of_a_fork_is_named_and_nothing_is_deleted(ratchet: Ratchet, run: Path) -> None:
    assert ratchet("fork", "run", "--at", "1", "--run", "child")[0] == 0
    (run / "forks" / "child.json").write_text("{")
    before = files(run)
    code, text = ratchet("verify", "run")
    assert code == 1
    assert "forks/child.json is damaged, so the snapshots that the fork needs are unknown" in text
    assert ratchet("vacuum", "run")[0] == 1
    assert {path for path in before if path not in files(run)} == set()


def test_an_old_damaged_object_does_not_fail_a_finished_training(ratchet: Ratchet, run: Path) -> None:
    for what in ("metrics/iteration=000000.*", "trajectories/score/iteration=000000/*"):
        flip(min(run.glob(what)))
    code, text = ratchet("resume", "run")
    assert code == 0
    old = min(run.glob("trajectories/score/iteration=000000/*"))
    left_out = f"file://{run}/{old.relative_to(run)} is damaged"
    assert f"the report leaves out what it could not read: {left_out}" in text
    assert text.count("the report leaves out") == 1, "metrics lie in the index, too"
    assert left_out in (run / "report.html").read_text()


def test_a_report_says_what_it_could_not_read(ratchet: Ratchet, run: Path) -> None:
    assert ratchet("resume", "run")[0] == 0
    page = run.parent / "page.html"
    assert ratchet("report", "run", "-o", page)[0] == 0
    assert "Left out" not in page.read_text()
    [index] = run.glob("index/000000.*")
    shard = min(run.glob("trajectories/score/iteration=000001/*"))
    flip(index)
    shard.unlink()
    (run / "log" / "000000000000.json").unlink()
    code, text = ratchet("report", "run", "-o", page)
    assert code == 0
    for says in (f"{index.name} is damaged", f"{shard.name} is gone", "000000000000.json is gone"):
        assert says in text
        assert says in page.read_text()


def test_rows_are_read_without_the_manifests_of_updates(ratchet: Ratchet, run: Path, config: RunConfig) -> None:
    assert ratchet("resume", "run")[0] == 0
    for role in ("actor", "critic"):
        [manifest] = run.glob(f"manifests/iteration=000000/update_{role}.*")
        manifest.unlink()
    rows = config.trajectories_per_iteration * config.train.iterations
    assert len(open_run(f"file://{run}").trajectories()) == rows
    code, text = ratchet("query", "run", "select count(*) as n from trajectories")
    assert code == 0
    assert str(rows) in text


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("content", [None, "{", '{"config": 1}'])
def test_run_json_is_only_a_copy(ratchet: Ratchet, run: Path, content: str | None) -> None:
    path = run / "run.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert ratchet("report", "run", "-o", run.parent / "report.html")[0] == 0
    assert ratchet("resume", "run")[0] == 0
    assert json.loads(path.read_text())["config"]["run"]["name"] == "run"


def test_explain_without_the_first_record_says_so_in_one_line(ratchet: Ratchet, run: Path) -> None:
    records(run)[0].unlink()
    code, text = ratchet("explain", "run", "1")
    assert code == 1
    assert "log/000000000000.json is gone: restore it from a backup" in text


def test_half_written_files_of_dead_writers_are_deleted_after_an_hour(ratchet: Ratchet, run: Path) -> None:
    import os
    import time

    folder = run / ".writing"
    folder.mkdir(exist_ok=True)
    old, young = folder / ("a" * 32), folder / ("b" * 32)
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3700,) * 2)
    assert ratchet("vacuum", "run")[0] == 0
    assert (old.exists(), young.exists()) == (False, True)
    old.write_bytes(b"half")
    os.utime(old, (time.time() - 3700,) * 2)
    assert ratchet("resume", "run")[0] == 0
    assert (old.exists(), young.exists()) == (False, True)


def test_show_reads_and_writes_no_file(ratchet: Ratchet, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "written.csv"
    show = partial(ratchet, "show", "run", "--iteration", 0, "--where")
    for where in (
        "(select count(*) from read_csv('/etc/passwd', sep=':', header=false)) > 0",
        f"1=1) limit 1; copy (select 1) to '{target}' --",
        "1=1) limit 1; set enable_external_access = true --",
    ):
        code, text = show(where)
        assert code == 2, text
        assert len(text.strip().splitlines()) == 1
    assert not target.exists()
    for empty in ("", " ", "/* nothing */"):
        code, text = ratchet("query", "run", empty)
        assert code == 2
        assert "the query has 0 statements: write one" in text
    assert show("score >= 0")[0] == 0
