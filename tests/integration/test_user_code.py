"""Runs with a loss, an advantage, a stage and a callback of the user's own."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.flows.callbacks import Callbacks
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.named import load_object
from ratchet.testing import check_stage
from tests import tiny
from tests.processes import Child, Fault, Processes

CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
STAGE = next(block for block in re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL) if "BUDGET = " in block)
ALGORITHMS = """
from ratchet.rlhf.algorithms.advantages import AdvantageEstimator
from ratchet.rlhf.algorithms.masked import sequence_sum
from ratchet.rlhf.algorithms.policy_losses import TokenLoss

class Clamped(TokenLoss):
    limit: float = 0.2

    def token_losses(self, log_probs, old_log_probs, advantages, mask):
        ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
        return -ratio.clamp(max=1 + self.limit) * advantages, {"my_ratio": ratio}

class Centred(AdvantageEstimator):
    def __call__(self, token_rewards, mask):
        scores = sequence_sum(token_rewards, mask)
        advantages = self.finished((scores - scores.mean())[:, None] * mask, mask)
        return advantages, advantages, {"highest": scores.max()}
"""
CALLBACK = """
import json
from ratchet import Callback

class Writes(Callback):
    def on_iteration(self, run, iteration, metrics):
        self.write("iteration", iteration, closed=run.state.iteration, ratio=metrics["actor/my_ratio"])
        if iteration == 1:
            raise RuntimeError("the chat is down")

    def on_validation(self, run, iteration, metrics):
        self.write("validation", iteration, names=sorted(metrics))

    def write(self, event, iteration, **more):
        open(FILE, "a").write(json.dumps({"event": event, "iteration": iteration, **more}) + "\\n")
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "algorithms.py").write_text(ALGORITHMS)
    (folder / "budget.py").write_text(STAGE)
    (folder / "callback.py").write_text(CALLBACK.replace("FILE", repr(str(folder / "called.jsonl"))))
    return folder


def run_config(workspace: Path, processes: Processes, code: Path, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "run__name": "own",
        "run__store": f"file://{processes.folder}/runs",
        "run__stages": f"{code}/budget.py:BUDGET",
        "algorithm__loss": {"type": f"{code}/algorithms.py:Clamped", "options": {"limit": 0.3}},
        "algorithm__advantage": f"{code}/algorithms.py:Centred",
        "train__iterations": 2,
    }
    return tiny.config(workspace, **{**settings, **changes})


def train(processes: Processes, config: RunConfig, *faults: Fault) -> Child:
    path = processes.folder / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return processes.cli("train", path, faults=faults)


@pytest.mark.promise
def test_a_run_with_the_users_loss_advantage_stage_and_callback(
    workspace: Path, processes: Processes, code: Path
) -> None:
    config = run_config(
        *(workspace, processes, code),
        run__callbacks=f"{code}/callback.py:Writes",
        validation={"data": str(workspace / "prompts.parquet"), "before_train": False},
    )
    killed = train(processes, config, Fault("put", "checkpoints/actor/000001", "before"))
    assert killed.wait() == -signal.SIGKILL, killed.text
    resumed = processes.cli("resume", "own", "--store", config.run.store)
    assert resumed.wait() == 0, resumed.text
    line = CALLBACK.splitlines().index('            raise RuntimeError("the chat is down")') + 1
    raised = f"raised RuntimeError: the chat is down ({code}/callback.py:{line}), after iteration 1"
    assert f"{code}/callback.py:Writes {raised}" in " ".join(resumed.text.split())
    called = [json.loads(line) for line in (code / "called.jsonl").read_text().splitlines()]
    assert [(row["event"], row["iteration"]) for row in called] == [
        ("iteration", 0),
        ("iteration", 1),
        ("validation", 2),
    ]
    assert [row["closed"] for row in called[:2]] == [1, 2], "an iteration is committed when its callback is called"
    assert called[0]["ratio"] == pytest.approx(1, abs=0.5)

    run = open_run(f"{config.run.store}/own")
    frame = run.trajectories()
    expected = frame["response_ids"].map(len) / config.rollout.max_response_tokens
    assert frame["budget_used"].tolist() == pytest.approx(expected.tolist())
    means = expected.groupby(frame["iteration"]).mean().tolist()
    assert run.metrics()["budget/used"].tolist() == pytest.approx(means)
    well_formed = frame["reward_parts"].map(lambda parts: parts["well_formed"])
    means = well_formed.groupby(frame["iteration"]).mean().tolist()
    assert run.metrics()["reward/well_formed/mean"].tolist() == pytest.approx(means), "a named part of the reward"
    highest = frame["token_rewards"].map(sum).groupby(frame["iteration"]).max().tolist()
    assert run.metrics()["advantages/highest"].tolist() == pytest.approx(highest)
    page = processes.folder / "report.html"
    assert processes.cli("report", "own", "--store", config.run.store, "-o", page).wait() == 0
    own = ("budget/used", "advantages/highest", "actor/my_ratio", "reward/well_formed/mean")
    assert all(f'"{name}"' in page.read_text() for name in own), "each has a curve"
    first = frame[frame["iteration"] == 0]
    rewards = first["token_rewards"].map(sum)
    estimated = first["advantages"].map(lambda tokens: tokens[0])
    assert estimated.tolist() == pytest.approx((rewards - rewards.mean()).tolist(), abs=1e-5)
    for command in (("status", "own"), ("show", "own"), ("verify", "own"), ("reproduce", "own", "--iteration", 0)):
        child = processes.cli(*command, "--store", config.run.store)
        assert child.wait() == 0, child.text

    stage = load_object(f"{code}/budget.py:BUDGET", "run.stages", ())
    assert check_stage(stage, run)["budget_used"].tolist() == first["budget_used"].tolist()


