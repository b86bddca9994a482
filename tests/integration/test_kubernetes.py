"""Deployments on a server of today's Prefect: in the pods of a Kubernetes pool, and where flow runs cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import psutil
import pytest
import yaml
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State, StateType
from prefect.variables import Variable
from pydantic import SecretStr

from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.extras import needs
from tests.history import History
from tests.kubernetes import ENVIRONMENT, Kubernetes, kubernetes
from tests.packaged import ROOT, build, environment
from tests.prefect_server import prefect_api, used

pytestmark = needs("kubernetes")

RATCHET = [sys.executable, "-c", "from ratchet.flows.commands.app import main; main()"]
IMAGE = "registry.example/ratchet:1"


@pytest.fixture(scope="module")
def prefect_today(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of today's Prefect: with SQLite, older ones lose events, and so restarts of flow runs."""
    folder = tmp_path_factory.mktemp("today")
    with prefect_api(folder, python=str(ENVIRONMENT / "bin" / "python")) as url, used(url, folder):
        yield url


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kubernetes]:
    """A cluster whose only image has Ratchet's wheel, and the reward of its users."""
    image = environment(tmp_path / "image", tmp_path / build("wheel", ROOT, tmp_path))
    (image / "bin" / "prefect").write_text(f"#!{image}/bin/python\nfrom prefect.cli import app\n\napp()\n")
    (image / "bin" / "prefect").chmod(0o755)
    [packages] = image.glob("lib/python*/site-packages")
    (packages / "team_rewards.py").write_text((ROOT / "tests" / "rewards.py").read_text())
    with kubernetes(tmp_path, {IMAGE: image}) as running:
        yield running


@pytest.fixture
def config(workspace: Path, tmp_path: Path) -> RunConfig:
    return tiny.config(
        workspace,
        run__name=f"pods-{os.getpid()}",
        run__store=f"file://{tmp_path}/runs",
        reward__function="team_rewards:letters",
        train__iterations=200,
        checkpoint={"every": 10},
    )


