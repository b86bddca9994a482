"""The list of a store's runs: their state, iterations, best validation, age, recipe and parent."""

from __future__ import annotations

import io
import os
import shutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import s3fs
from rich.console import Console

from ratchet.flows.commands import tables
from ratchet.flows.ui.documents import run_view
from ratchet.infra.execution import heartbeat
from ratchet.infra.execution.heartbeat import Beat, beating
from ratchet.infra.execution.stopping import Stopping
from ratchet.infra.runs.listing import FRESH_S, RunSummary, runs_of
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.clock import born
from ratchet.infra.store.log import slot_key
from ratchet.infra.store.manifest import Fingerprint, Manifest
from ratchet.infra.store.object_store import LocalBackend, ObjectStore
from ratchet.infra.store.records import Claim, Snapshot, StageCommit
from ratchet.infra.store.run_store import VALIDATE, RunStore
from ratchet.rlhf.errors import UserError
from ratchet.tasks.analysis.plan import fork_run
from tests import tiny
from tests.stored import STORED


@pytest.fixture
def store(ppo_runs: Path, tmp_path: Path) -> Path:
    """A store of its own, with `ppo` and `open`, which names `ppo` as its parent."""
    for name in ("ppo", "open"):
        shutil.copytree(ppo_runs / name, tmp_path / name)
    return tmp_path


def listed(store: Path) -> dict[str, RunSummary]:
    return {summary.name: summary for summary in runs_of(f"file://{store}")}


def beat(store: Path, name: str, host: str) -> None:
    process = psutil.Process()
    objects = ObjectStore(f"file://{store}/{name}")
    boot = heartbeat.boot_id()
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
    assert (ppo.recipe, ppo.parent) == ("gae", "")
    rates = open_run(ppo.url).validation().groupby("iteration")["score"].mean()
    assert ppo.best_validation is not None
    metric, best = ppo.best_validation
    assert metric == "val-core/countdown/reward/mean@1" and best == pytest.approx(rates.max())
    assert (runs["open"].state, runs["open"].iteration) == ("not started", 2)
    assert (runs["open"].recipe, runs["open"].parent) == ("gae", "ppo")
    assert runs["open"].age_s < ppo.age_s, "it was forked later"
    assert [summary.name for summary in runs_of(f"file://{store}")] == ["open", "ppo"]


@pytest.mark.promise
def test_the_validation_of_an_open_iteration_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`old` has closed the iteration that begins with its validation; in `fork` that iteration is open."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
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
        view = run_view(run, name, run.metric_rows())
        assert view.titles[metric] == "validation: countdown/reward/mean@1"
        assert view.metrics[metric] == [score]


def validate(store: RunStore, iteration: int, metrics: dict[str, float]) -> None:
    """Commits the validation of the open iteration."""
    place = {"iteration": iteration, "stage": VALIDATE}
    parts = Fingerprint(parts={})
    manifest = Manifest(**place, term=1, attempt=0, fingerprint=parts, config={}, metrics=metrics)
    store.commit(
        StageCommit(**place, manifest=store.write_manifest(manifest), fingerprint=parts.digest),
        Snapshot(version=iteration, roles={}),
    )


def validated(folder: Path, values: list[dict[str, float]], **changes: object) -> RunStore:
    """A run of 9 iterations that has only validations and snapshots; that of the open iteration is the last."""
    store = RunStore.at(f"file://{folder}/validated")
    validation = {f"validation__{key}": value for key, value in {"data": "none", "every": 1, **changes}.items()}
    config = tiny.config(folder, train__iterations=9, **validation).model_dump(mode="json")
    store.log.claim(Claim(config=config, code="", packages={}, threads=1, host="here", initial={}))
    for iteration, metrics in enumerate(values):
        validate(store, iteration, metrics)
        if iteration < len(values) - 1:
            store.close(metrics)
    return store


@pytest.mark.promise
@pytest.mark.parametrize(
    ("metric", "best", "version"),
    [
        (None, ("val-core/a/reward/mean@2", 0.6), 1),
        ("val-core/b/reward/mean@2", ("val-core/b/reward/mean@2", 0.9), 0),
        ("val-core/a/reward/best@2", ("val-core/a/reward/best@2", 1.0), 2),
        ("val-core/c/reward/mean@2", None, None),
    ],
)
def test_the_best_validation_is_that_of_the_best_snapshot(
    metric: str | None, best: tuple[str, float] | None, version: int | None, tmp_path: Path
) -> None:
    names = ("val-core/b/reward/mean@2", "val-core/a/reward/best@2", "val-core/a/reward/mean@2")
    values = [(0.9, 0.7, 0.5), (0.1, 0.8, 0.6), (0.2, 1.0, 0.4)]
    store = validated(tmp_path, [dict(zip(names, row, strict=True)) for row in values], metric=metric)
    assert listed(tmp_path)["validated"].best_validation == best
    if version is None:
        with pytest.raises(UserError, match=r"no snapshot of .* was validated"):
            open_run(store.url).best_snapshot()
    else:
        assert open_run(store.url).best_snapshot() == version


