"""What a run leaves on a Prefect server that stays: names, tags, logs, progress, artifacts, a link to its report."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterTags,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact

from ratchet.infra.runs.run import open_run
from ratchet.infra.runs.vacuum import unreached
from tests import tiny

T = TypeVar("T")


def test_a_run_can_be_followed_on_the_server(workspace: Path, prefect_server: str, tmp_path: Path) -> None:
    name = f"Followed-{os.getpid()}"
    config = tiny.config(
        workspace, run__name=name, run__store=f"file://{tmp_path}", reward__function="tests.rewards:slow_letters"
    ).with_values({"train.iterations": 1})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_LOGGING_LEVEL"}
    environment["PREFECT_LOGGING_TO_API_ENABLED"] = "true"
    command = [sys.executable, "-c", "from ratchet.flows.commands.app import main; main()", "train", str(path)]
    done = subprocess.run(command, env=environment, check=True, timeout=900, capture_output=True, text=True)
    assert "generate" not in done.stderr, "logs go to the server, not over the terminal"

    with SyncPrefectClient(prefect_server) as client:
        tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[name]))
        [iteration] = client.read_flow_runs(flow_run_filter=tagged)
        assert iteration.name == f"{name} · it 0"
        expected = {f"{name} · it 0 · {stage} 2/2" for stage in ("generate", "score", "old_log_probs", "values")}
        expected |= {f"{name} · it 0 · {stage}" for stage in ("advantages", "update_actor", "close")}
        tasks = eventually(
            lambda: {run.name: run for run in client.read_task_runs(flow_run_filter=tagged)},
            lambda tasks: expected <= set(tasks),
        )
        assert not any(run.tags for run in tasks.values()), "tags are places in queues"

        bar = artifact(client, f"{name.lower()}-score")
        assert (bar.type, bar.data, bar.description) == ("progress", 100.0, f"{name} · it 0 · score 2/2")
        link = artifact(client, f"{name.lower()}-report")
        assert f"file://{tmp_path}/{name}/report.html" in str(link.data)

        logged = eventually(
            lambda: {
                log.message
                for log in client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[iteration.id])), limit=200)
            },
            lambda messages: any("closed" in message for message in messages),
        )
        assert {f"{name} · it 0 · generate {done}/2" for done in (0, 1, 2)} <= logged
        assert f"{name} · it 0 · update_actor: done" in logged

    assert "<html" in (tmp_path / name / "report.html").read_text()
    assert "report.html" not in unreached(open_run(f"file://{tmp_path}/{name}").store)


def artifact(client: SyncPrefectClient, key: str) -> Artifact:
    [found] = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    return found


def eventually(read: Callable[[], T], good: Callable[[T], bool], seconds: float = 180.0) -> T:
    """Logs and states reach the server a moment after they were written."""
    deadline = time.monotonic() + seconds
    while not good(found := read()):
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    return found