def test_a_run_in_pods_survives_them(
    config: RunConfig, cluster: Kubernetes, prefect_today: str, tmp_path: Path
) -> None:
    pool, path = f"k8s-{os.getpid()}", tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))

    def ratchet(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*RATCHET, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=900)

    no_pool = ratchet("deploy", str(path), "--pool", pool, "--image", IMAGE)
    assert no_pool.returncode == 2 and f"`prefect work-pool create {pool} --type kubernetes`" in no_pool.stderr

    template = str(ROOT / "infra" / "recipes" / "kubernetes" / "pool.json")
    cluster.prefect("work-pool", "create", pool, "--type", "kubernetes", "--base-job-template", template)
    with cluster.worker(pool, tmp_path / "worker.log"), SyncPrefectClient(prefect_today) as client:
        wrong = ratchet("deploy", str(path), "--pool", pool, "--job-variable", "gpu=1", "--job-variable", "env=A")
        assert wrong.returncode == 2
        assert f"the work pool {pool} (type kubernetes) starts flow runs in containers: name an image" in wrong.stderr
        assert f"{pool} (type kubernetes) has no job variable gpu: it has command, cpu_request, " in wrong.stderr
        assert "the job variable env is not an object" in wrong.stderr
        mine = ratchet("worker", "--pool", pool)
        assert mine.returncode == 2 and f"`prefect worker start --pool {pool}`" in mine.stderr

        Secret(value=SecretStr("hidden")).save(f"key-{os.getpid()}")
        Variable.set(f"team_{os.getpid()}", "rl")
        environ = {
            "AWS_SECRET_ACCESS_KEY": f"{{{{ prefect.blocks.secret.key-{os.getpid()} }}}}",
            "TEAM": f"{{{{ prefect.variables.team_{os.getpid()} }}}}",
        }
        variables = ["memory_limit=4Gi", "gpus=2", f"env={json.dumps(environ)}", "finished_job_ttl=60"]
        options = [option for variable in variables for option in ("--job-variable", variable)]
        done = ratchet("deploy", str(path), "--pool", pool, "--image", IMAGE, "--work-queue", "big", *options)
        assert done.returncode == 0, done.stderr
        assert f"`prefect worker start --pool {pool}`" in done.stdout
        assert f"run.store is file://{tmp_path}/runs: unless that is a volume" in done.stdout.replace("\n", "")

        deployed = client.read_deployment_by_name(f"train/{config.run.name}")
        assert deployed.work_queue_name == "big" and not deployed.pull_steps
        flow_run = client.create_flow_run_from_deployment(deployed.id)
        wait(lambda: (tmp_path / "runs" / config.run.name / "log").exists() and History.of(config).state.iteration > 2)
        [job] = cluster.jobs
        [container] = job["spec"]["template"]["spec"]["containers"]
        assert container["image"] == IMAGE
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 2, "memory": "4Gi"}
        assert job["spec"]["ttlSecondsAfterFinished"] == 60
        given = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert (given["TEAM"], given["AWS_SECRET_ACCESS_KEY"]) == ("rl", "hidden")
        assert given["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
        assert "working_dir" not in json.dumps(job)

        for process in pods(str(flow_run.id)):
            os.kill(process, signal.SIGKILL)
        died_at = History.of(config).state.iteration
        wait(lambda: History.of(config).state.iteration > died_at + 2)
        assert History.of(config).state.term == 2
        assert len(cluster.jobs) == 2
        assert client.read_flow_run(flow_run.id).state_name == "Running", "the same flow run, in another pod"


def test_a_flow_run_that_cannot_start_is_tried_again_and_fails_with_the_reason(
    config: RunConfig, prefect_today: str, tmp_path: Path
) -> None:
    config = config.with_values({"run.name": f"lacks-{os.getpid()}"})
    pool, path = config.run.name, tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    deploy = [*RATCHET, "deploy", str(path), "--pool", pool, "--job-variable", "working_dir=/nowhere"]
    subprocess.run(deploy, check=True, timeout=900)
    with SyncPrefectClient(prefect_today) as client, (tmp_path / "worker.log").open("w") as log:
        deployed = client.read_deployment_by_name(f"train/{config.run.name}")
        flow_run = client.create_flow_run_from_deployment(deployed.id)
        worker = subprocess.Popen([*RATCHET, "worker", "--pool", pool], stdout=log, stderr=log)
        try:
            wait(lambda: client.read_flow_run(flow_run.id).state_type == StateType.FAILED)
        finally:
            worker.kill()
            worker.wait()
        states = sorted(client.read_flow_run_states(flow_run.id), key=lambda state: state.timestamp)
    names = [state.name for state in states]
    assert names.count("AwaitingRestart") == 4
    tries = [list(group) for is_crashed, group in groupby(states, State.is_crashed) if is_crashed]
    assert len(tries) == 4, names
    reasons = [" ".join(str(crash.message) for crash in crashes) for crashes in tries]
    assert all("ailed to start" in reason or "could not be started" in reason for reason in reasons), reasons
    assert states[-1].message == "it crashed 4 times within 15 minutes: the last Crashed state says why"


def test_the_manifest_of_a_worker_is_one_of_kubernetes() -> None:
    manifest = ROOT / "infra" / "recipes" / "kubernetes" / "worker.yaml"
    python = str(ENVIRONMENT / "bin" / "python")
    done = subprocess.run(
        [python, "-m", "kubernetes_validate", "--strict", str(manifest)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def pods(flow_run: str) -> list[int]:
    """The processes of pods that run a flow run."""
    running = psutil.process_iter(["environ", "cmdline"])
    return [
        process.pid
        for process in running
        if (process.info["environ"] or {}).get("PREFECT__FLOW_RUN_ID") == flow_run
        and "execute" in " ".join(process.info["cmdline"] or [])
    ]


def wait(until: Callable[[], bool], seconds: float = 1200.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.5)