@pytest.mark.promise
@pytest.mark.parametrize(
    ("scores", "changes", "state"),
    [
        ([0.5, 0.5, 0.4, 0.4], {"patience": 2}, "ended early"),
        ([0.5, 0.5, 0.4, 0.9], {"patience": 2}, "ended early"),  # the last one, after the end, changes nothing
        ([0.5, 0.5, 0.6, 0.4], {"patience": 2}, "stopped"),
        ([0.5, 0.5, 0.4, 0.4], {"patience": 3}, "stopped"),
        ([0.5, 0.5, 0.4, 0.4], {"patience": 1, "every": 2}, "ended early"),
        ([0.5, 0.4, 0.6, 0.4], {"patience": 1, "every": 2}, "stopped"),
        ([0.5, 0.5, 0.4, 0.4], {"patience": 2, "metric": "val-core/a/reward/best@2"}, "stopped"),
        ([0.5, 0.5, 0.4, 0.4], {"patience": None}, "stopped"),
    ],
)
def test_a_run_that_lost_patience_has_ended_early(
    scores: list[float], changes: dict[str, object], state: str, tmp_path: Path
) -> None:
    better = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
    values = [
        {"val-core/a/reward/mean@2": score, "val-core/a/reward/best@2": better[iteration]}
        for iteration, score in enumerate(scores)
    ]
    store = validated(tmp_path, values, **changes)
    assert listed(tmp_path)["validated"].state == state
    run = open_run(store.url)
    assert run_view(run, "validated", run.metric_rows()).state == state
    assert run.config.ends_early(run.deciding_scores()) == (state == "ended early"), "as the driver decides"
    console = Console(record=True, width=160, file=io.StringIO())
    tables.status(console, run, 10)
    says = f"ended early: the last {changes['patience']} validations were no better"
    assert (says in console.export_text()) == (state == "ended early")
    beat(tmp_path, "validated", socket.gethostname())
    assert listed(tmp_path)["validated"].state == ("running" if state == "stopped" else state)


def test_a_run_is_running_while_its_driver_lives(store: Path) -> None:
    beat(store, "open", socket.gethostname())
    assert listed(store)["open"].state == "running"
    beat(store, "open", "another-host")
    assert listed(store)["open"].state == "running"
    path = store / "open" / heartbeat.KEY
    long_ago = path.stat().st_mtime - 2 * FRESH_S
    os.utime(path, (long_ago, long_ago))
    assert listed(store)["open"].state == "stopped"


@pytest.mark.promise
def test_a_fit_is_called_one(store: Path) -> None:
    claim = Claim(config={"output": "model"}, code="", packages={}, threads=1, host="here", initial={})
    fit = RunStore.at(f"file://{store}/sft").log
    fit.claim(claim)
    for _ in range(2):  # from its log, and from the beat of its driver
        summary = listed(store)["sft"]
        assert (summary.state, summary.iteration, summary.iterations, summary.recipe) == ("fit", 0, None, "")
        with beating(fit, Stopping("")):
            pass


@pytest.mark.promise
def test_a_damaged_run_hides_no_other(store: Path) -> None:
    (store / "ppo" / heartbeat.KEY).write_bytes(b"{")
    newest = max((store / "ppo" / "log").glob("[0-9]*.json"))
    newest.write_bytes(newest.read_bytes()[:-20])
    runs = listed(store)
    assert runs["ppo"].state == "damaged"
    assert f"{newest.name} is damaged" in runs["ppo"].problem
    assert runs["open"].state == "not started"


@pytest.mark.promise
def test_a_store_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert runs_of(f"file://{tmp_path}/nowhere") == []


@pytest.mark.promise
def test_a_bucket(store: Path, s3: str) -> None:
    url = f"{s3}/listed-{uuid.uuid4().hex}"
    assert runs_of(url) == []
    s3fs.S3FileSystem().put(f"{store}/ppo", f"{url}/ppo", recursive=True)
    assert told(runs_of(url)) == [row for row in told(runs_of(f"file://{store}")) if row[0] == "ppo"]


# What a list reads.


