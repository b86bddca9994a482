"""Runs on tasks of other packages: a taskset of verifiers, and problems of reasoning-gym."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiny
from tests.extras import needs
from tests.history import History
from tests.processes import Processes

TASKSETS = Path(__file__).parents[1] / "tasksets"


def find_tasksets() -> None:
    sys.path.insert(0, str(TASKSETS))


def history_of(processes: Processes, workspace: Path, data: tuple[object, ...], **changes: Any) -> History:
    """Writes a dataset with a command, trains on it, and returns what the run stored."""
    prompts = processes.folder / "prompts.parquet"
    made = processes.cli("data", data[0], data[1], prompts, *data[2:], setup=find_tasksets)
    assert made.wait() == 0, made.text
    settings: dict[str, Any] = {
        "run__store": f"file://{processes.folder}/runs",
        "data__train": str(prompts),
        "data__max_prompt_tokens": 700,
        "rollout__max_response_tokens": 64,
        "actor__micro_batch_tokens": 4096,
        "critic__micro_batch_tokens": 4096,
        "train__iterations": 2,
    }
    config = tiny.config(workspace, **(settings | changes))
    path = processes.folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    child = processes.cli("train", path, setup=find_tasksets)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    return history


@needs("verifiers")
def test_a_taskset_of_verifiers(processes: Processes, workspace: Path) -> None:
    environment = {"name": "verifiers:words_several", "options": {"turns": 2}}
    template = processes.folder / "template.jinja"
    template.write_text(tiny.CHAT_TEMPLATE)
    model = {"path": str(workspace / "model"), "dtype": "float32", "chat_template": str(template)}
    history = history_of(
        processes,
        workspace,
        ("verifiers", "words_several", "turns=2", "--size", "8"),
        model=model,
        rollout__environment=environment,
        rollout__max_response_tokens=300,
        reward={"function": None},
    )
    frame = history.run.trajectories()
    assert frame["rollout_error"].isna().all()
    assert (frame["turns"].map(len) == 3).any()
    for turns, score, parts in zip(frame["turns"], frame["score"], frame["agent_parts"], strict=True):
        answers = [turn["content"] for turn in turns if turn["role"] == "policy"]
        assert [turn["role"] for turn in turns] == ["policy", "environment", "policy"][: len(turns)], "or at a limit"
        assert score == sum(sum(map(str.isalpha, answer)) for answer in answers)
        assert dict(parts) == {"letters": score}


@needs("reasoning-gym")
def test_problems_of_reasoning_gym(processes: Processes, workspace: Path) -> None:
    import reasoning_gym

    history = history_of(
        processes,
        workspace,
        ("reasoning-gym", "letter_counting", "--size", "16", "--seed", "2"),
        reward={"function": "reasoning_gym"},
    )
    dataset = reasoning_gym.create_dataset("letter_counting", seed=2, size=16)
    frame = history.run.trajectories()
    assert len(frame) == 16
    for response, extra, score in zip(frame["response"], frame["extra_info"], frame["score"], strict=True):
        problem = json.loads(json.loads(extra)["reasoning_gym"])
        assert problem["question"] in {known["question"] for known in dataset}
        assert score == pytest.approx(dataset.score_answer(response.strip(), problem))
