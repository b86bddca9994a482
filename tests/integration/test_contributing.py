"""The worked examples of CONTRIBUTING.md run as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForTokenClassification

from ratchet.flows.callbacks import Callbacks
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.rewards.functions import Reward, Score
from ratchet.rlhf.rewards.registry import load_reward
from tests import tiny
from tests.scoring import trajectory

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def example(heading: str, block: int = 0) -> str:
    """A block of Python under a heading."""
    section = TEXT.split(f"### {heading}\n")[1].split("\n### ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[block]


@pytest.mark.promise
def test_a_reward_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(example("A reward"))
    monkeypatch.syspath_prepend(tmp_path)
    reward = load_reward("my_rewards:compute_score")
    assert Reward("mine", reward).score([trajectory("any", "x" * 25)]) == [Score(0.75, {})]
    sys.modules.pop("my_rewards")


@pytest.mark.promise
def test_an_advantage_estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = (
        "from typing import Literal\n"
        "from ratchet.rlhf.algorithms.advantages import AdvantageEstimator\n"
        "from ratchet.rlhf.algorithms.masked import sequence_sum\n\n"
    )
    (tmp_path / "my_advantages.py").write_text(header + example("An advantage estimator"))
    monkeypatch.syspath_prepend(tmp_path)
    import my_advantages  # type: ignore[import-not-found]

    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    advantages, _ = my_advantages.BatchMean()(rewards, torch.ones(2, 2))
    assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    sys.modules.pop("my_advantages")


@pytest.mark.promise
def test_a_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_callbacks.py").write_text(example("A callback"))
    config = tiny.config(tmp_path, run__callbacks=f"{tmp_path}/my_callbacks.py:Alert")
    run = open_run(f"file://{ROOT}/tests/data/stored/run")
    for clipped in (0.75, 0.25):
        Callbacks(config).on_iteration(run, 0, {"response_length/clip_ratio": clipped})
    assert capsys.readouterr().out == "iteration 0: half of the answers are cut off\n"


# A stage and a model, in a copy of Ratchet.


def start_ratchet(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a command of the Ratchet in a folder."""
    return subprocess.Popen(
        [sys.executable, "-c", "from ratchet.flows.commands.app import main; main()", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder / 'src'}:{folder}", "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Copy:
    """A copy of Ratchet to edit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for package in ("flows", "tasks", "infra", "rlhf"):
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "src", folder / "src", symlinks=True)
        (folder / "tests").mkdir()
        for rewards in (ROOT / "tests").glob("rewards*.py"):
            shutil.copy(rewards, folder / "tests")

    def insert(self, path: str, before: str, text: str) -> None:
        old = (self.folder / path).read_text()
        assert before in old
        (self.folder / path).write_text(old.replace(before, text + before, 1))

    def add_stage(self, name: str, code: str, before: str) -> None:
        """Write the stage's file, and the two lines of `pipeline.py`."""
        (self.folder / "tasks" / "stages" / f"{name}.py").write_text(code)
        self.insert(
            "tasks/pipeline.py",
            "from ratchet.tasks.stages.",
            f"from ratchet.tasks.stages.{name} import {name.upper()}\n",
        )
        self.insert("tasks/pipeline.py", f"    {before},\n", f"    {name.upper()},\n")

    def ratchet(self, *arguments: object) -> subprocess.Popen[str]:
        return start_ratchet(self.folder, *arguments)

    def says(self, *arguments: object) -> str:
        process = self.ratchet(*arguments)
        text, _ = process.communicate(timeout=600)
        assert process.returncode == 0, text
        return text

    def train_until(self, config: RunConfig, committed: str) -> None:
        """Train until the log has a commit, then kill the driver."""
        path = self.folder.parent / "config.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        log = Path(config.run.store.removeprefix("file://"), config.run.name, "log")
        driver = self.ratchet("train", path)
        deadline = time.monotonic() + 600
        while not any(committed in record.read_text() for record in log.glob("0*.json")):
            assert driver.poll() is None, driver.communicate()[0]
            assert time.monotonic() < deadline, f"there is no commit {committed}"
            time.sleep(0.02)
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "ratchet")


