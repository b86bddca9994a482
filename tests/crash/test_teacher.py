"""A driver dies by SIGKILL while a teacher is asked; the next one asks for the rest, and ends with the same bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.processes import Fault, Processes

POINTS = {
    "before": Fault("put", "trajectories/teacher_log_probs/iteration=000001/.*part-00001", "before"),
    "data": Fault("put", "trajectories/teacher_log_probs/iteration=000001/.*part-00001"),
    "manifest": Fault("put", r"manifests/iteration=000001/teacher_log_probs\."),
    "record": Fault("create", '{"kind":"stage","iteration":1,"stage":"teacher_log_probs"'),
    "update": Fault("step", count=5),
}
"""The second shard; the last one is an optimizer step that reads what the teacher said."""


def config_of(workspace: Path, store: Path) -> RunConfig:
    return tiny.config(
        workspace,
        run__store=f"file://{store}",
        teacher={"path": str(workspace / "model"), "dtype": "float32", "top_k": 6, "args": {"rms_norm_eps": 0.1}},
        reward__function="tests.rewards:letters",
        algorithm__advantage={"type": "grpo"},
        algorithm__kl={},
        algorithm__distillation={"divergence": "jsd", "beta": 0.3},
        rollout__temperature=0.8,
    )


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed(point: str, workspace: Path, processes: Processes) -> None:
    alone, config = (config_of(workspace, processes.folder / name) for name in ("alone", "runs"))
    child = processes.train(alone)
    assert child.wait() == 0, child.text
    killed = processes.train(config, POINTS[point])
    assert killed.wait() == -9, killed.text
    then = History.of(config)
    assert ("teacher_log_probs", 1, 0) in then.shards, "a shard is committed as soon as it is there"
    assert ("teacher_log_probs" in then.state.stages) == (point in ("record", "update"))
    resumed = processes.train(config)
    assert resumed.wait() == 0, resumed.text

    expected, now = History.of(alone), History.of(config)
    now.check_sound()
    assert now.results == expected.results
    pd.testing.assert_frame_equal(now.run.trajectories(), expected.run.trajectories())
    missing = set(expected.shards) - set(then.shards)
    assert Counter(resumed.computed_shards) == Counter(missing), "no committed shard is computed again"
