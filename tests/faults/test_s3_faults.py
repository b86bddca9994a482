"""An object store that answers badly, late, or not at all, or that does what it is asked and loses the answer."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from urllib.parse import urlparse

import fsspec
import pytest
import s3fs

from ratchet.flows.train import train
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.object_store import ObjectStore
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.faults.proxy import Action, Rule, proxy
from tests.tiers import sampled

RECORD, SHARD, MANIFEST = r"/log/0", r"trajectories/values/", r"/manifests/"


def run_config(workspace: Path, store: str) -> RunConfig:
    return tiny.config(
        workspace,
        run__name="faulty",
        run__store=store,
        reward__function="tests.rewards:letters",
        train__iterations=1,
    )


@pytest.fixture(scope="module")
def expected(workspace: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> object:
    """Weights of the run on a local disk."""
    config = run_config(workspace, f"file://{tmp_path_factory.mktemp('local')}")
    train(config)
    return open_run(run_url(config.run.store, "faulty")).state.weights


@sampled(8)
@pytest.mark.parametrize(
    ("rules", "timeout_s"),
    [
        ([("PUT", RECORD, "503", 3), ("PUT", SHARD, "503", 3), ("GET", MANIFEST, "503", 2)], 60),
        ([("PUT", RECORD, "409", 3)], 60),
        ([("PUT", RECORD, "dropped after", 4), ("PUT", SHARD, "dropped after", 2)], 60),
        ([("PUT", RECORD, "dropped before", 4), ("GET", SHARD, "dropped before", 2)], 60),
        ([("PUT", RECORD, "slow", 2), ("GET", SHARD, "slow", 1)], 60),
        ([("PUT", RECORD, "never", 1), ("GET", SHARD, "never", 1)], 2),
    ],
    ids=["503", "409", "answer lost", "connection lost", "slow", "never"],
)
def test_a_run_comes_through(
    rules: list[tuple[str, str, Action, int]],
    timeout_s: int,
    s3: str,
    workspace: Path,
    expected: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is committed twice or lost, and the weights are those of a run that met no fault."""
    port = urlparse(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    told = [Rule(*rule) for rule in rules]
    with proxy(port, *told) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": timeout_s}})
        s3fs.S3FileSystem.clear_instance_cache()
        config = run_config(workspace, f"{s3}/faults-{uuid.uuid4().hex}")
        train(config)
    assert all(rule.struck == rule.times for rule in told), told
    monkeypatch.undo()
    s3fs.S3FileSystem.clear_instance_cache()
    run = open_run(run_url(config.run.store, "faulty"))
    assert run.state.weights == expected
    assert len(run.trajectories()) == config.trajectories_per_iteration
    records = [key for key in run.store.objects.list("log") if key.startswith("log/0")]
    assert len(records) == run.state.slot + 1


def test_a_store_that_lets_several_writers_win_a_race_is_refused(
    s3: str, workspace: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses whoever comes later, as OpenStack Swift does, and so looks as if it kept drivers apart."""
    port = urlparse(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    with proxy(port, racy := Rule("PUT", "", "racy", times=10**9)) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        s3fs.S3FileSystem.clear_instance_cache()
        config = run_config(workspace, f"{s3}/races-{uuid.uuid4().hex}")
        objects = ObjectStore(run_url(config.run.store, "faulty"))
        objects.create("log/one", b"first")
        with pytest.raises(FileExistsError):
            objects.create("log/one", b"second")
        objects.delete(["log/one"])
        with pytest.raises(UserError, match="ignores create-if-absent, so two drivers could overwrite"):
            train(config)
        assert objects.list("") == []
    assert racy.struck > 8
    monkeypatch.undo()
    s3fs.S3FileSystem.clear_instance_cache()
