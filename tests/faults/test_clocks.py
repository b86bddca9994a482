"""Clocks that are set while a driver is at work, and machines that disagree about the time."""

from __future__ import annotations

import itertools
import signal
import socket
import time
from pathlib import Path

import pytest

from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.processes import Fault, Processes

AHEAD_S = 300.0


def stepping() -> None:
    """In a driver: whoever asks for the time finds that the clock was set by five minutes, back or forward."""
    time_of_day, steps = time.time, itertools.cycle([0.0, AHEAD_S, -AHEAD_S])
    time.time = lambda: time_of_day() + next(steps)


def on_another_machine() -> None:
    """In a driver: another name, and a clock that is five minutes ahead."""
    import ratchet.infra.execution.heartbeat

    time_of_day = time.time
    time.time = lambda: time_of_day() + AHEAD_S
    socket.gethostname = lambda: "elsewhere"
    ratchet.infra.execution.heartbeat.boot_id = lambda: "another boot"


@pytest.fixture
def config(workspace: Path, tmp_path: Path) -> RunConfig:
    return config_at(workspace, tmp_path / "runs")


def config_at(workspace: Path, store: Path) -> RunConfig:
    return tiny.config(
        workspace,
        run__name="run",
        run__store=f"file://{store}",
        reward__function="tests.rewards:letters",
        train__iterations=3,
    )


@pytest.fixture(scope="module")
def undisturbed(workspace: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> History:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = config_at(workspace, folder / "runs")
    child = Processes(folder).train(config)
    assert child.wait(600) == 0, child.text
    return History.of(config)


def test_a_clock_that_is_set_again_and_again(config: RunConfig, processes: Processes, undisturbed: History) -> None:
    started = time.monotonic()
    child = processes.train(config, setup=stepping)
    assert child.wait(600) == 0, child.text
    took = time.monotonic() - started
    history = History.of(config)
    assert history.results == undisturbed.results
    metrics = history.run.metrics()
    times = [name for name in map(str, metrics) if name.startswith("timing_s/") or name == "perf/time_per_step"]
    assert "perf/time_per_step" in times
    assert ((metrics[times] >= 0) & (metrics[times] <= took)).all(axis=None), metrics[times].T


def test_machines_whose_clocks_disagree(config: RunConfig, processes: Processes, undisturbed: History) -> None:
    """A live driver on the other is left alone, one that died there is followed."""
    beat = Path(config.run.store.removeprefix("file://")) / config.run.name / "log" / "heartbeat.json"
    there = processes.train(
        config, Fault("put", "trajectories/score/iteration=000001/", "before", delay_s=600.0), setup=on_another_machine
    )
    while "waiting at trajectories/score/iteration=000001/" not in there.text:
        assert there.process.is_alive(), there.text
        time.sleep(0.05)
    assert '"host":"elsewhere"' in beat.read_text()
    here = processes.cli("resume", config.run.name, "--store", config.run.store)
    assert here.wait(600) == 3, here.text
    assert "is being driven" in here.text
    there.signal(signal.SIGKILL)
    assert there.wait(600) == -signal.SIGKILL
    here = processes.cli("resume", config.run.name, "--store", config.run.store)
    assert here.wait(600) == 0, here.text
    history = History.of(config)
    history.check_sound(killed=True)
    assert history.results == undisturbed.results
    assert (history.run.metrics()["perf/time_per_step"] >= 0).all()
