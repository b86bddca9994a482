"""Runs that older versions of this project wrote: they are read and resumed, or refused.

Their rewards are functions of tests/rewards.py, and they hold its digest: a change to that file changes their rewards.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from ratchet.infra.runs.run import open_run
from ratchet.infra.store.records import Diverged
from ratchet.rlhf.metrics import BY_NAME
from tests import tiny
from tests.history import History
from tests.processes import Processes

STORED = Path(__file__).parents[1] / "data" / "stored"


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a stored run, in a folder as its config's relative paths want it."""
    shutil.copytree(STORED / request.param, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs").mkdir()
    shutil.move(tmp_path / "run", tmp_path / "runs" / "stored")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "stored"


@pytest.mark.promise
@pytest.mark.parametrize("stored", ["schema-2"], indirect=True)
def test_a_run_of_this_schema_is_read_and_gone_on_with(stored: Path, processes: Processes) -> None:
    run = open_run(f"file://{stored}")
    assert (run.state.iteration, run.progress(1)) == (1, {"generate": "✓"})
    frame = run.trajectories()
    assert frame.groupby("iteration").size().to_dict() == {0: 8, 1: 8}
    first = frame.iloc[0]
    assert first["trajectory_id"] == "it000000-p00000-s00"
    assert first["response_ids"].tolist() == [8, 40, 42, 8, 45, 6, 10, 68]
    assert len(first["advantages"]) == len(first["old_log_probs"]) == 8
    metrics = run.metrics()
    assert metrics["response_length/max"].tolist() == [8.0]
    assert set(metrics) - {"iteration"} <= set(BY_NAME), "all have today's names"
    assert {"timing_s/gen", "timing_s/ref", "actor/reward_kl_penalty_coeff"} <= set(metrics)

    asked = "select count(*) as n, count(turns) as turns from trajectories"
    told = processes.cli("query", "stored", asked, "--store", f"file://{stored.parent}", "--format", "json")
    assert told.wait() == 0, told.text
    assert json.loads(told.text) == {"n": 16, "turns": 0}, "columns that are younger are null"

    resumed = processes.cli(
        "resume", "stored", "--store", f"file://{stored.parent}", setup=partial(os.chdir, Path.cwd())
    )
    assert resumed.wait() == 0, resumed.text
    assert "the KL in the reward k3 -> k1, the only estimator with the right gradient" in resumed.text
    computed = {stage for stage, iteration, _ in resumed.computed_shards}
    assert computed == {"score", "old_log_probs", "ref_log_probs", "values", "advantages"}, "generations are kept"
    resumed_with = open_run(f"file://{stored}").trajectories([1])
    gaps = (resumed_with["rollout_log_probs"] - resumed_with["old_log_probs"]).map(lambda row: np.abs(row).max())
    assert gaps.max() < 1e-4, "the stored weights were loaded: those that generated"
    history = History.of(open_run(f"file://{stored}").config)
    history.check_sound()
    assert history.state.iteration == 2
    assert history.run.trajectories()["response_ids"].map(list).tolist() == frame["response_ids"].map(list).tolist()


@pytest.mark.parametrize("stored", ["schema-2"], indirect=True)
def test_what_was_stored_without_messages_no_reward_model_can_read(stored: Path, processes: Processes) -> None:
    judge = tiny.reward_model_folder(stored.parent / "judge", Path("model"))
    here, store = partial(os.chdir, Path.cwd()), ("--store", f"file://{stored.parent}")
    fork = processes.cli(
        *("fork", "stored", "--at", "1:score", "--run", "judged", *store, f"reward.model={judge}"), setup=here
    )
    assert fork.wait() == 0, fork.text
    resumed = processes.cli("resume", "judged", *store, setup=here)
    assert resumed.wait() == 2, resumed.text
    assert "were generated before their messages were stored" in resumed.text
    assert "Traceback" not in resumed.text


@pytest.mark.parametrize(
    ("stored", "committed", "computed"),
    [
        (
            "schema-3",
            {"generate", "reward_model", "score", "old_log_probs", "ref_log_probs", "values", "advantages"}
            | {"update_critic"},
            set(),
        ),
        ("schema-3-dapo", {"generate", "score", "select"}, {"old_log_probs", "ref_log_probs", "advantages"}),
    ],
    indirect=["stored"],
)
def test_what_was_committed_is_not_computed_again(
    stored: Path, committed: set[str], computed: set[str], processes: Processes
) -> None:
    """One was killed after its critic was updated, the other after groups were chosen: of the open iteration just the
    rest is computed, so its fingerprints are those of then."""
    run = open_run(f"file://{stored}")
    assert run.state.iteration == 1
    assert {stage for stage, done in run.progress(1).items() if done == "✓"} >= committed
    before = run.trajectories([0, 1], ["trajectory_id", "response", "score"])
    resumed = processes.cli(
        *("resume", "stored", "--store", f"file://{stored.parent}", "--trust-code"),  # its reward is of the tests
        setup=partial(os.chdir, Path.cwd()),
    )
    assert resumed.wait(600) == 0, resumed.text
    replayed = "update_critic of iteration 1 may have given different weights: an older release computed digests in"
    assert (replayed in resumed.text) == ("update_critic" in committed), resumed.text
    assert {stage for stage, iteration, _ in resumed.computed_shards if iteration == 1} == computed
    history = History.of(open_run(f"file://{stored}").config)
    history.check_sound()
    assert history.state.iteration == 3
    assert history.run.trajectories([0, 1], ["trajectory_id", "response", "score"]).equals(before)
    assert "stored is intact" in verified(stored, processes)


@pytest.mark.parametrize("stored", ["schema-3"], indirect=True)
def test_updates_of_an_older_release_that_cannot_be_checked_may_stop_a_run(stored: Path, processes: Processes) -> None:
    config = Path("run.yaml")
    config.write_text(yaml.safe_dump(open_run(f"file://{stored}").config.model_dump(mode="json")))
    setting, here = "checkpoint.on_replay_mismatch=", partial(os.chdir, Path.cwd())
    stopped = processes.cli("train", config, f"{setting}stop", setup=here)
    assert stopped.wait(600) == 1, stopped.text
    assert "in another way; checkpoint.on_replay_mismatch=continue accepts the replayed weights" in stopped.text
    assert not History.of(open_run(f"file://{stored}").config).commits(Diverged), "nobody knows"
    accepted = processes.cli("train", config, f"{setting}continue", setup=here)
    assert accepted.wait(600) == 0, accepted.text


def verified(stored: Path, processes: Processes) -> str:
    child = processes.cli("verify", "stored", "--store", f"file://{stored.parent}")
    assert child.wait(600) == 0, child.text
    return child.text


@pytest.mark.promise
@pytest.mark.parametrize("stored", ["schema-1"], indirect=True)
@pytest.mark.parametrize("command", ["status", "resume"])
def test_a_run_of_an_older_schema_is_refused(stored: Path, processes: Processes, command: str) -> None:
    before = {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()}
    refused = processes.cli(command, "stored", "--store", f"file://{stored.parent}")
    assert refused.wait() == 2
    assert "is of schema version 1, and this release reads versions 2 to 5: open the run" in refused.text
    assert len(refused.text.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()} == before
