"""Asked to stop, at whatever moment, a driver ends soon with exit code 1, and `ratchet resume` goes on from there."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from ratchet.rlhf.config import RunConfig
from tests.crash.test_two_drivers import check_finished, wait_until
from tests.history import History
from tests.processes import Fault, Processes, grace

STOPS_WITHIN_S = 300.0
"""Stages that hang take ten minutes here."""

SIGTERM_AT = {
    "claim": Fault("create", '{"kind":"claim"', action=signal.SIGTERM),
    "shard": Fault("put", "trajectories/generate/iteration=000001/.*part-00000", action=signal.SIGTERM),
    "update": Fault("step", count=5, action=signal.SIGTERM),
    "snapshot": Fault("put", "checkpoints/actor/000002.*/optimizer", action=signal.SIGTERM),
    "close": Fault("put", "log/tail.json", count=2, action=signal.SIGTERM),
    "Prefect starts the flow": Fault("state", count=1, action=signal.SIGTERM),
    "Prefect ends an iteration": Fault("state", count=3, action=signal.SIGTERM),
}


def resume(
    config: RunConfig,
    config_file: Path,
    processes: Processes,
    uninterrupted: dict[int, History],
    abandoned: bool = False,
) -> None:
    """Nothing is half-committed, and the run goes on from there to the very same end."""
    history = History.of(config)
    if history.records:
        history.check_sound(killed=abandoned)
        resumed = processes.cli("resume", config.run.name, "--store", config.run.store)
    else:
        resumed = processes.cli("train", config_file)
    assert resumed.wait() == 0, resumed.text
    check_finished(config, uninterrupted)


@pytest.mark.parametrize("moment", SIGTERM_AT)
def test_sigterm(
    moment: str, config: RunConfig, config_file: Path, processes: Processes, uninterrupted: dict[int, History]
) -> None:
    driver = processes.cli("train", config_file, faults=(SIGTERM_AT[moment],), setup=partial(grace, 120.0))
    assert driver.wait() == 1, driver.text
    assert driver.text.splitlines()[-1].startswith("error: stopped"), driver.text
    resume(config, config_file, processes, uninterrupted)


def test_a_stage_that_does_not_end_is_abandoned(
    config: RunConfig, config_file: Path, processes: Processes, uninterrupted: dict[int, History]
) -> None:
    hangs = Fault("put", "trajectories/score/iteration=000001", "before", delay_s=600)
    driver = processes.cli("train", config_file, faults=(hangs,), setup=partial(grace, 1.0))
    wait_until(lambda: "waiting at" in driver.text)
    driver.signal(signal.SIGTERM)
    assert driver.wait(STOPS_WITHIN_S) == 1, driver.text
    resume(config, config_file, processes, uninterrupted, abandoned=True)


def test_ratchet_stop(
    config: RunConfig, config_file: Path, processes: Processes, uninterrupted: dict[int, History]
) -> None:
    slow = Fault("put", "trajectories/", count=0, delay_s=2.0)
    driver = processes.cli("train", config_file, faults=(slow,))
    beat = Path(config.run.store.removeprefix("file://")) / config.run.name / "log" / "heartbeat.json"
    wait_until(beat.exists)
    stop = processes.cli("stop", config.run.name, "--store", config.run.store)
    assert stop.wait() == 0, stop.text
    assert "has stopped" in stop.text
    assert driver.wait(STOPS_WITHIN_S) == 1, driver.text
    again = processes.cli("stop", config.run.name, "--store", config.run.store)
    assert again.wait() == 0
    assert "no live driver" in again.text
    resume(config, config_file, processes, uninterrupted, abandoned=True)  # on a slow machine
