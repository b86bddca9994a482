"""When a snapshot is due, and what a run says about it at the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.infra.execution.snapshots import Snapshots, describe, is_affordable
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.worker import Worker
from ratchet.infra.workers.worker_groups import WorkerGroups
from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.padded import properties


def snapshots_of(config: RunConfig, folder: Path) -> Snapshots:
    store = RunStore(ObjectStore(f"file://{folder}"))
    return Snapshots(config, store, WorkerGroups(config, store, lambda: ""))


@properties
@given(costs=st.lists(st.floats(0, 100), min_size=1, max_size=30), max_share=st.floats(0.01, 1.0))
def test_snapshots_cost_at_most_their_share_of_the_time(costs: list[float], max_share: float) -> None:
    """Each follows as soon as it may, after steps of a second."""
    waited, now, began, last = 0.0, 0.0, 0.0, 0.0
    for cost in costs:
        while not is_affordable(last, now - began, max_share):
            now += 1.0
        if last:
            assert waited <= max_share * now * (1 + 1e-9)
        began, last = now, cost
        now += cost
        waited += cost


def test_a_first_snapshot_is_due_at_once_and_the_next_when_it_is_cheap(tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    config = tiny.config(
        tmp_path, checkpoint={"keep": {"every": 4}, "max_replay": 7}, critic=None, algorithm={"advantage": "grpo"}
    )
    snapshots = snapshots_of(config, tmp_path / "run")
    assert snapshots.is_due(1), "what it costs is not known yet"
    snapshots._cost_s = 1e9  # the last one took very long
    assert [version for version in range(1, 9) if snapshots.is_due(version)] == [4, 7, 8], "keep.every, max_replay"
    snapshots._cost_s = 0.0
    snapshots.being_written = 1
    assert [version for version in range(1, 9) if snapshots.is_due(version)] == [4, 7, 8], "one at a time"


def test_every_is_exact(tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    snapshots = snapshots_of(tiny.config(tmp_path, checkpoint__every=3), tmp_path / "run")
    assert [version for version in range(1, 10) if snapshots.is_due(version)] == [3, 6, 9]


@pytest.mark.parametrize(
    ("checkpoint", "often"),
    [
        ({"every": 3}, "every 3 iterations"),
        ({"max_share": 0.1}, "at least every 10 iterations, more often if they take no more than 10 % of the time"),
    ],
)
def test_a_run_says_how_large_snapshots_are_and_how_often_they_are_taken(
    checkpoint: dict[str, object], often: str, tmp_path: Path
) -> None:
    tiny.workspace(tmp_path)
    config = tiny.config(tmp_path, checkpoint=checkpoint)
    store = RunStore(ObjectStore(f"file://{tmp_path}/run"))
    worker = Worker(config, store)
    written = sum(
        file.nbytes
        for role in ("actor", "critic")
        for file in worker.engines.model(role, learns=True).parameters.values()
    )
    said = describe(config)
    size, _, rest = said.removeprefix("snapshots of ").partition(" kB ")
    assert rest == often
    # the weights and two moments; the critic's files have a head for each token, and it has one for a value
    assert float(size) * 1e3 == pytest.approx(3 * written, rel=0.1)
