"""A driver dies by SIGKILL at every point of every stage; the next one goes on, and nothing shows that it happened.

There are 72 cases: nine stages, four points, and snapshots every iteration or every third.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from tests.crash.conftest import EVERY, ITERATIONS, crash_config
from tests.history import History
from tests.processes import Fault, Processes
from tests.tiers import sampled

STAGES = (
    "generate",
    "score",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "update_critic",
    "update_actor",
    "close",
)
POINTS = ("before", "data", "manifest", "record")


def _fault(stage: str, point: str, iteration: int) -> Fault:
    """Where the driver dies."""
    version = f"{iteration + 1:06d}"
    if point == "record":
        kind = (
            f'"kind":"close","iteration":{iteration}'
            if stage == "close"
            else (f'"kind":"stage","iteration":{iteration},"stage":"{stage}"')
        )
        return Fault("create", "{" + kind)
    if stage == "close":
        return {
            "before": Fault("put", f"checkpoints/actor/{version}", "before"),
            "data": Fault("put", f"checkpoints/critic/{version}.*/model.safetensors"),
            "manifest": Fault("put", f"index/{iteration:06d}"),
        }[point]
    manifest = f"manifests/iteration={iteration:06d}/{stage}\\."
    if point == "manifest":
        return Fault("put", manifest)
    if stage.startswith("update"):  # no data file: in the middle of the update, between two optimizer steps
        step = 4 * iteration + (1 if stage == "update_critic" else 3)
        return Fault("put", manifest, "before") if point == "before" else Fault("step", count=step)
    # the second shard, where there is one, so that the first is already committed
    shard = 0 if stage == "advantages" else 1
    when = "before" if point == "before" else "after"
    return Fault("put", f"trajectories/{stage}/iteration={iteration:06d}/.*part-{shard:05d}", when)


@sampled(80)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("stage", STAGES)
def test_killed_and_resumed(
    stage: str,
    point: str,
    every: int,
    workspace: Path,
    uninterrupted: dict[int, History],
    processes: Processes,
) -> None:
    config = crash_config(workspace, processes.folder / "runs", every)
    iteration = every - 1 if stage == "close" and every > 1 else 1  # close: where a snapshot is due
    killed = processes.train(config, _fault(stage, point, iteration))
    assert killed.wait() == -9, killed.text
    then = History.of(config)
    if stage == "close":
        assert (then.state.iteration > iteration) == (point == "record")
    else:
        assert then.state.iteration == iteration
        assert (stage in then.state.stages) == (point == "record")
        sharded = f"{stage}", 1, 1
        if sharded in uninterrupted[every].shards:
            assert (stage, 1, 0) in then.shards, "a shard is committed as soon as it is there"

    resumed = processes.train(config)
    assert resumed.wait() == 0, resumed.text

    expected, now = uninterrupted[every], History.of(config)
    now.check_sound()
    assert now.results == expected.results
    assert now.shards == expected.shards
    assert now.stages == expected.stages
    frame = now.run.trajectories()
    assert len(frame) == ITERATIONS * config.trajectories_per_iteration
    pd.testing.assert_frame_equal(frame, expected.run.trajectories())

    # no committed shard was computed again, and every other just once
    missing = set(expected.shards) - set(then.shards)
    assert Counter(resumed.computed_shards) == Counter(missing)
    assert Counter(resumed.engine_calls) == Counter(
        [(name, place) for name, place, _ in missing if name not in ("score", "advantages")]
        # and updates were replayed since the newest snapshot, and no further back
        + [
            (update, place)
            for update in ("update_critic", "update_actor")
            for place in range(max(then.state.snapshots, default=0), ITERATIONS)
        ]
    )
