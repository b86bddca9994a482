"""Sweeps whose arms train in groups: who is stopped, on real workers too, after failures and kills."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun

from ratchet.flows.sweep import Sweep, begin, run_arms
from ratchet.flows.train import train
from ratchet.infra.runs.run import Run, open_run
from tests import tiny
from tests.processes import Child, Processes

RATCHET = [sys.executable, "-c", "from ratchet.flows.commands.app import main; main()"]
REWARD = """
import time
from pathlib import Path

FOLDER = Path({folder!r})


def score(data_source, solution_str, ground_truth, extra_info=None, metadata=None):
    if metadata["iteration"] is None:  # a start tries the reward
        return 1.0
    if (FOLDER / "broken").exists():
        raise RuntimeError("the judge is on holiday")
    while (FOLDER / "closed").exists():
        (FOLDER / "arrived").touch()
        time.sleep(0.05)
    return sum("a" <= letter <= "m" for letter in solution_str) / max(len(solution_str), 1)
"""


@dataclass
class Pool:
    """A work pool, whose workers and flow runs end with the test."""

    name: str
    folder: Path
    processes: list[psutil.Popen] = field(default_factory=list)

    def worker(self) -> psutil.Popen:
        with (self.folder / f"worker-{len(self.processes)}.log").open("w") as log:
            process = psutil.Popen([*RATCHET, "worker", "--pool", self.name], stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process


@pytest.fixture
def pool(prefect_server: str, tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(f"sweep-{os.getpid()}-{tmp_path.name}", tmp_path)
    yield pool
    for worker in pool.processes:
        with suppress(psutil.NoSuchProcess):
            for process in [*worker.children(recursive=True), worker]:
                process.kill()
        worker.wait()


@pytest.fixture
def parent(workspace: Path, processes: Processes) -> Run:
    """A run of two iterations, whose reward waits while there is a file `closed`, and fails while there is `broken`."""
    (processes.folder / "reward.py").write_text(REWARD.format(folder=str(processes.folder)))
    config = tiny.config(
        workspace,
        run__name="base",
        run__store=f"file://{processes.folder}/runs",
        algorithm__kl={},
        algorithm__advantage={"type": "grpo"},
        reward__function=f"{processes.folder}/reward.py:score",
        reward__timeout_s=3600,
        rollout__n=8,
        actor__lr=1e-2,
        train__iterations=2,
        validation={"data": str(workspace / "held_out.parquet"), "every": 1, "n": 16, "temperature": 1.0},
    )
    child = processes.train(config)
    assert child.wait() == 0, child.text
    return open_run(f"file://{processes.folder}/runs/base")


def started(processes: Processes, *options: object) -> Child:
    store = f"file://{processes.folder}/runs"
    vary = "actor.lr=1e-5,3e-2,1e-6"
    return processes.cli("sweep", "base", "--at", 1, "--vary", vary, "--iterations", 4, "--store", store, *options)


def test_arms_on_workers_survive_failures_and_kills(
    parent: Run, pool: Pool, processes: Processes, prefect_server: str
) -> None:
    options = ("--pool", pool.name, "--parallel", 2)
    broken, closed, arrived = (processes.folder / name for name in ("broken", "closed", "arrived"))
    broken.touch()
    failed = started(processes, *options)
    wait(lambda: f"no worker of the pool {pool.name} is online: `ratchet worker --pool {pool.name}`" in failed.text)
    first = pool.worker()
    assert failed.wait() == 1, failed.text
    begun = flow_runs(prefect_server)
    assert sorted(run.name for run in begun) == ["base-sweep-00", "base-sweep-01"]
    for run in begun:
        assert f"{run.name}: its flow run ended as Failed:" in failed.text
        assert f"/flow-run/{run.id}): once the cause is gone, repeat the command to continue" in failed.text
    assert "the judge is on holiday" in failed.text

    broken.unlink()
    closed.touch()
    killed = started(processes, *options)
    wait(lambda: all(run.state_name == "Running" for run in flow_runs(prefect_server)) and arrived.exists())
    victim = flow_runs(prefect_server)[0]
    os.kill(driver_of(victim), signal.SIGKILL)
    wait(lambda: flow_run(prefect_server, victim).run_count > victim.run_count)  # Prefect starts it again
    killed.signal(signal.SIGKILL)
    first.kill()  # its flow runs continue without it
    pool.worker()
    child = started(processes, *options)
    closed.unlink()
    assert child.wait() == 0, child.text

    arms = [open_run(f"{parent.store.url}-sweep-{number:02d}") for number in range(3)]
    lengths = {arm.store.url[-2:]: arm.state.iteration for arm in arms}
    assert lengths == {"00": 2, "01": 4, "02": 2}, "the middle rate is by far the best one; of each pair, one goes on"
    ended = flow_runs(prefect_server)
    names = sorted(run.name for run in ended)
    assert names == ["base-sweep-00", *["base-sweep-01"] * 2, "base-sweep-02"], "one flow run for an arm and a rung"
    assert {run.state_name for run in ended} == {"Completed"}
    page = (processes.folder / "runs" / "base-sweep" / "report.html").read_text()
    shown = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr><td>.*?</tr>", page)]
    assert [(row[0], row[1], row[-1]) for row in shown] == [
        ("base-sweep-01", "3e-2", ""),
        *sorted(
            [("base-sweep-00", "1e-5", "stopped"), ("base-sweep-02", "1e-6", "stopped")],
            key=lambda row: open_run(f"{parent.store.url}{row[0][4:]}").store.validation_scores({2}, None)[2],
            reverse=True,
        ),
    ]
    assert "base-sweep/report.html    the curves and settings of all arms" in child.text

    again = started(processes, *options)
    assert again.wait() == 0, again.text
    assert [run.run_count for run in flow_runs(prefect_server)] == [run.run_count for run in ended], "nothing is left"
    other = started(processes, "--parallel", 2)
    assert other.wait() == 2
    assert "--parallel 2 needs --pool NAME" in other.text


def test_a_driver_elsewhere_is_waited_for(parent: Run, processes: Processes) -> None:
    closed, arrived = processes.folder / "closed", processes.folder / "arrived"
    closed.touch()
    alive = started(processes)
    wait(arrived.exists)
    waiting = started(processes)
    wait(lambda: "base-sweep-00 is being driven by another process" in waiting.text)
    alive.signal(signal.SIGKILL)
    closed.unlink()
    assert waiting.wait() == 0, waiting.text
    assert open_run(f"{parent.store.url}-sweep-01").state.iteration == 4


def test_who_is_stopped_does_not_depend_on_who_is_faster(parent: Run) -> None:
    def reached(name: str, order: Callable[[Any], Any]) -> list[tuple[dict[str, str], int, bool]]:
        sweep = Sweep(
            parent=parent.store.url,
            name=name,
            iteration=1,
            stage=None,
            vary={"actor.lr": ("1e-5", "3e-2", "1e-6", "1e-2")},
            iterations=4,
            metric=None,
            trials=None,
            pruner="halving",
            parallel=4,
        )
        begin(sweep)

        def train_in_order(configs: Any) -> None:
            for config in order(configs):
                train(config)

        arms = list(run_arms(sweep, train_in_order, lambda text: None))
        return [(arm.values, max(arm.scores), arm.is_stopped) for arm in arms]

    first = reached("first", lambda configs: configs)
    assert first == reached("last", reversed)
    assert [is_stopped for _, _, is_stopped in first].count(False) == 1, "the best of a group goes on"


def test_stored_sweeps_of_before_are_of_one_arm_at_a_time() -> None:
    before = """{"parent": "file:///runs/base", "name": "tried", "iteration": 2, "stage": null, "iterations": 5,
        "vary": {"actor.lr": ["1", "2"]}, "metric": null, "trials": null, "pruner": "none"}"""
    assert Sweep.model_validate_json(before).parallel == 1


def flow_runs(url: str) -> list[FlowRun]:
    with SyncPrefectClient(url) as client:
        deployment = client.read_deployment_by_name("train/base-sweep")
        only = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
        return sorted(client.read_flow_runs(flow_run_filter=only), key=lambda run: (run.name, str(run.id)))


def flow_run(url: str, run: FlowRun) -> FlowRun:
    with SyncPrefectClient(url) as client:
        return client.read_flow_run(run.id)


def driver_of(run: FlowRun) -> int:
    assert run.infrastructure_pid is not None
    return int(run.infrastructure_pid.split(":")[-1])


def wait(until: Callable[[], bool], seconds: float = 1200.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)
