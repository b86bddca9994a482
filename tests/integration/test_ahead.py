"""Runs that generate ahead: crashes leave no trace, nothing is trained on twice, and nothing is staler than allowed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ratchet.infra.store.records import Assigned, Snapshot
from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes

ITERATIONS = 4


@pytest.fixture
def start(workspace: Path, processes: Processes) -> Any:
    def start(name: str, *faults: Fault, **changes: Any) -> tuple[RunConfig, Child]:
        config = tiny.config(
            workspace,
            run__name=name,
            run__store=f"file://{processes.folder}/runs",
            reward__function="tests.rewards:letters",
            train__iterations=ITERATIONS,
            actor__lr=1e-2,
            **changes,
        )
        path = processes.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return config, processes.cli("train", path, faults=faults)

    return start


def finished(config: RunConfig, child: Child, most: int) -> History:
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    assert history.state.iteration == ITERATIONS
    frame = history.run.trajectories()
    assert len(frame) == ITERATIONS * config.trajectories_per_iteration
    assert frame["prompt_id"].nunique() == ITERATIONS * config.data.prompts_per_iteration
    stale = frame["iteration"] - frame["policy_version"]
    assert stale.between(0, most).all()
    assert frame["rollout_is_weights"].notna().all(), "corrected, unless told otherwise"
    return history


STAGE = '{"kind":"stage","iteration":'
CRASHES = {
    "in an open iteration": Fault("create", STAGE + '1,"stage":"values"'),
    "ahead, with some shards": Fault("put", "trajectories/generate/iteration=000002/.*part-00001", "before"),
    "ahead, before the assignment": Fault("create", '{"kind":"assigned","iteration":2', "before"),
    "after an assignment": Fault("create", '{"kind":"assigned","iteration":2'),
    "ahead, complete": Fault("create", STAGE + '2,"stage":"generate"'),
    "with the actor updated": Fault("create", STAGE + '1,"stage":"update_actor"'),
    "closed": Fault("create", '{"kind":"close","iteration":1'),
}


def test_one_step_off_is_the_same_to_the_bit_after_any_crash(start: Any) -> None:
    expected = finished(*start("quiet", rollout__mode="one_step_off"), most=1)
    frame = expected.run.trajectories()
    assert frame.groupby("iteration")["policy_version"].unique().map(list).tolist() == [[0], [0], [1], [2]]
    for number, (place, fault) in enumerate(CRASHES.items()):
        config, killed = start(f"crash-{number}", fault, rollout__mode="one_step_off")
        assert killed.wait() == -signal.SIGKILL, (place, killed.text)
        then = History.of(config)
        _, resumed = start(f"crash-{number}", rollout__mode="one_step_off")
        history = finished(config, resumed, most=1)
        assert history.results == expected.results, place
        computed = [(name, k, shard) for name, k, shard in resumed.computed_shards]
        assert not set(computed) & set(then.shards), f"{place}: what was committed is not computed again"


def test_rare_snapshots_change_nothing(start: Any) -> None:
    """The rollout gets its weights from the actor, which replays updates for it if need be."""
    changes: dict[str, Any] = {"rollout__mode": "one_step_off", "checkpoint__every": 10}
    expected = finished(*start("quiet", **changes), most=1)
    assert [commit.version for commit in expected.commits(Snapshot)] == [ITERATIONS]
    for number, place in enumerate(["ahead, with some shards", "with the actor updated", "closed"]):
        config, killed = start(f"crash-{number}", CRASHES[place], **changes)
        assert killed.wait() == -signal.SIGKILL, (place, killed.text)
        _, resumed = start(f"crash-{number}", **changes)
        assert finished(config, resumed, most=1).results == expected.results, place


@pytest.mark.parametrize("place", CRASHES)
def test_async_trains_on_everything_once_and_on_nothing_too_old(place: str, start: Any) -> None:
    changes: dict[str, Any] = {"rollout__mode": "async", "rollout__max_staleness": 2}
    config, killed = start("crashed", CRASHES[place], **changes)
    assert killed.wait() == -signal.SIGKILL, killed.text
    then = History.of(config)
    _, resumed = start("crashed", **changes)
    history = finished(config, resumed, most=2)
    assert not set(resumed.computed_shards) & set(then.shards)
    for stage, iteration in then.stages:
        assert history.stages[stage, iteration] == 1
    first = [(each.iteration, each.shard, each.weights.version) for each in history.commits(Assigned)]
    frame = history.run.trajectories(columns=["prompt_id", "policy_version"])
    per_shard = config.rollout.prompts_per_shard
    for row in frame.itertuples():
        shard = int(str(row.prompt_id)[-5:]) // per_shard
        last = [version for k, number, version in first if (k, number) == (row.iteration, shard)][-1]
        assert row.policy_version == last, "generated with what was assigned to the shard before"


def test_what_is_older_than_the_config_allows_is_not_trained_on(start: Any) -> None:
    fault = Fault("create", STAGE + '2,"stage":"generate"')
    _, killed = start("older", fault, rollout__mode="async", rollout__max_staleness=2)
    assert killed.wait() == -signal.SIGKILL, killed.text
    _, refused = start("older")
    assert refused.wait() == 2, refused.text
    assert "rollout.mode sync allows 0" in refused.text
    assert "ratchet fork older" in refused.text


def test_a_generation_goes_on_with_new_weights(start: Any) -> None:
    """Every token has the log-prob of the version that is recorded for it: under the last one, those of the others
    differ."""
    changes: dict[str, Any] = {"rollout__mode": "async", "rollout__partial": True}
    history = finished(*start("partial", **changes), most=1)
    frame = history.run.trajectories()
    assert frame["token_versions"].isna().all(), "in one executor, weights come between two generations"
    gaps = (frame["rollout_log_probs"] - frame["old_log_probs"]).map(lambda row: np.abs(row).max())
    fresh = frame["policy_version"] == frame["iteration"]
    assert gaps[fresh].max() < 1e-4
    assert gaps[~fresh].max() > 1e-3
