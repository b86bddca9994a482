"""Deployments on a real server: registered, checked, started by a real worker, and asked for again after a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
)
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from ratchet.flows.train import train
from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History

AUTOMATIONS = (
    "ratchet: restart a flow run without heartbeats",
    "ratchet: restart a crashed flow run",
    "ratchet: fail a flow run that keeps crashing",
)
RATCHET = [sys.executable, "-c", "from ratchet.flows.commands.app import main; main()"]


@pytest.fixture
def config(workspace: Path, tmp_path: Path) -> RunConfig:
    return tiny.config(
        workspace,
        run__name=f"deployed-{os.getpid()}",
        run__store=f"file://{tmp_path}/runs",
        reward__function="tests.rewards:letters",
        train__iterations=200,
        checkpoint={"every": 10},
    )


@pytest.fixture
def worker(prefect_server: str, tmp_path: Path) -> Iterator[str]:
    """The pool that a worker serves; the worker and what it started end with the test."""
    pool = f"pool-{os.getpid()}"
    with (tmp_path / "worker.log").open("w") as log:
        process = psutil.Popen([*RATCHET, "worker", "--pool", pool], stdout=log, stderr=log)
    yield pool
    for child in [*process.children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def deploy(config: RunConfig, folder: Path, *options: str) -> None:
    path = folder / "deployed.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    subprocess.run([*RATCHET, "deploy", str(path), *options], check=True, timeout=900)


class BusyProxy(BaseHTTPRequestHandler):
    """Passes calls on to a Prefect server, after it has answered 503 to the first one that registers a deployment."""

    server_url: str
    refused = 0

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.endswith("/deployments/") and not type(self).refused:
            type(self).refused += 1
            status, content = 503, b"{}"
        else:
            headers = {"content-type": "application/json"}
            url = self.server_url + self.path.removeprefix("/api")
            answer = httpx.request(self.command, url, content=body, headers=headers, timeout=60)
            status, content = answer.status_code, answer.content
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on

    def log_message(self, format: str, *args: Any) -> None: ...


def test_a_server_that_is_too_busy_is_asked_again(
    config: RunConfig, prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where Prefect's own client has given up."""
    pool = f"busy-{os.getpid()}"
    subprocess.run(["prefect", "work-pool", "create", pool, "--type", "process"], check=True, timeout=300)

    class Handler(BusyProxy):
        server_url = prefect_server

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{proxy.server_port}/api")
        monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
        deploy(config, tmp_path, "--pool", pool)
        proxy.shutdown()
    assert Handler.refused == 1
    found = httpx.post(f"{prefect_server}/deployments/filter", json={"work_pools": {"name": {"any_": [pool]}}}).json()
    assert len(found) >= 6


