"""A temporary Prefect server records what people see later, and does not outlive the next command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.settings import PREFECT_API_URL, temporary_settings

from ratchet.flows.temporary_server import MARK, end_orphans
from ratchet.infra.store.clock import born
from ratchet.tasks.prefect_defaults import TEMPORARY_SERVER
from tests import tiny
from tests.prefect_server import prefect_api


def server_of(owner: str) -> psutil.Popen:
    environment = {**os.environ, MARK: owner, "PREFECT__SERVER_EPHEMERAL": "1"}
    return psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)


def test_only_orphans_end(tmp_path: Path) -> None:
    me = psutil.Process()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    orphan, recycled, alive = (
        server_of(owner) for owner in (f"{gone.pid}@1.0", f"{me.pid}@1.0", f"{me.pid}@{born(me)}")
    )
    try:
        end_orphans()
        assert orphan.wait(timeout=60) == -15
        assert recycled.wait(timeout=60) == -15  # another process has the dead driver's number
        assert alive.poll() is None
    finally:
        alive.kill()
        alive.wait()


def without_a_server(**changes: str) -> dict[str, str]:
    """The environment of a shell in which no Prefect server is configured."""
    ours = {"PREFECT_API_URL", *TEMPORARY_SERVER}
    return {name: value for name, value in os.environ.items() if name not in ours} | changes


def test_a_server_started_later_shows_the_runs_and_their_tasks(workspace: Path, tmp_path: Path) -> None:
    config = tiny.config(
        workspace,
        run__name="seen-later",
        run__store=f"file://{tmp_path}/runs",
        reward__function="tests.rewards:letters",
        train__iterations=2,
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    environment = without_a_server(
        HOME=str(tmp_path / "nowhere"),
        PREFECT_HOME=str(tmp_path / "client"),
        PREFECT_API_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{tmp_path}/prefect.db",
    )
    command = [sys.executable, "-c", "from ratchet.flows.commands.app import main; main()", "train", str(path)]
    driver = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert "continues without Prefect" not in driver.stdout
    assert "WARNING" not in driver.stdout + driver.stderr  # nothing of Prefect's belongs into a missing ~/.prefect

    with (
        prefect_api(tmp_path) as url,  # on the database that the temporary server wrote
        temporary_settings({PREFECT_API_URL: url}),
        get_client(sync_client=True) as client,
    ):
        flow_runs = {run.name: run for run in client.read_flow_runs()}
        iterations = [flow_runs.pop(f"seen-later · it {k}") for k in range(2)]
        train = flow_runs.pop("seen-later")
        assert not flow_runs
        assert [run.state_name for run in (train, *iterations)] == ["Completed"] * 3
        subflows = client.read_task_runs(flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [train.id]}}))
        assert {run.id for run in subflows} == {run.parent_task_run_id for run in iterations}
        for k, iteration in enumerate(iterations):
            of_iteration = FlowRunFilter.model_validate({"id": {"any_": [iteration.id]}})
            tasks = {run.name: run for run in client.read_task_runs(flow_run_filter=of_iteration)}
            stages = ["generate", "score", "old_log_probs", "values", "update_critic", "update_actor", "advantages"]
            assert {f"seen-later · it {k} · {stage}" for stage in stages} <= tasks.keys()
            for run in tasks.values():
                assert run.state_name == "Completed", run.name
                assert run.start_time and run.end_time
                states = [state.name for state in client.read_task_run_states(run.id)]
                assert sorted(states) == ["Completed", "Pending", "Running"]


SHOWN = f"import os, flows; print([os.environ.get(name) for name in {list(TEMPORARY_SERVER)}])"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, TEMPORARY_SERVER),
        (dict.fromkeys(TEMPORARY_SERVER, "1"), dict.fromkeys(TEMPORARY_SERVER, "1")),
        ({"PREFECT_API_URL": "http://127.0.0.1:9/api"}, dict.fromkeys(TEMPORARY_SERVER)),
    ],
    ids=["temporary", "the user's own", "permanent"],
)
def test_only_a_temporary_server_gets_its_settings_unless_the_user_has_others(
    changes: dict[str, str], expected: dict[str, str | None]
) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", SHOWN], env=without_a_server(**changes), capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == str(list(expected.values()))