@pytest.mark.parametrize(
    ("file", "before", "after", "stage", "described"),
    [
        ("algorithms.py", "max=1 +", "max=1.5 +", "advantages", "the code of algorithm.advantage"),
        (
            "budget.py",
            "max_response_tokens\n    columns",
            "max_response_tokens / 2\n    columns",
            "budget",
            "the code of the stage budget in run.stages",
        ),
    ],
)
def test_changed_code_is_noticed_and_a_fork_continues(
    workspace: Path, processes: Processes, code: Path, file: str, before: str, after: str, stage: str, described: str
) -> None:
    config = run_config(workspace, processes, code, train__iterations=1)
    killed = train(processes, config, Fault("put", "checkpoints/actor/000001", "before"))
    assert killed.wait() == -signal.SIGKILL, killed.text
    text = (code / file).read_text()
    assert before in text
    (code / file).write_text(text.replace(before, after))
    refused = train(processes, config)
    assert refused.wait() == 2, refused.text
    told = " ".join(refused.text.split())
    assert f"{stage} of iteration 0 is committed, but what it depends on has changed ({described}" in told
    planned = processes.cli("plan", "own", "--store", config.run.store, "--trust-code")
    assert planned.wait() == 0, planned.text
    assert described in " ".join(planned.text.split())
    remedy = re.search(r"ratchet (fork own --at \S+ --run) NEW", told)
    assert remedy is not None
    forked = processes.cli(*remedy[1].split(), "child", "--store", config.run.store, "--trust-code")
    assert forked.wait() == 0, forked.text
    child = processes.cli("resume", "child", "--store", config.run.store)
    assert child.wait() == 0, child.text
    (code / file).unlink()
    for command in ("status", "show", "verify"):
        shown = processes.cli(command, "child", "--store", config.run.store)
        assert shown.wait() == 0, f"{command} needs no code: {shown.text}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ('name="budget"', 'name="score"'),
            "run.stages .*budget.py:BUDGET is called score, as another stage: rename it",
        ),
        (('"generate": ("response_ids",)', '"generate": ("answers",)'), "reads answers, which generate does not write"),
        (('"generate":', '"judge":'), "reads judge, which is no stage with rows before it"),
        (('Column("budget_used"', 'Column("score"'), "writes score, as score does: rename it"),
        (("BUDGET =", "OTHER ="), "has no BUDGET"),
    ],
)
def test_a_stage_that_does_not_fit(code: Path, change: tuple[str, str], message: str) -> None:
    from ratchet.tasks.pipeline import STAGES
    from ratchet.tasks.user_stages import load_stage

    text = (code / "budget.py").read_text()
    assert change[0] in text
    (code / "budget.py").write_text(text.replace(*change))
    with pytest.raises(UserError, match=message):
        load_stage(f"{code}/budget.py:BUDGET", STAGES)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Mine: ...", "is no subclass of ratchet.Callback: derive it"),
        (
            "class Mine(Callback):\n    def __init__(self, url): ...",
            "cannot be made without arguments: TypeError: .*'url'",
        ),
        ("class Mine(Callback):\n    def on_iteraton(self, *args): ...", "has on_iteraton, which is never called"),
    ],
)
def test_a_callback_that_cannot_be_called(tmp_path: Path, workspace: Path, code: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"from ratchet import Callback\n{code}\n")
    with pytest.raises(UserError, match=f"run.callbacks .*mine.py:Mine {message}"):
        Callbacks(tiny.config(workspace, run__callbacks=f"{tmp_path / 'mine.py'}:Mine"))


def test_a_callback_may_end_the_run(workspace: Path, processes: Processes, code: Path) -> None:
    config = run_config(
        *(workspace, processes, code),
        run__callbacks=f"{code}/callback.py:Writes",
        run__on_callback_error="fail",
        run__stages=[],
        train__iterations=3,
    )
    failed = train(processes, config)
    assert failed.wait() == 2, failed.text
    assert "raised RuntimeError: the chat is down" in " ".join(failed.text.split())
    assert open_run(f"{config.run.store}/own").state.iteration == 2, "what it was called for is committed"


def test_an_exception_in_a_stage_is_one_line(workspace: Path, processes: Processes, code: Path) -> None:
    text = (code / "budget.py").read_text()
    line = "    batch = context.batch\n"
    assert line in text
    (code / "budget.py").write_text(text.replace(line, f"{line}    raise ValueError('no budget')\n"))
    failed = train(processes, run_config(workspace, processes, code, train__iterations=1))
    assert failed.wait() != 0
    at = text[: text.index(line)].count("\n") + 2
    expected = f"error: run.stages {code}/budget.py:BUDGET raised ValueError: no budget ({code}/budget.py:{at})"
    assert expected in failed.text
    assert "Traceback" not in failed.text


def test_what_cannot_be_imported_is_refused_at_once(workspace: Path, processes: Processes, code: Path) -> None:
    config = run_config(workspace, processes, code, run__callbacks="nowhere:X", run__stages="none.py:X")
    refused = train(processes, config)
    assert refused.wait() == 2, refused.text
    for said in (
        "error: run.stages none.py:X: FileNotFoundError",
        "error: run.callbacks nowhere:X: ModuleNotFoundError",
    ):
        assert said in refused.text
    assert not (processes.folder / "runs" / "own").exists()
