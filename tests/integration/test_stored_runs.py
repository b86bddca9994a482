"""The run in tests/data/stored is read and continued; one of another schema is refused. See `tests.stored`."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ratchet.infra.runs.run import open_run
from ratchet.infra.store.records import SCHEMA_VERSION
from ratchet.rlhf.metrics import BY_NAME, VALIDATION
from tests.history import History
from tests.processes import Processes
from tests.stored import RUN, STORED
from tests.tiers import sampled


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stored run, in the current folder, as its config's relative paths want it."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / RUN


def test_a_stored_run_is_read(stored: Path) -> None:
    run = open_run(f"file://{stored}")
    assert run.state.schema_version == SCHEMA_VERSION
    assert run.state.iteration == 1
    frame = run.trajectories()
    assert frame.groupby("iteration").size().to_dict() == {0: 8, 1: 8}
    first = frame.iloc[0]
    assert first["trajectory_id"] == "it000000-p00000-s00"
    assert len(first["response_ids"]) == len(first["advantages"]) == len(first["old_log_probs"]) == 8
    gaps = (frame["rollout_log_probs"] - frame["old_log_probs"]).map(lambda row: np.abs(row).max())
    assert gaps.max() < 1e-4, "the weights are those that generated"
    names = set(run.metrics()) - {"iteration"}
    assert {name for name in map(str, names) if not name.startswith(VALIDATION)} <= set(BY_NAME)
    assert {"timing_s/gen", "timing_s/ref", "actor/reward_kl_penalty_coeff"} <= names


def test_a_stored_run_is_continued_without_computing_again(stored: Path, processes: Processes) -> None:
    """It was killed after its critic was updated: only the rest of the open iteration is computed."""
    run = open_run(f"file://{stored}")
    assert {stage for stage, done in run.progress(1).items() if done == "✓"} == {
        *("generate", "reward_model", "score", "old_log_probs", "ref_log_probs", "values", "advantages"),
        "update_critic",
    }
    columns = ["trajectory_id", "response", "score"]
    before = run.trajectories([0, 1], columns)
    here, store = partial(os.chdir, Path.cwd()), ("--store", f"file://{stored.parent}")
    resumed = processes.cli("resume", RUN, *store, "--trust-code", setup=here)
    assert resumed.wait(600) == 0, resumed.text
    assert not [shard for shard in resumed.computed_shards if shard[1] == 1]
    history = History.at(stored)
    history.check_sound()
    assert history.state.iteration == 3
    assert history.run.trajectories([0, 1], columns).equals(before)
    verified = processes.cli("verify", RUN, *store)
    assert verified.wait(600) == 0, verified.text
    assert f"{RUN} is intact" in verified.text


@sampled(3)
@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
@pytest.mark.parametrize("command", ["status", "resume", "verify"])
def test_a_run_of_another_schema_is_refused(stored: Path, processes: Processes, command: str, version: int) -> None:
    for path in (stored / "log").glob("0*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": version}))
    before = {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()}
    refused = processes.cli(command, RUN, "--store", f"file://{stored.parent}")
    assert refused.wait() == 2
    assert f"is of schema version {version}, and this release reads version {SCHEMA_VERSION}: open the" in refused.text
    assert len(refused.text.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()} == before
