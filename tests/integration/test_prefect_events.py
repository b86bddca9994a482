"""What a run tells a Prefect server: events that automations wait for, and assets with what they come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any
from uuid import UUID

import httpx
import pyarrow.parquet as pq
import yaml
from prefect.automations import Automation
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.automations import AutomationCore

from ratchet.flows.deploy import WorkPool, deployments_of, prepare, register
from ratchet.flows.train import train
from ratchet.rlhf.config import RunConfig
from tests import tiny

RATCHET = [sys.executable, "-c", "from ratchet.flows.commands.app import main; main()"]
RECIPE = Path(__file__).parents[2] / "infra" / "recipes" / "prefect" / "validation-fell.yaml"


def config_of(workspace: Path, tmp_path: Path, name: str, **changes: Any) -> RunConfig:
    return tiny.config(workspace, run__name=f"{name}-{os.getpid()}", run__store=f"file://{tmp_path}/runs", **changes)


def events(server: str, resource: str, prefix: str) -> list[dict[str, Any]]:
    """The events about a resource whose names have a prefix, in order."""
    wanted = {
        "filter": {
            "event": {"prefix": [prefix]},
            "resource": {"id": [resource]},
            "order": "ASC",
        },
        "limit": 50,
    }
    answer = httpx.post(f"{server}/events/filter", json=wanted).raise_for_status().json()
    return list(answer["events"])


def test_commits_are_events_and_what_is_stored_is_an_asset(
    workspace: Path, prefect_server: str, tmp_path: Path
) -> None:
    config = config_of(
        workspace,
        tmp_path,
        "told",
        reward__function="tests.rewards:same",
        algorithm__advantage="grpo",
        train__iterations=2,
        checkpoint={"every": 1, "background": False},
        validation={"data": str(workspace / "prompts.parquet"), "every": 1},
    )
    train(config)
    run = f"file://{tmp_path}/runs/{config.run.name}"

    def told() -> list[dict[str, Any]]:
        return events(prefect_server, run, "ratchet.")

    wait(lambda: len([event for event in told() if event["event"] == "ratchet.validation"]) == 3)
    names = [(event["event"], event["resource"]["ratchet.iteration"]) for event in told()]
    for iteration in ("0", "1"):
        assert names.count(("ratchet.iteration.closed", iteration)) == 1
        assert names.count(("ratchet.collapsed", iteration)) == 1, "equal scores teach nothing"
    versions = [event["resource"]["ratchet.version"] for event in told() if event["event"] == "ratchet.snapshot"]
    assert versions == ["1", "2"]
    closed = next(event for event in told() if event["event"] == "ratchet.iteration.closed")
    assert closed["payload"]["metrics"]["critic/score/mean"] == 0.5
    assert closed["resource"]["prefect.resource.name"] == config.run.name

    materialized = "prefect.asset.materialization.succeeded"
    wait(lambda: len(events(prefect_server, f"{run}/checkpoints", materialized)) == 2)
    [first, second] = events(prefect_server, f"{run}/trajectories", materialized)
    assert (first["payload"], second["payload"]) == ({"iteration": 0}, {"iteration": 1})
    sources = {related["prefect.resource.id"] for related in first["related"]}
    assert sources >= {f"file://{workspace}/prompts.parquet", f"file://{workspace}/model"}
    [snapshot, _] = events(prefect_server, f"{run}/checkpoints", materialized)
    assert f"{run}/trajectories" in {related["prefect.resource.id"] for related in snapshot["related"]}

    model = tmp_path / "exported"
    export = ["export", config.run.name, str(model), "--store", config.run.store]
    subprocess.run([*RATCHET, *export], check=True, timeout=900)
    wait(lambda: len(events(prefect_server, f"file://{model}", materialized)) == 1)
    [exported] = events(prefect_server, f"file://{model}", materialized)
    assert exported["payload"] == {"version": 2}
    assert f"{run}/checkpoints" in {related["prefect.resource.id"] for related in exported["related"]}

    chosen = tmp_path / "chosen.parquet"
    # all scores are 0.5: labelled as wrong, they are rows even where they were cut off
    kept = ["--kind", "kto", "--min-score", "0.6", "--no-decontaminate", "--store", config.run.store]
    dataset = ["dataset", config.run.name, "-o", str(chosen), *kept]
    subprocess.run([*RATCHET, *dataset], check=True, timeout=900)
    wait(lambda: len(events(prefect_server, f"file://{chosen}", materialized)) == 1)
    [made] = events(prefect_server, f"file://{chosen}", materialized)
    assert made["payload"] == {"rows": pq.read_metadata(chosen).num_rows}
    assert f"{run}/trajectories" in {related["prefect.resource.id"] for related in made["related"]}


def test_the_recipe_pauses_a_deployment_whose_validation_falls_and_tells_somebody(
    workspace: Path, prefect_server: str, tmp_path: Path
) -> None:
    config = config_of(
        workspace,
        tmp_path,
        "falls",
        reward__function="tests.rewards:falling",
        train__iterations=4,
        validation={"data": str(workspace / "prompts.parquet"), "every": 1},
    )
    pool = WorkPool(f"falls-{os.getpid()}")
    prepare(pool)
    register(deployments_of(config, pool))
    with listener() as (url, received), SyncPrefectClient(prefect_server) as client:
        # Slack's block and this one send what an automation asks them to
        block = CustomWebhookNotificationBlock(name="hook", url=url, json_data={"text": "{{subject}}: {{body}}"})
        identifier = block.save(f"hook-{os.getpid()}", overwrite=True)
        [recipe] = yaml.safe_load(RECIPE.read_text().replace(str(UUID(int=0)), str(identifier)))["automations"]
        automation = Automation(**AutomationCore.model_validate(recipe).model_dump(exclude={"owner_resource"})).create()
        try:
            deployed = client.read_deployment_by_name(f"train/{config.run.name}")
            client.create_flow_run_from_deployment(deployed.id)
            subprocess.run([*RATCHET, "worker", "--pool", pool.name, "--once"], check=True, timeout=1200)
            told = json.loads(received.get(timeout=1200))
            assert told == {
                "text": f"{config.run.name}: the validation fell three times: before iteration 3 of "
                f"file://{tmp_path}/runs/{config.run.name}"
            }
            wait(lambda: bool(client.read_deployment(deployed.id).paused))
        finally:
            assert isinstance(automation, Automation)
            client.delete_automation(automation.id)


@contextmanager
def listener() -> Iterator[tuple[str, Queue[bytes]]]:
    """Yields the URL of a server, and the bodies that it is sent."""
    received: Queue[bytes] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", received
    server.shutdown()


def wait(until: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.5)
