"""A run in a bucket: written by drivers that come and go, read by people with nothing but its URL."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pandas as pd
import pytest

from ratchet.infra.runs.run import open_run
from ratchet.infra.store.log import Fenced
from ratchet.infra.store.manifest import BLOCK, Checkpoint
from ratchet.infra.store.records import Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.errors import UserError
from tests.bare_run import claimed, complete, write
from tests.extras import needs
from tests.racing import race


@pytest.fixture
def url(each_s3: str) -> str:
    return f"{each_s3}/runs/{uuid.uuid4().hex}"


def test_a_run_in_a_bucket(url: str) -> None:
    assert RunStore.at(url).objects.honours_create()
    with pytest.raises(UserError, match="there is no run at"):
        open_run(url)

    first = claimed(url)
    shards = [write(first, 0), write(first, 1)]
    first.commit(shards[0])
    first.commit(shards[1], complete(first, *(shard.data for shard in shards)))
    first.close({"loss": 0.5, "reward/mean": 1.0})
    kept = write(first, 0)
    first.commit(kept)
    write(first, 1)  # and was killed

    second = claimed(url)
    assert second.log.term == 2
    assert second.state.iteration == 1
    assert set(second.committed_shards("generate")) == {0}
    with pytest.raises(Fenced):
        first.commit(write(first, 1, attempt=1))
    last = write(second, 1)
    second.commit(last, complete(second, kept.data, last.data))
    second.close({"loss": 0.25, "reward/mean": float("nan")})
    assert RunStore.at(url).log.read() == second.state

    run = open_run(url)
    names = [f"it{iteration:06d}-p{prompt:05d}-s{s:02d}" for iteration in (0, 1) for prompt in (0, 1) for s in (0, 1)]
    frame = run.trajectories(columns=["trajectory_id", "response_ids", "rollout_log_probs", "response"])
    assert list(frame["trajectory_id"]) == names
    assert list(frame["iteration"]) == [0] * 4 + [1] * 4
    assert frame["response_ids"][7].tolist() == [5, 6, 7]
    assert frame["rollout_log_probs"][7].tolist() == [-0.5, -0.25, -1.0]
    assert list(run.trajectories([1])["trajectory_id"]) == names[4:]
    assert run.metrics()[["iteration", "loss"]].to_numpy().tolist() == [[0, 0.5], [1, 0.25]]
    assert run.metrics()["reward/mean"].isna().tolist() == [False, True]
    assert set(run.progress(1)) == {"generate"}

    plain = pd.read_parquet(f"{url}/trajectories/generate", storage_options={"use_listings_cache": False})
    assert sorted(plain["trajectory_id"]) == names, "each row once, as the folder stands"
    assert sorted(plain["iteration"].astype(int)) == [0] * 4 + [1] * 4


def test_pandas_in_another_process_needs_the_url_only(url: str) -> None:
    store = claimed(url)
    shard = write(store, 0)
    store.commit(shard, complete(store, shard.data))
    store.close({"loss": 0.5})
    script = (
        "import sys, pandas\n"
        "print(len(pandas.read_parquet(sys.argv[1] + '/trajectories/generate')))\n"
        "print(pandas.read_parquet(sys.argv[1] + '/metrics').loss.tolist())\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script, url], env=os.environ, capture_output=True, text=True, check=True, timeout=600
    )
    assert shown.stdout.split() == ["2", "[0.5]"]


def test_a_checkpoint_of_many_parts(each_s3: str) -> None:
    """Above 100 MiB, s3fs uploads in parts: the object is whole, or not there."""
    store = claimed(f"{each_s3}/{uuid.uuid4().hex}")
    large = os.urandom(2**20) * 130
    weights = Weights(version=1, digest="x")
    folder = store.checkpoint_folder("actor", weights)
    files = store.write_checkpoint_files(folder, {"model.safetensors": large})
    ref = store.write_checkpoint_manifest(folder, Checkpoint(role="actor", weights=weights, files=files))
    checkpoint = store.checkpoint(ref)
    assert checkpoint.files["model.safetensors"].bytes == len(large)
    assert store.read_checkpoint(checkpoint)["model.safetensors"] == large
    read, start = store.ranges(checkpoint), 5 * BLOCK - 7
    assert read("model.safetensors", start, start + BLOCK) == large[start : start + BLOCK]
    [key] = [key for key in store.objects.list("checkpoints/") if key.endswith(".safetensors")]
    info = store.objects.backend.fs.info(f"{each_s3.removeprefix('s3://')}/{store.url.rpartition('/')[2]}/{key}")  # type: ignore[attr-defined]
    assert info["ETag"].strip('"').endswith("-3"), "three parts"


@needs("ceph")
def test_sixteen_drivers_race(on_ceph: str) -> None:
    """Each slot of the log has one winner, and each driver was told what the log says."""
    told = race(f"{on_ceph}/{uuid.uuid4().hex}", drivers=16, claims=1)
    assert len(told.committed) + told.fenced == 16
