"""Snapshots that are written while the next iteration generates: a crash before one is durable costs a replay only."""

from __future__ import annotations

import signal

import pytest

from ratchet.infra.store.records import ShardCommit, Snapshot
from ratchet.rlhf.config import RunConfig
from tests.crash.conftest import ITERATIONS
from tests.history import History
from tests.processes import Fault, Processes

SLOW = Fault(
    "put",
    r"checkpoints/[a-z]+/0*([12])\..*/optimizer\.safetensors",
    "before",
    count=0,
    until=r'"kind":"shard","iteration":\1,"stage":"generate"',
)
"""A store that takes its time for a large file: by then the next iteration has generated something."""


@pytest.fixture
def background(config: RunConfig) -> RunConfig:
    return config.with_values({"checkpoint.background": True})


def test_the_next_iteration_generates_meanwhile(
    background: RunConfig, uninterrupted: dict[int, History], processes: Processes
) -> None:
    child = processes.train(background, SLOW)
    assert child.wait() == 0, child.text
    history = History.of(background)
    history.check_sound()
    assert history.results == uninterrupted[1].results
    commits = [commit for record in history.records for commit in record.commits]
    durable = [commit.version for commit in commits if isinstance(commit, Snapshot)]
    assert durable == list(range(1, ITERATIONS + 1)), "each of them, the last one too"
    for version in durable[:-1]:
        before = commits[: [isinstance(each, Snapshot) and each.version == version for each in commits].index(True)]
        assert any(isinstance(each, ShardCommit) and each.iteration == version for each in before)
    assert set(history.run.state.snapshots) == {ITERATIONS}, "older ones are let go as in the foreground"
    assert len(list(history.folder.glob("checkpoints/actor/*/*.safetensors"))) == 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("file", ["actor/000002.*/model", "critic/000002.*/manifest"])
def test_killed_while_a_snapshot_is_written(
    file: str, when: str, background: RunConfig, uninterrupted: dict[int, History], processes: Processes
) -> None:
    killed = processes.train(background, SLOW, Fault("put", f"checkpoints/{file}", when))
    assert killed.wait() == -signal.SIGKILL
    began = History.of(background)
    assert set(began.state.snapshots) == {1}
    assert began.state.iteration == 2, "the iteration is closed, and its snapshot is not there yet"
    resumed = processes.train(background)
    assert resumed.wait() == 0, resumed.text
    assert {("update_actor", 1), ("update_critic", 1)} <= set(resumed.engine_calls), "replayed"
    history = History.of(background)
    history.check_sound()
    assert history.results == uninterrupted[1].results


def test_the_last_snapshot_is_never_left_out(
    background: RunConfig, uninterrupted: dict[int, History], processes: Processes
) -> None:
    """Nothing comes after it that would make another."""
    killed = processes.train(background, Fault("put", f"checkpoints/actor/{ITERATIONS:06d}"))
    assert killed.wait() == -signal.SIGKILL
    resumed = processes.train(background)
    assert resumed.wait() == 0, resumed.text
    assert History.of(background).results == uninterrupted[1].results


def test_a_store_that_is_away_for_a_moment_is_waited_for(
    background: RunConfig, uninterrupted: dict[int, History], processes: Processes
) -> None:
    child = processes.train(background, Fault("put", "checkpoints/actor/000001", "before", outage_s=2.0))
    assert child.wait() == 0, child.text
    assert History.of(background).results == uninterrupted[1].results


@pytest.mark.parametrize("in_background", [False, True])
def test_a_snapshot_is_deleted_when_the_record_that_retires_it_is_there(
    in_background: bool, config: RunConfig, processes: Processes
) -> None:
    changed = config.with_values({"checkpoint.background": in_background})
    killed = processes.train(changed, Fault("create", '{"kind":"expire"', "before"))
    assert killed.wait() == -signal.SIGKILL
    history = History.of(changed)
    assert history.state.snapshots
    for roles in history.state.snapshots.values():
        for ref in roles.values():
            files = history.run.store.checkpoint(ref).files.values()
            assert all((history.folder / file.key).exists() for file in files)
