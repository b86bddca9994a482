"""A whole run on a real S3-compatible server: killed, resumed, queried, forked; and no secret in it anywhere."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pandas as pd
import pytest

from ratchet.flows.train import train
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.query import query
from ratchet.infra.runs.run import open_run
from ratchet.tasks.analysis.plan import fork_run
from tests import tiny
from tests.processes import Fault, Processes


def test_a_run_in_a_bucket(each_s3: str, workspace: Path, processes: Processes, tmp_path: Path) -> None:
    config = tiny.config(
        workspace,
        run__name="bucket",
        run__store=f"{each_s3}/runs-{uuid.uuid4().hex}",
        reward__function="tests.rewards:letters",
        train__iterations=2,
    )
    killed = processes.train(config, Fault("put", "manifests/iteration=000001/values"))
    assert killed.wait() == -9, killed.text
    resumed = processes.train(config)
    assert resumed.wait() == 0, resumed.text
    local = config.with_values({"run.store": f"file://{tmp_path}/runs"})
    train(local)

    run, expected = open_run(run_url(config.run.store, "bucket")), open_run(f"file://{tmp_path}/runs/bucket")
    assert run.state.weights == expected.state.weights
    frame = run.trajectories()
    pd.testing.assert_frame_equal(frame, expected.trajectories())
    in_bucket = pd.read_parquet(f"{run.store.url}/trajectories/score")
    assert sorted(in_bucket["trajectory_id"]) == sorted(frame["trajectory_id"])
    means = query(run, "select iteration, avg(score) as mean from trajectories group by 1 order by 1")
    assert list(means["mean"]) == pytest.approx(list(frame.groupby("iteration")["score"].mean()), rel=1e-6)

    child = config.with_values({"run.name": "child", "reward.function": "tests.rewards:digits"})
    fork_run(run, child, 1, "score")
    train(child)
    shared, again = frame, open_run(run_url(config.run.store, "child")).trajectories()
    assert list(again["response"]) == list(shared["response"])
    assert (again["score"] != shared["score"]).any()

    secrets = [os.environ[name].encode() for name in ("AWS_SECRET_ACCESS_KEY",)]
    for key in run.store.objects.list(""):
        data = run.store.objects.get(key)
        assert not any(secret in data for secret in secrets), f"{key} holds a secret"
