"""Runs whose trajectories are calls of an agent."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ratchet.infra.runs.comparison import compare
from ratchet.rlhf.config import RunConfig, load_config
from ratchet.rlhf.schema import trajectory_of
from ratchet.tasks.analysis.bisect import bisect
from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes
from tests.rewards import letters

EXAMPLES = Path(__file__).parents[2] / "examples"
MARK = -7.5
"""A log-prob that no model gives to these tokens."""


@pytest.fixture
def start(workspace: Path, processes: Processes) -> Any:
    def start(name: str, *faults: Fault, **changes: Any) -> tuple[RunConfig, Child]:
        diary = processes.folder / f"{name}.jsonl"
        settings: dict[str, Any] = {
            "rollout__agent": {"name": "tests.agents:remembers", "options": {"diary": str(diary)}, "on_error": "fail"},
            "rollout__max_response_tokens": 60,
            "reward": {"function": None},
            "algorithm": {"advantage": {"type": "grpo"}},
            "train__iterations": 2,
            "actor__lr": 1e-2,
        }
        store = f"file://{processes.folder}/runs"
        config = tiny.config(workspace, run__name=name, run__store=store, **(settings | changes))
        path = processes.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return config, processes.cli("train", path, faults=faults)

    return start


def other_program(config: RunConfig) -> dict[str, Any]:
    """Another diary, and answers that are worth something else."""
    assert config.rollout.agent is not None
    options = {"diary": f"{config.rollout.agent.options['diary']}-again"}
    return {"name": "tests.agents:remembers", "options": options, "on_error": "fail"}


def diary_of(config: RunConfig) -> list[tuple[Any, str, str]]:
    """What the programs asked, and what they were answered, in the order of the answers; and the programs' keys."""
    assert config.rollout.agent is not None
    return [json.loads(line) for line in Path(config.rollout.agent.options["diary"]).read_text().splitlines()]


def answers_of(history: History) -> Counter[str]:
    """The answers that the rows have, over all trajectories."""
    frame = history.run.trajectories()
    return Counter(json.loads(call["answer"])["content"] for calls in frame["calls"] for call in calls)


def marked(file: Path) -> int:
    """Write the log-prob `MARK` to all tokens of a file of answers, so that answers of the file can be told from equal
    ones that are drawn again; returns the number of answers."""
    answers = pq.read_table(file)
    values = [[MARK] * len(ids) for ids in answers["ids"].to_pylist()]
    place = answers.schema.get_field_index("log_probs")
    pq.write_table(answers.set_column(place, "log_probs", pa.array(values, answers.schema.field(place).type)), file)
    return int(answers.num_rows)


