"""Rollout workers generate beside a driver, without one, and die: each shard is committed once, with the same bits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest

from ratchet.infra.execution import neighbours
from ratchet.infra.store.records import Lease, Published, ShardCommit
from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes

SHARDS = 6
LEASED = Fault("create", '{"kind":"lease","iteration":1')
"""A driver dies when it has leased shards of the second iteration, whose weights it has published."""


def config_of(workspace: Path, store: Path, **changes: object) -> RunConfig:
    return tiny.config(
        workspace,
        run__store=f"file://{store}",
        data__prompts_per_iteration=SHARDS,
        rollout__prompts_per_shard=1,
        rollout__workers=True,
        reward__function="tests.rewards:letters",
        algorithm__advantage={"type": "grpo"},
        actor__mini_batch_trajectories=2 * SHARDS,
        checkpoint__every=10,  # so that workers need weights that no snapshot has
        **changes,
    )


def worker_of(
    processes: Processes, config: RunConfig, *faults: Fault, setup: Callable[[], None] | None = None
) -> Child:
    command = "rollout-worker", config.run.name, "--store", config.run.store
    return processes.cli(*command, faults=faults, setup=setup)


def until(child: Child, happens: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 600
    while not happens():
        assert child.process.is_alive(), f"before {what}: {child.text}"
        assert time.monotonic() < deadline, f"not seen: {what}: {child.text}"
        time.sleep(0.05)


def is_stopped(child: Child) -> bool:
    return bool(psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED)


def generated(config: RunConfig, iteration: int) -> int:
    return sum(stage == "generate" and k == iteration for stage, k, _ in History.of(config).shards)


def by_workers(history: History) -> list[ShardCommit]:
    records = [record for record in history.records if record.worker is not None]
    return [commit for record in records for commit in record.commits if isinstance(commit, ShardCommit)]


def check_same(workspace: Path, processes: Processes, config: RunConfig) -> History:
    """Asserts that a run has the rows and the weights of one without workers, and each trajectory once."""
    alone = config_of(workspace, processes.folder / "alone").with_values({"rollout.workers": False})
    child = processes.train(alone)
    assert child.wait() == 0, child.text
    expected, now = History.of(alone), History.of(config)
    assert not expected.commits(Lease) and not expected.commits(Published), "a run without workers has none of this"
    now.check_sound()
    assert now.results == expected.results
    assert set(now.shards.values()) == {1}
    rows = pd.read_parquet(now.folder / "trajectories" / "generate")
    assert len(rows) == rows["trajectory_id"].nunique() == 3 * 2 * SHARDS, "no file is left that no record names"
    published = {path.parent for path in (now.folder / "checkpoints" / "rollout").glob("*/*")}
    assert len(published) == 1, "older weights for workers are deleted"
    return now


def test_a_worker_generates_without_a_driver(workspace: Path, processes: Processes) -> None:
    config = config_of(workspace, processes.folder / "runs")
    driver = processes.train(config, LEASED)
    assert driver.wait() == -9, driver.text
    assert generated(config, 1) == 0
    worker = worker_of(processes, config)
    until(worker, lambda: generated(config, 1) == SHARDS, "all shards of the iteration, those of the dead driver too")
    resumed = processes.train(config)
    assert resumed.wait() == 0, resumed.text
    assert worker.wait() == 0, worker.text
    assert "run tiny is complete" in worker.text
    history = check_same(workspace, processes, config)
    assert {shard.shard for shard in by_workers(history) if shard.iteration == 1} == set(range(SHARDS))
    assert not {shard for shard in resumed.computed_shards if shard[:2] == ("generate", 1)}
    assert not list((history.folder / "log" / "workers").glob("*")), "a worker that ends takes its beat back"


def test_a_worker_generates_beside_the_driver(workspace: Path, processes: Processes) -> None:
    config = config_of(workspace, processes.folder / "runs")
    waits = Fault("put", "trajectories/generate/iteration=000001/1-0-part", "before", until='"worker":"')
    driver = processes.train(config, waits)
    until(driver, lambda: (processes.folder / "runs/tiny/log/000000000000.json").exists(), "the claim")
    worker = worker_of(processes, config)
    assert driver.wait() == 0, driver.text
    assert worker.wait() == 0, worker.text
    history = check_same(workspace, processes, config)
    assert by_workers(history)
    assert len(by_workers(history)) < 3 * SHARDS, "the driver generates, too"


POINTS = {
    "lease": Fault("create", '{"kind":"lease","iteration":1'),
    "before the file": Fault("put", "trajectories/generate/iteration=000001", "before", count=2),
    "file": Fault("put", "trajectories/generate/iteration=000001", count=2),
    "before the record": Fault("create", '{"kind":"shard","iteration":1', "before", count=2),
    "record": Fault("create", '{"kind":"shard","iteration":1', count=2),
    "beat": Fault("put", "log/workers/", "before"),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_is_killed(point: str, workspace: Path, processes: Processes) -> None:
    config = config_of(workspace, processes.folder / "runs")
    driver = processes.train(config, LEASED)
    assert driver.wait() == -9, driver.text
    killed = worker_of(processes, config, POINTS[point])
    assert killed.wait() == -9, killed.text
    before = generated(config, 1)
    assert before < SHARDS
    resumed = processes.train(config)
    assert resumed.wait() == 0, resumed.text
    check_same(workspace, processes, config)


def _soon_dead() -> None:
    for name, seconds in (("SILENT_S", 1.0), ("INTERVAL_S", 0.2)):
        setattr(neighbours, name, seconds)


def test_a_worker_that_was_paused_commits_nothing_twice(workspace: Path, processes: Processes) -> None:
    config = config_of(workspace, processes.folder / "runs")
    driver = processes.train(config, LEASED)
    assert driver.wait() == -9, driver.text
    pauses = Fault("put", "trajectories/generate/iteration=000001", count=2, action=signal.SIGSTOP)
    worker = worker_of(processes, config, pauses)
    until(
        worker,
        lambda: bool(list(processes.folder.glob("runs/tiny/trajectories/generate/iteration=000001/*"))),
        "a file",
    )
    resumed = processes.train(config, setup=_soon_dead)
    assert resumed.wait() == 0, resumed.text
    worker.signal(signal.SIGCONT)
    assert worker.wait() == 0, worker.text
    check_same(workspace, processes, config)


def test_what_a_paused_worker_commits_is_late(workspace: Path, processes: Processes) -> None:
    """The driver is the same: nothing else than the log's order keeps the shard from being committed twice."""
    config = config_of(workspace, processes.folder / "runs")
    at_work = Fault("put", "trajectories/generate/iteration=000000", "before", action=signal.SIGSTOP)
    driver = processes.train(config, at_work, setup=_soon_dead)
    until(driver, lambda: is_stopped(driver), "a pause of the driver")
    worker = worker_of(processes, config, Fault("put", "trajectories/generate/iteration=000000", action=signal.SIGSTOP))
    until(worker, lambda: is_stopped(worker), "a file of the worker, which no record names")
    driver.signal(signal.SIGCONT)
    assert driver.wait() == 0, driver.text
    assert not by_workers(History.of(config))
    worker.signal(signal.SIGCONT)
    assert worker.wait() == 0, worker.text
    check_same(workspace, processes, config)


