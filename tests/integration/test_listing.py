"""The list of a store's runs: their state, iterations, best validation, age and size."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from pathlib import Path

import psutil
import pytest
import s3fs

from flows.ui.documents import run_view
from infra.execution import heartbeat
from infra.execution.heartbeat import Beat
from infra.listing import FRESH_S, RunSummary, runs_of
from infra.runs import open_run
from infra.store.clock import born
from infra.store.object_store import ObjectStore
from infra.store.records import Claim
from infra.store.run_store import RunStore
from tasks.plan import fork_run
from tests.integration.test_stored_runs import STORED


@pytest.fixture
def store(shown_runs: Path, tmp_path: Path) -> Path:
    """A store of its own, with `ppo` and `open`, which names `ppo` as its parent."""
    for name in ("ppo", "open"):
        shutil.copytree(shown_runs / name, tmp_path / name)
    return tmp_path


def listed(store: Path) -> dict[str, RunSummary]:
    return {summary.name: summary for summary in runs_of(f"file://{store}")}


def beat(store: Path, name: str, host: str) -> None:
    process = psutil.Process()
    objects = ObjectStore(f"file://{store}/{name}")
    boot = heartbeat._boot_id()
    stored = Beat(term=1, host=host, boot=boot, pid=process.pid, born=born(process), count=1)
    objects.put(heartbeat.KEY, stored.model_dump_json().encode())


def test_runs_are_listed(store: Path) -> None:
    (store / "no-run").mkdir()
    (store / "file.txt").write_text("no run either")
    runs = listed(store)
    assert set(runs) == {"ppo", "open"}
    ppo = runs["ppo"]
    assert (ppo.state, ppo.iteration, ppo.iterations) == ("finished", 3, 3)
    assert ppo.url == f"file://{store}/ppo"
    assert ppo.bytes == sum(path.stat().st_size for path in (store / "ppo").rglob("*") if path.is_file())
    rates = open_run(ppo.url).validation().groupby("iteration")["score"].mean()
    assert ppo.best_validation is not None
    metric, best = ppo.best_validation
    assert metric == "val-core/countdown/reward/mean@1" and best == pytest.approx(rates.max())
    assert (runs["open"].state, runs["open"].iteration) == ("stopped", 2)
    assert runs["open"].age_s < ppo.age_s, "it was forked later"
    assert [summary.name for summary in runs_of(f"file://{store}")] == ["open", "ppo"]


def test_validations_of_older_releases_have_todays_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`old` has closed the iteration that begins with its validation; in `fork` that iteration is open."""
    shutil.copytree(STORED / "schema-3", tmp_path, dirs_exist_ok=True)
    store = tmp_path / "runs"
    store.mkdir()
    shutil.move(tmp_path / "run", store / "old")
    monkeypatch.chdir(tmp_path)  # the config's paths are relative
    old = open_run(f"file://{store}/old")
    fork_run(old, old.config.with_values({"run.store": f"file://{store}", "run.name": "fork"}), 0, "score")
    metric, score = "val-core/countdown/reward/mean@1", pytest.approx(old.validation()["score"].mean())
    runs = listed(store)
    for name in ("old", "fork"):
        best = runs[name].best_validation
        assert best is not None and best[0] == metric and best[1] == score
        run = open_run(f"file://{store}/{name}")
        view = run_view(run, name, run.metrics().to_dict("records"))
        assert view.titles[metric] == "validation: countdown/reward/mean@1"
        assert view.metrics[metric] == [score]


def test_a_run_is_running_while_its_driver_lives(store: Path) -> None:
    beat(store, "open", socket.gethostname())
    assert listed(store)["open"].state == "running"
    beat(store, "open", "another-host")
    assert listed(store)["open"].state == "running"
    path = store / "open" / heartbeat.KEY
    long_ago = path.stat().st_mtime - 2 * FRESH_S
    os.utime(path, (long_ago, long_ago))
    assert listed(store)["open"].state == "stopped"


def test_a_fit_is_called_one(store: Path) -> None:
    claim = Claim(config={"output": "model"}, code="", packages={}, threads=1, host="here", initial={})
    RunStore.at(f"file://{store}/sft").log.claim(claim)
    assert (listed(store)["sft"].state, listed(store)["sft"].iterations) == ("fit", None)


def test_a_damaged_run_hides_no_other(store: Path) -> None:
    newest = max((store / "ppo" / "log").glob("[0-9]*.json"))
    newest.write_bytes(newest.read_bytes()[:-20])
    runs = listed(store)
    assert runs["ppo"].state == "damaged"
    assert f"{newest.name} is damaged" in runs["ppo"].problem
    assert runs["open"].state == "stopped"


def test_a_store_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert runs_of(f"file://{tmp_path}/nowhere") == []


def test_a_bucket(store: Path, s3: str) -> None:
    url = f"{s3}/listed-{uuid.uuid4().hex}"
    assert runs_of(url) == []
    s3fs.S3FileSystem().put(f"{store}/ppo", f"{url}/ppo", recursive=True)
    [there], here = runs_of(url), listed(store)["ppo"]
    assert (there.name, there.state, there.iteration, there.best_validation, there.bytes) == (
        here.name,
        here.state,
        here.iteration,
        here.best_validation,
        here.bytes,
    )