def test_branches_are_rows_of_one_trajectory(start: Any, workspace: Path, processes: Processes) -> None:
    held_out = {"data": str(workspace / "held_out.parquet"), "before_train": False}
    config, child = start("whole", validation=held_out)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    assert len(frame) == 2 * 2 * 8 and sorted(frame["branch"].unique()) == [0, 1]
    assert frame["trajectory_id"].is_unique
    for _, rows in frame.groupby(["iteration", "prompt_id", "sample"]):
        main, edited = (row for _, row in rows.sort_values("branch").iterrows())
        assert edited["trajectory_id"] == f"{main['trajectory_id']}-b01"
        assert (len(main["calls"]), len(edited["calls"])) == (2, 1)
        assert main["score"] == edited["score"] == main["environment_reward"]
        trained = [row["advantages"][row["loss_mask"] == 1] for row in (main, edited)]
        assert len({*np.concatenate(trained).tolist()}) <= 1, "one advantage"
        for row in (main, edited):
            assert row["response_mask"].sum() == sum(call["end"] - call["start"] for call in row["calls"])
    learned = frame.groupby(["iteration", "prompt_id"])["score"].nunique() > 1
    assert learned.any(), "some groups teach something"
    for place, group in frame.groupby(["iteration", "prompt_id"]):
        differs = learned[place]
        scores = group[group["branch"] == 0]["score"]
        wanted = (group["score"] - scores.mean()) / (scores.std() + 1e-6) if differs else 0 * group["score"]
        got = [row["advantages"][row["response_mask"] == 1][0] for _, row in group.iterrows()]
        np.testing.assert_allclose(got, wanted, atol=1e-5)  # stored in float32
    metrics = history.run.metrics()
    assert metrics["num_branches/mean"].tolist() == [2.0, 2.0]
    by_trajectory = frame[frame["branch"] == 0].groupby("iteration")["score"].mean().tolist()
    assert metrics["critic/score/mean"].tolist() == pytest.approx(by_trajectory)
    assert metrics["reward/mean"].tolist() == pytest.approx(by_trajectory)
    assert len(history.run.validation()) == 3, "a row per answer"
    assert not list(Path(history.folder).glob("journals/*/calls/*/*")), "the rows have the answers"
    rescored, hack = bisect(history.run, "tests.rewards:letters")
    assert hack is None or hack.iteration == 1
    last = frame.groupby(["iteration", "prompt_id", "sample"]).tail(1)
    for entry in rescored:
        own = last[last["iteration"] == entry.iteration]
        assert entry.reward == pytest.approx(own["score"].mean()), "a trajectory counts once"
        strict = [letters("", text, "") for text in own["response"]]
        assert entry.strict == pytest.approx(np.mean(strict)), "without the reward that the program returned"
    other, again = start("again", validation=held_out, rollout__agent=other_program(config), actor__lr=0.05)
    assert again.wait() == 0, again.text
    comparison = compare(history.run, History.of(other).run)
    assert comparison.unpaired == {"validation": 0, "train": 0}, "however the last conversations begin"
    shown = processes.cli("show", "whole", "--store", config.run.store)
    assert shown.wait() == 0, shown.text
    assert "user: more" in shown.text and "policy: " in shown.text
    assert processes.cli("reproduce", "whole", "--store", config.run.store, "--iteration", 1).wait() in (0, 1)
    assert not list(Path(history.folder).glob("journals/*/calls/*/*")), "a replay writes nothing"


def test_a_run_learns_from_calls_in_every_dialect(start: Any, workspace: Path) -> None:
    """Each trained token is one that the policy drew: the rows' log-probs are those of the model that drew them."""
    agent = {"name": "tests.agents:speaks", "on_error": "fail"}
    config, child = start("speaks", rollout__agent=agent, train__iterations=1)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    assert len(frame) == 8 * 4 and frame["rollout_error"].isna().all()
    assert sorted(frame["branch"].unique()) == [0, 1, 2, 3]
    for _, row in frame.iterrows():
        assert len(row["calls"]) == 2, "the second call continues the first"
        drawn = np.zeros(len(row["response_ids"]), dtype=int)
        for call in row["calls"]:
            drawn[call["start"] : call["end"]] = 1
        np.testing.assert_array_equal(row["response_mask"], drawn)
        assert (row["loss_mask"] <= drawn).all(), "no other token is learned from"
        assert (row["rollout_log_probs"][drawn == 1] < 0).all()
        # in float32, batched otherwise
        np.testing.assert_allclose(row["old_log_probs"][drawn == 1], row["rollout_log_probs"][drawn == 1], atol=1e-3)


