"""The story of docs/beside.md: TRL trains, its files are imported, and bisect finds where the reward was exploited."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ratchet.infra.runs.run import open_run
from ratchet.tasks.analysis.bisect import bisect
from tests.extras import needs
from tests.processes import Processes

ROOT = Path(__file__).parents[2]


@needs("trl")
def test_the_iteration_that_began_to_exploit_a_reward_of_trl_is_found(processes: Processes) -> None:
    folder = processes.folder
    shutil.copytree(ROOT / "examples", folder / "examples")
    for script in (("countdown/model.py", "models/countdown-base"), ("beside/train.py",)):
        command = [sys.executable, f"examples/{script[0]}", *script[1:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    store = f"file://{folder}/runs"
    child = processes.cli("import", folder / "out", "--from", "trl", "--run", "digits", "--store", store)
    assert child.wait() == 0, child.text
    assert "digits: 16 steps and 0 validations imported, 1024 trajectories" in child.text
    run = open_run(f"{store}/digits")
    scores = run.metrics()["critic/score/mean"]
    assert scores.iloc[0] < 0.1 and scores.iloc[-1] > 0.5
    rescored, found = bisect(run, f"{folder}/examples/beside/meant.py:meant", [])
    assert found is not None and 1 <= found.iteration <= 8
    assert rescored[-1].strict < 0.15 and len(rescored) <= 7
    exploiting = run.trajectories(15)["response"]
    assert exploiting.map(lambda text: max(map(text.count, "0123456789"))).median() > 8
