"""A run that is deleted while its driver is at work: the driver stops, says so, and leaves nothing behind."""

from __future__ import annotations

import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ratchet.infra.store.object_store import ObjectStore
from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes
from tests.tiers import sampled

SAYS = "was deleted while this driver was at work: the driver stops"


def config_at(workspace: Path, store: str) -> RunConfig:
    return tiny.config(
        workspace, run__name="run", run__store=store, reward__function="tests.rewards:letters", train__iterations=2
    )


def stopped_in(moment: Fault, processes: Processes, config: RunConfig) -> Child:
    """A driver that has stopped itself there."""
    path = processes.folder / "config.yaml"
    path.write_text(config.model_dump_json())
    child = processes.cli("train", path, faults=(moment,))
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED:
                return child
        assert child.process.is_alive(), child.text
        time.sleep(0.05)
    child.wait(0)  # which shows the stacks of its threads
    raise AssertionError("it did not get there")


MOMENTS = {
    "before a shard": ("put", "trajectories/score/iteration=000001/", "before"),
    "before a record": ("create", "log/.*[1-9].*", "before"),
    "after a shard's record": ("create", "log/0*20.json", "after"),
    "before an update's manifest": ("put", "manifests/iteration=000000/update_actor", "before"),
    "before a snapshot": ("put", "checkpoints/actor/000001", "before"),
    "before an index": ("put", "index/", "before"),
}


@sampled(12)
@pytest.mark.parametrize("folder", ["", "log"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_deleted_folder(moment: str, folder: str, workspace: Path, tmp_path: Path, processes: Processes) -> None:
    config = config_at(workspace, f"file://{tmp_path}/runs")
    child = stopped_in(Fault(*MOMENTS[moment], action=signal.SIGSTOP), processes, config)
    run = tmp_path / "runs" / "run"
    shutil.rmtree(run / folder)
    child.signal(signal.SIGCONT)
    assert child.wait(600) == 1, child.text
    assert SAYS in child.text
    assert "Traceback" not in child.text
    assert not (run / folder).exists()
    assert "there is no run at" in processes_say(processes, "status", config)


def processes_say(processes: Processes, command: str, config: RunConfig) -> str:
    child = processes.cli(command, config.run.name, "--store", config.run.store)
    child.wait(600)
    return child.text


def test_a_deleted_prefix_of_a_bucket(s3: str, workspace: Path, processes: Processes) -> None:
    config = config_at(workspace, f"{s3}/deleted")
    moment = Fault("put", "trajectories/score/iteration=000001/", "before", action=signal.SIGSTOP)
    child = stopped_in(moment, processes, config)
    objects = ObjectStore(f"{s3}/deleted/run")
    objects.delete(objects.list(""))
    child.signal(signal.SIGCONT)
    assert child.wait(600) == 1, child.text
    assert SAYS in child.text
    assert "Traceback" not in child.text
    assert objects.list("") == []


def test_another_run_that_was_begun_in_its_place_is_left_alone(
    workspace: Path, tmp_path: Path, processes: Processes
) -> None:
    config = config_at(workspace, f"file://{tmp_path}/runs")
    child = stopped_in(Fault(*MOMENTS["before a record"], action=signal.SIGSTOP), processes, config)
    shutil.rmtree(tmp_path / "runs" / "run")
    other = processes.cli("train", processes.folder / "config.yaml", "run.seed=1")
    assert other.wait(600) == 0, other.text
    before = History.of(config).results
    child.signal(signal.SIGCONT)
    assert child.wait(600) == 1, child.text
    assert SAYS in child.text
    assert History.of(config).results == before
    assert "run is intact" in processes_say(processes, "verify", config)


def test_a_lost_record_is_no_deleted_run(workspace: Path, tmp_path: Path, processes: Processes) -> None:
    """The others are worth saving: the driver goes on, and `verify` names the lost one."""
    config = config_at(workspace, f"file://{tmp_path}/runs")
    moment = Fault(*MOMENTS["before a shard"], action=signal.SIGSTOP)
    child = stopped_in(moment, processes, config)
    (tmp_path / "runs" / "run" / "log" / "000000000000.json").unlink()
    child.signal(signal.SIGCONT)
    assert child.wait(600) == 0, child.text
    assert "log/000000000000.json is gone" in processes_say(processes, "verify", config)