def test_a_stage(
    copy: Copy, workspace: Path, tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file and one line: it is trained with, killed, resumed, forked at, replayed, and shows its metrics."""
    copy.add_stage("budget", example("A stage"), before="REWARD_MODEL")
    store = ("--store", f"file://{tmp_path}/runs")
    reward = {"function": "tests.rewards_of_responses:held_letters", "timeout_s": 600}
    config = tiny.config(workspace, run__name="mine", run__store=store[1], reward=reward)
    hold = tmp_path / "hold"  # no iteration ends as long as it exists
    hold.touch()
    monkeypatch.setenv("HOLD", str(hold))
    folder = tmp_path / "runs" / "mine"
    copy.train_until(config, '"iteration":0,"stage":"budget"')
    hold.unlink()

    without_stage = start_ratchet(ROOT, "resume", "mine", *store)
    text, _ = without_stage.communicate(timeout=600)
    assert (without_stage.returncode, text.count("\n")) == (2, 1), text
    assert (
        "error: the open iteration has a committed stage budget, which neither run.stages nor this release has" in text
    )
    copy.says("resume", "mine", *store)

    run = open_run(f"file://{folder}")
    assert run.state.iteration == config.train.iterations
    metrics, rows = run.metrics(), run.trajectories()
    assert rows["budget_used"].mean() == pytest.approx(metrics["budget/used"].mean(), rel=1e-6)
    assert (rows["budget_used"] > 0).all()
    assert "timing_s/budget" in metrics
    assert "budget" in copy.says("status", "mine", *store)
    assert "budget: the same" in copy.says("reproduce", "mine", *store, "--iteration", 1)
    copy.says("fork", "mine", *store, "--at", "1:budget", "--run", "child")
    child = open_run(f"file://{tmp_path}/runs/child")
    assert "generate" in child.state.stages
    assert "budget" not in child.state.stages
    copy.says("resume", "child", *store)
    assert len(open_run(f"file://{tmp_path}/runs/child").metrics()["budget/used"]) == config.train.iterations


def test_a_second_critic(copy: Copy, workspace: Path, tmp_path: Path, prefect_server: str) -> None:
    """A row and a stage: it learns as the critic does, is killed, restored by replays, replayed and exported."""
    row, stage = example("A trained model", 0), example("A trained model", 1)
    copy.insert("rlhf/config/roles.py", '    "reference": Role(\n', row)
    copy.add_stage("update_twin", stage, before="UPDATE_ACTOR")
    store = ("--store", f"file://{tmp_path}/runs")
    values = {"run__store": store[1], "reward__function": "tests.rewards:letters", "critic__cliprange_value": None}
    config = tiny.config(workspace, run__name="twins", train__iterations=3, checkpoint__every=100, **values)
    copy.train_until(config, '"iteration":1,"stage":"update_twin"')
    copy.says("resume", "twins", *store)

    run = open_run(f"{store[1]}/twins")
    assert run.state.weights["twin"].version == 3
    # both began as the same model, and learned from the same returns, but in an order of their own
    metrics = run.metrics()
    assert metrics["twin/vf_loss"].between(0.5 * metrics["critic/vf_loss"], 2 * metrics["critic/vf_loss"]).all()
    assert (metrics["twin/grad_norm"] > 0).all()
    assert run.state.weights["twin"].digest != run.state.weights["critic"].digest
    assert "update_twin: the same" in copy.says("reproduce", "twins", *store, "--iteration", 2)
    copy.says("export", "twins", tmp_path / "exported", *store, "--role", "twin")
    assert "This is the second value model of the run" in (tmp_path / "exported" / "README.md").read_text()
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "exported").config.num_labels == 1
