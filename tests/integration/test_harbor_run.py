"""Runs whose environment is a task of Harbor in a sandbox, killed at each point of a turn."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.environments import entries
from tests.extras import needs
from tests.harbor_tasks import task
from tests.history import History
from tests.processes import Child, Fault, Processes

SIZE = "mkdir -p /logs/verifier; stat -c %s /app/ledger > /logs/verifier/reward.txt"
KILLS = {"asked": [3], "answered": [9], "rewarded": [2]}
"""Before a command, after one whose output is lost, and after a script whose reward is lost."""


@pytest.fixture
def train(workspace: Path, processes: Processes) -> Any:
    folder = processes.folder / "chores"
    for name in ("count", "more"):
        task(folder / name, test=SIZE, instruction=f"{name}: write letters.")

    def train(name: str, environment: dict[str, Any], *faults: Fault) -> tuple[RunConfig, Child]:
        config = tiny.config(
            workspace,
            run__name=name,
            run__store=f"file://{processes.folder}/runs",
            data__train=str(folder),
            data__prompts_per_iteration=2,
            rollout__environment={"max_turns": 5, **environment},
            rollout__max_response_tokens=64,
            rollout__prompts_per_shard=1,
            reward={"function": None},
            train__iterations=1,
        )
        path = processes.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return config, processes.cli("train", path, faults=faults)

    return train


@needs("bubblewrap")
def test_a_killed_run_repeats_no_command_whose_output_it_has(train: Any, processes: Processes) -> None:
    notes = processes.folder / "notes"
    typed = {"name": "tests.environments:Typed", "options": {"folder": str(notes), "kills": KILLS}}
    deaths = 0
    for _ in range(4):
        config, child = train("killed", typed)
        if (code := child.wait()) == 0:
            break
        assert code == -signal.SIGKILL, child.text
        deaths += 1
    assert code == 0 and deaths == 3, child.text
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    assert (frame["finish_reason"].isin(["turns", "length"])).all() and frame["rollout_error"].isna().all()
    asked = Counter(entry["key"] for entry in entries(notes, "asked"))
    answered = {entry["key"] for entry in entries(notes, "answered")}
    assert asked.keys() == answered
    for row in frame.itertuples():
        commands = sum(f"/{row.trajectory_id}/" in key for key in asked)
        assert row.environment_reward == row.score == commands, "each command has had its effect once"
        said = [turn["content"] for turn in row.turns if turn["role"] == "environment"]
        assert ["".join(filter(str.isdigit, text)) for text in said] == [str(number + 1) for number in range(len(said))]
        assert row.turn_rewards.tolist()[-1] == commands and not any(row.turn_rewards[:-1])
    assert frame["score"].max() > 1
    # a kill loses the answers that nobody had stored: at most one of each trajectory that was being written
    repeated = [key for key, count in asked.items() if count > 1]
    assert 1 <= sum(asked[key] - 1 for key in repeated) <= deaths * len(frame)
    turns = Counter(tuple(key.split("/")[2:5]) for key in asked)
    assert set(turns.values()) == {1}, "no turn was drawn again once the sandbox had read it"
    assert json.loads(frame["extra_info"][0])["digest"]


@needs("bubblewrap")
def test_another_task_is_another_run(train: Any, processes: Processes) -> None:
    harbor = {"name": "harbor", "options": {"commands": "blocks"}}
    _, killed = train("plain", harbor, Fault("put", "trajectories/generate/iteration=000000/.*part-00001", "before"))
    assert killed.wait() == -signal.SIGKILL, killed.text
    instruction = processes.folder / "chores" / "more" / "instruction.md"
    before = instruction.read_text()
    instruction.write_text("other")
    _, refused = train("plain", harbor)
    assert refused.wait() == 2 and "changed" in refused.text, refused.text
    instruction.write_text(before)
    config, child = train("plain", harbor)
    assert child.wait() == 0, child.text
    frame = History.of(config).run.trajectories()
    # a policy of random weights writes no block of Bash, so the script finds no file, and gives no reward
    assert (frame["environment_reward"] == 0).all() and set(frame["data_source"]) == {"chores"}
    assert frame["tool_error"].str.contains("wrote no reward").any()
