"""Runs with a judge: what it answered once is not asked again, whoever dies, and whichever run asks."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.judge_server import JudgeServer, judge_server
from tests.processes import Child, Fault, Processes
from tests.rewards import letters


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as judge:
        yield judge


def judged_config(workspace: Path, processes: Processes, server: JudgeServer, **changes: object) -> RunConfig:
    judge = {"url": server.url, "model": "m", "mode": "ranking", "rubric": "Early letters are good."}
    return tiny.config(
        workspace,
        run__name="judged",
        run__store=f"file://{processes.folder}/runs",
        reward={"judge": judge, "concurrency": 1},
        train__iterations=1,
        **changes,
    )


def train(processes: Processes, config: RunConfig, *faults: Fault) -> Child:
    path = processes.folder / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return processes.cli("train", path, faults=faults)


def test_no_answer_is_asked_for_twice(workspace: Path, processes: Processes, server: JudgeServer) -> None:
    """Killed behind the third answer, which begins a shard; then moved, forked, and given another rubric."""
    config = judged_config(workspace, processes, server)
    killed = train(processes, config, Fault("create", "^answers/", count=3))
    assert killed.wait() == -signal.SIGKILL, killed.text
    assert len(server.asked) == 3, "of four prompts"
    answers = processes.folder / "runs" / "judged" / "answers"
    assert len(list(answers.iterdir())) == 3
    assert not History.of(config).shards["score", 0, 1], "what the third answer is for is not committed"

    with judge_server() as moved:  # an address is not what is asked
        store = ("--store", config.run.store)
        resumed = train(processes, config.with_values({"reward.judge.url": moved.url}))
        assert resumed.wait() == 0, resumed.text
        assert len(moved.asked) == 1
        assert set(Counter(server.asked + moved.asked).values()) == {1}
        History.of(config).check_sound(killed=True)
        frame = History.of(config).run.trajectories()
        assert frame["score"].tolist() == pytest.approx([letters("", text, "") for text in frame["response"]], abs=1e-6)

        forked = processes.cli("fork", "judged", "--at", "0:score", "--run", "again", *store)
        assert forked.wait() == 0, forked.text
        again = processes.cli("resume", "again", *store)
        assert again.wait() == 0, again.text
        rescored = processes.cli("rescore", "judged", "--run", "rescored", *store)
        assert rescored.wait() == 0, rescored.text
        assert len(moved.asked) == 1, "a fork finds its parent's answers"
        for run in ("again", "rescored"):
            scores = History.of(config.with_values({"run.name": run})).run.trajectories(columns=["score"])["score"]
            assert scores.tolist() == frame["score"].tolist(), run

        rubric = "reward.judge.rubric=Late letters are good."
        other = processes.cli("fork", "again", "--at", "0:score", "--run", "other", *store, rubric)
        assert other.wait() == 0, other.text
        resumed = processes.cli("resume", "other", *store)
        assert resumed.wait() == 0, resumed.text
        assert len(moved.asked) == 1 + 4, "another question"

    cleaned = processes.cli("vacuum", "judged", *store)
    assert cleaned.wait() == 0, cleaned.text
    assert len(list(answers.iterdir())) == 4
    damaged = min(answers.iterdir())
    damaged.write_text(damaged.read_text()[:-9])
    found = processes.cli("verify", "judged", *store, "--repair")
    assert found.wait() == 0, found.text
    assert f"answers/{damaged.name} is damaged" in " ".join(found.text.split())
    assert not damaged.exists()
    whole = processes.cli("verify", "judged", *store)
    assert whole.wait() == 0, whole.text
    assert "answers/" not in whole.text


def test_another_rubric_is_another_reward(workspace: Path, processes: Processes, server: JudgeServer) -> None:
    """In the middle of an iteration, it is refused, and the message says how to go on."""
    config = judged_config(workspace, processes, server)
    died = train(processes, config, Fault("create", '{"kind":"stage","iteration":0,"stage":"score"'))
    assert died.wait() == -signal.SIGKILL, died.text
    asked = len(server.asked)
    refused = train(processes, config.with_values({"reward.judge.rubric": "Late letters are good."}))
    assert refused.wait() == 2, refused.text
    text = " ".join(refused.text.split())
    assert "score of iteration 0 is committed, but what it depends on has changed" in text
    assert "reward.judge.rubric: Early letters are good. -> Late letters are good." in text
    assert "`ratchet fork judged --at 0:score --run NEW`" in text
    assert len(server.asked) == asked


def test_validation_is_judged_prompt_by_prompt(workspace: Path, processes: Processes, server: JudgeServer) -> None:
    """A judge that is down when a run starts is said before anything else."""
    config = judged_config(
        workspace, processes, server, validation={"data": str(workspace / "held_out.parquet"), "n": 3}
    )
    server.faults.extend([503] * 8)
    refused = train(processes, config)
    assert refused.wait() == 2, refused.text
    assert "reward.function judge cannot score an answer to this prompt" in refused.text
    assert "answered 503 Service Unavailable" in refused.text
    assert "starting Prefect" not in refused.text
    server.faults.clear()
    child = train(processes, config)
    assert child.wait() == 0, child.text
    held_out = History.of(config).run.validation()
    expected = [letters("", text, "") for text in held_out["response"]]
    assert held_out["score"].tolist() == pytest.approx(expected, abs=1e-6)
    assert {len(question.answers) for question in server.answered if not question.is_trial} == {2, 3}