def test_an_answer_that_a_program_got_is_never_asked_for_again(start: Any) -> None:
    config, killed = start("killed", Fault("put", "journals/iteration=000001/calls/generate", "after", count=3))
    assert killed.wait() == -signal.SIGKILL, killed.text
    first = diary_of(config)
    files = list(Path(History.of(config).folder).glob("journals/iteration=000001/calls/generate/*.parquet"))
    assert len(files) >= 3, "the answers are stored before the programs get them"
    recorded = sum(marked(file) for file in files)
    _, again = start("killed", Fault("put", "journals/iteration=000001/calls/generate", "after", count=4))
    assert again.wait() == -signal.SIGKILL, again.text
    _, resumed = start("killed")
    assert resumed.wait() == 0, resumed.text
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    given_again = [
        (row["rollout_log_probs"][call["start"] : call["end"]] == MARK).all()
        for _, row in frame.iterrows()
        for call in row["calls"]
    ]
    assert sum(given_again) == recorded, "every stored answer is in the rows, as it was stored"
    whole = diary_of(config)
    asked = {json.dumps(messages): set[str]() for messages, _, _ in whole}
    stored = answers_of(history)
    for _, answer, _ in first:
        assert stored[answer], f"{answer!r} was given to a program, and no row has it"
    assert sum(stored.values()) == 2 * 8 * 3
    for messages, answer, _ in whole:
        asked[json.dumps(messages)].add(answer)
    keys = Counter(key for _, _, key in whole)
    assert {key.rpartition("/")[2] for key in keys} == set(map(trajectory_of, frame["trajectory_id"]))
    assert len(keys) == 2 * 8 and max(keys.values()) > 3, "a program that ran again had its key again"
    # the two trajectories of a prompt ask the same at first, in each of two iterations
    assert all(len(answers) <= 4 for answers in asked.values())
    assert set(stored) == {answer for _, answer, _ in whole}, "no program got an answer that is not in the rows"


def test_programs_that_fail_and_budgets_that_end_are_told(start: Any, processes: Processes) -> None:
    agent = {"name": "tests.agents:stumbles", "on_error": "drop"}
    config, child = start("stumbles", rollout__agent=agent, rollout__max_response_tokens=8, train__iterations=1)
    assert child.wait() == 0, child.text
    told = (
        "iteration 0: the agent failed for 2 trajectories; the first: rollout.agent raised ValueError: it stumbled at "
    )
    [line] = [line for line in child.text.splitlines() if line.startswith(told)]
    place = re.fullmatch(r"agents.py:(\d+) in stumbles \((it000000-p0000\d-s0\d)\)", line.removeprefix(told))
    assert place is not None, line
    assert "raise ValueError" in (Path(__file__).parents[1] / "agents.py").read_text().splitlines()[int(place[1]) - 1]
    assert "  rollout/errors 2  " in child.text, "in the line of the iteration"
    assert "iteration 0: 75% of the conversations ended in their first turn, which took all of " in child.text
    assert "rollout.max_response_tokens 8, the budget of a whole conversation: raise it" in child.text
    shown = processes.cli("status", "stumbles", "--store", config.run.store)
    assert shown.wait() == 0, shown.text
    assert line in shown.text


def test_too_many_failed_programs_stop_the_run(start: Any) -> None:
    agent = {"name": "tests.agents:broken", "on_error": "drop"}
    _, child = start("broken", rollout__agent=agent)
    assert child.wait() == 1, child.text
    assert "the agent failed for 4 of the 4 trajectories of shard" in child.text
    assert "temperature 0.3 is not the run's" in child.text


@pytest.mark.parametrize(
    ("recipe", "script"),
    [("agent_guess/guess", "guess/guess"), ("agent_calculator/calculator", "agent_calculator/agent")],
)
def test_examples(recipe: str, script: str, workspace: Path, processes: Processes) -> None:
    """The shipped recipes on a tiny model: programs, prompts and templates are those of the examples."""
    data = processes.folder / "data"
    subprocess.run([sys.executable, EXAMPLES / f"{script}.py", data], check=True)
    config = load_config(EXAMPLES / f"{recipe}.yaml").with_values(
        {
            "run.store": f"file://{processes.folder}/runs",
            "model.path": str(workspace / "model"),
            "data.train": [str(data / "train.parquet")],
            "data.prompts_per_iteration": 4,
            "data.max_prompt_tokens": 200,
            "rollout.prompts_per_shard": 2,
            "rollout.n": 2,
            "actor.mini_batch_trajectories": 4,
            "validation": None,
            "train.iterations": 1,
        }
    )
    path = processes.folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    child = processes.cli("train", path)
    assert child.wait() == 0, child.text
    frame = History.of(config).run.trajectories()
    assert len(frame) == 8 and frame["rollout_error"].isna().all()
    assert set(frame["environment_reward"]) <= {0.0, 1.0}
    offered = [json.loads(calls[0]["asked"]).get("tools", []) for calls in frame["calls"]]
    assert [len(tools) for tools in offered] == [int("calculator" in recipe)] * 8