def test_a_deployed_run_survives_its_process(
    config: RunConfig, worker: str, prefect_server: str, tmp_path: Path
) -> None:
    deploy(config, tmp_path, "--pool", worker, "--cron", "0 3 29 2 *")
    before = automations(prefect_server)
    deploy(config, tmp_path, "--pool", worker, "--cron", "0 4 29 2 *")  # again: it takes the place of the first
    assert len(before) == len(AUTOMATIONS)
    assert automations(prefect_server) == before, "what they know of silent flow runs is not lost"
    with SyncPrefectClient(prefect_server) as client:
        names = ("train", "iteration", "evaluate", "rescore", "report", "vacuum")
        found = {name: client.read_deployment_by_name(f"{name}/{config.run.name}") for name in names}
        deployed = found["train"]
        assert [schedule.schedule.cron for schedule in deployed.schedules] == ["0 4 29 2 *"]  # type: ignore[union-attr]
        assert all(not deployment.schedules for name, deployment in found.items() if name != "train")
        wrong: dict[str, Any] = {"config": config.model_dump(mode="json") | {"model": {"path": 3}}}
        with pytest.raises(PrefectHTTPStatusError, match="409"):
            client.create_flow_run_from_deployment(deployed.id, parameters=wrong)
        for name in ("train", "evaluate", "rescore"):
            with pytest.raises(PrefectHTTPStatusError, match="409") as refused:
                client.create_flow_run_from_deployment(found[name].id, parameters={"overrides": ["actor.lrr=1"]})
            assert "'actor.lrr=1' is not one of ['KEY=VALUE, with a KEY that" in refused.value.response.json()["detail"]

        run = client.create_flow_run_from_deployment(deployed.id, parameters={"overrides": ["actor.lr=0.0005"]})
        wait(lambda: (tmp_path / "runs" / config.run.name / "log").exists() and History.of(config).state.iteration > 2)
        driver = int(client.read_flow_run(run.id).infrastructure_pid.split(":")[-1])  # type: ignore[union-attr]
        os.kill(driver, signal.SIGKILL)
        died_at = History.of(config).state.iteration
        assert History.of(config).run.config == config.with_values({"actor.lr": 0.0005})
        wait(lambda: History.of(config).state.iteration > died_at + 2)
        assert History.of(config).state.term == 2
        only = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployed.id]))
        begun = [one for one in client.read_flow_runs(flow_run_filter=only) if one.state_name != "Scheduled"]
        assert [one.id for one in begun] == [run.id], "the same flow run, not another"

        key = ArtifactFilterKey(any_=[f"{config.run.name}-iterations"])
        artifact = client.read_artifacts(artifact_filter=ArtifactFilter(key=key), limit=1)[0]
        for shown in ("critic/score/mean", "| update_actor |", "## Best trajectories", "ratchet show deployed-"):
            assert shown in str(artifact.data)


def test_each_start_can_be_a_run_of_its_own(config: RunConfig, prefect_server: str, tmp_path: Path) -> None:
    for _ in range(2):
        train(config, new_run=True, overrides=["train.iterations=1"])
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(runs) == 2
    assert all(name.startswith(f"{config.run.name}-") for name in runs)


def test_a_team_keeps_its_deployments_in_git(config: RunConfig, prefect_server: str, tmp_path: Path) -> None:
    config = config.with_values({"train.iterations": 1, "run.name": f"in-git-{os.getpid()}"})
    pool, path = f"in-git-{os.getpid()}", tmp_path / "prefect.yaml"
    options = ("--pool", pool, "--every", "60", "--new-runs", "--work-queue", "nightly", "--prefect-yaml", str(path))
    deploy(config, tmp_path, *options)
    with SyncPrefectClient(prefect_server) as client:
        with pytest.raises(ObjectNotFound):
            client.read_deployment_by_name(f"train/{config.run.name}")
        prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(path))
        prefect("automation", "create", "--from-file", str(path))
        train = client.read_deployment_by_name(f"train/{config.run.name}")
        assert [schedule.schedule.interval for schedule in train.schedules] == [timedelta(minutes=60)]  # type: ignore[union-attr]
        assert (train.work_queue_name, train.parameters["new_run"]) == ("nightly", True)
        assert train.global_concurrency_limit is not None and train.global_concurrency_limit.limit == 1
        made = {name: client.read_automations_by_name(name) for name in AUTOMATIONS}
        for same in made.values():
            assert len({str(automation.trigger.model_dump(exclude={"id"})) for automation in same}) == 1
            client.delete_automation(same[0].id)  # of two, if another test has registered them, too

        flow_run = client.create_flow_run_from_deployment(train.id, parameters={**train.parameters, "new_run": False})
        subprocess.run([*RATCHET, "worker", "--pool", pool, "--once"], check=True, timeout=900)
        assert client.read_flow_run(flow_run.id).state_name == "Completed"
    again = subprocess.run(
        [*RATCHET, "deploy", str(tmp_path / "deployed.yaml"), *options], capture_output=True, text=True
    )
    assert again.returncode == 2 and f"{path} exists: name another file, or delete it" in again.stderr.replace("\n", "")


def prefect(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "prefect", *arguments], check=True, timeout=900)


def automations(url: str) -> set[str]:
    with SyncPrefectClient(url) as client:
        return {str(found.id) for name in AUTOMATIONS for found in client.read_automations_by_name(name)}


def wait(until: Any, seconds: float = 1200.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.5)