def test_a_worker_joins_the_next_driver(workspace: Path, processes: Processes) -> None:
    config = config_of(workspace, processes.folder / "runs")
    driver = processes.train(config, LEASED)
    assert driver.wait() == -9, driver.text
    worker = worker_of(processes, config)
    until(worker, lambda: generated(config, 1) == SHARDS, "the shards of the open iteration")
    dies = Fault("create", '{"kind":"lease","iteration":2', "before")
    for faults in ((dies,), ()):
        resumed = processes.train(config, *faults)
        assert resumed.wait() == (-9 if faults else 0), resumed.text
    assert worker.wait() == 0, worker.text
    assert "a new driver has claimed the run" in worker.text
    check_same(workspace, processes, config)


def test_workers_that_cannot_help_are_refused(workspace: Path, processes: Processes) -> None:
    plain = config_of(workspace, processes.folder / "runs").with_values({"rollout.workers": False, "run.name": "plain"})
    config = config_of(workspace, processes.folder / "runs")
    for started in (plain, config):
        driver = processes.train(started, Fault("create", '{"kind":"shard"'))
        assert driver.wait() == -9, driver.text
    refused = worker_of(processes, plain)
    assert refused.wait() == 2, refused.text
    assert "takes no rollout workers: resume it with rollout.workers=true" in refused.text
    prompts = Path(config.data.train[0])
    written = prompts.read_bytes()
    tiny.prompt_file(prompts, prompts=3)
    try:
        refused = worker_of(processes, config)
        assert refused.wait() == 2, refused.text
    finally:
        prompts.write_bytes(written)
    assert "where the driver runs: the dataset; give" in " ".join(refused.text.split())
    assert "Traceback" not in refused.text