def told(summaries: Sequence[RunSummary]) -> list[tuple[object, ...]]:
    """All that summaries say, but for the folder and the age."""
    parts = [asdict(summary) for summary in summaries]
    return [tuple(value for name, value in row.items() if name not in ("url", "age_s")) for row in parts]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of a store on disk that were read, while the test lasts."""
    keys, read = [], LocalBackend.get

    def get(self: LocalBackend, key: str) -> bytes:
        keys.append(key)
        return read(self, key)

    monkeypatch.setattr(LocalBackend, "get", get)
    return keys


@pytest.mark.promise
def test_a_run_costs_one_read(store: Path, reads: list[str]) -> None:
    shutil.rmtree(store / "open")
    for name in ("beta", "alpha"):
        shutil.copytree(store / "ppo", store / name)
    for _ in range(2):
        reads.clear()
        summaries = runs_of(f"file://{store}")
        assert reads == [heartbeat.KEY] * 3
        assert [summary.name for summary in summaries] == ["alpha", "beta", "ppo"], "they are of the same age"
    for name in ("alpha", "beta", "ppo"):
        (store / name / heartbeat.KEY).unlink()
    assert told(runs_of(f"file://{store}")) == told(summaries), "the log says the same"


@pytest.mark.promise
def test_a_run_in_a_bucket_costs_one_request(store: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{s3}/listed-{uuid.uuid4().hex}"
    for name in ("a", "b", "c"):
        s3fs.S3FileSystem().put(f"{store}/ppo/log", f"{url}/{name}/log", recursive=True)
    requests, send = Counter[str](), s3fs.S3FileSystem._call_s3

    async def counted(self: s3fs.S3FileSystem, method: str, *args: object, **kwargs: object) -> object:
        requests[method] += 1
        return await send(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    for _ in range(2):
        requests.clear()
        assert [summary.name for summary in runs_of(url)] == ["a", "b", "c"]
        assert requests["get_object"] == 3
        assert requests.total() == 4, "one lists the store"


SCORE = "val-core/a/reward/mean@2"


@pytest.mark.promise
def test_a_run_that_moves_on_is_read_again(tmp_path: Path, reads: list[str]) -> None:
    """The driver reads each index once, too."""
    store = validated(tmp_path, [{SCORE: 0.5}, {SCORE: 0.7}, {SCORE: 0.6}])
    for closed, best in ((2, 0.7), (3, 0.8)):
        with beating(store.log, Stopping("")):
            reads.clear()
            summary = listed(tmp_path)["validated"]
            assert (summary.state, summary.iteration, summary.best_validation) == ("running", closed, (SCORE, best))
            assert reads == [heartbeat.KEY]
            store.close({SCORE: 0.8})
            reads.clear()
        assert [key.partition("/")[0] for key in reads if not key.startswith("log/")] == ["index"]
        summary = listed(tmp_path)["validated"]
        assert (summary.state, summary.iteration, summary.best_validation) == ("stopped", closed + 1, (SCORE, 0.8))
        store.commit(Snapshot(version=closed + 1, roles={}))
        if closed == 2:
            validate(store, 3, {SCORE: 0.1})


@pytest.mark.promise
@pytest.mark.parametrize("here", [True, False])
def test_a_killed_driver_may_have_committed_after_its_last_beat(here: bool, tmp_path: Path, reads: list[str]) -> None:
    store = validated(tmp_path, [{SCORE: 0.5}])
    with beating(store.log, Stopping("")):
        last = heartbeat.read(store.objects)
    assert last is not None and last.standing is not None
    dead = last.model_copy(update={"born": 0.0} if here else {"host": "another-host"})
    store.objects.put(heartbeat.KEY, dead.model_dump_json().encode())
    long_ago = time.time() - 2 * FRESH_S
    os.utime(tmp_path / "validated" / heartbeat.KEY, (long_ago, long_ago))
    reads.clear()
    assert (listed(tmp_path)["validated"].state, listed(tmp_path)["validated"].iteration) == ("stopped", 0)
    assert sorted(reads) == [slot_key(last.standing.slot + 1), heartbeat.KEY, heartbeat.KEY]
    heir = RunStore.at(store.url)
    heir.log.read()
    heir.log.term = 1
    heir.close({SCORE: 0.9})
    dead = dead.model_copy(update={"count": dead.count + 1})
    store.objects.put(heartbeat.KEY, dead.model_dump_json().encode())
    os.utime(tmp_path / "validated" / heartbeat.KEY, (long_ago, long_ago))
    for _ in range(2):
        reads.clear()
        summary = listed(tmp_path)["validated"]
        assert (summary.state, summary.iteration, summary.best_validation) == ("stopped", 1, (SCORE, 0.9))
    assert reads == [heartbeat.KEY], "what it committed is read once"


@pytest.mark.promise
def test_what_a_driver_cannot_say_is_read_from_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = validated(tmp_path, [{SCORE: 0.5}, {SCORE: 0.7}])
    [index] = (tmp_path / "validated" / "index").iterdir()
    data = index.read_bytes()
    index.write_bytes(data[:-9])
    with beating(store.log, Stopping("")):
        summary = listed(tmp_path)["validated"]
        assert summary.state == "damaged" and f"{index.name} is damaged" in summary.problem
    index.write_bytes(data)
    summary = listed(tmp_path)["validated"]
    assert (summary.state, summary.iteration, summary.best_validation) == ("stopped", 1, (SCORE, 0.7))
    monkeypatch.setattr(heartbeat, "LOOK_S", -1.0)  # a history that takes longer to read
    with beating(store.log, Stopping("")):
        beat = heartbeat.read(store.objects)
        assert beat is not None and beat.standing is None
        summary = listed(tmp_path)["validated"]
        assert (summary.state, summary.iteration, summary.best_validation) == ("running", 1, (SCORE, 0.7))
