"""Runs on tasks of other packages: a taskset of verifiers, environments of gymnasium, problems of reasoning-gym."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from ratchet.infra.workers.call_log import turns_of
from tests import tiny
from tests.extras import needs
from tests.history import History
from tests.processes import Child, Fault, Processes

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


LAKE = "tests.word_game:Lake-v0"


@needs("gymnasium")
def test_no_step_whose_answer_is_stored_is_made_again(processes: Processes, workspace: Path) -> None:
    """Frozen Lake, whose ice is slippery: after three kills it slides as it would have without them."""
    prompts, steps = processes.folder / "lakes.parquet", processes.folder / "steps.jsonl"
    made = processes.cli("data", "gymnasium", LAKE, prompts, f"folder={steps}", "--size", 8, "--instruction", "Walk.")
    assert made.wait() == 0, made.text

    def train(name: str, *faults: Fault) -> tuple[History, Child]:
        config = tiny.config(
            workspace,
            run__name=name,
            run__store=f"file://{processes.folder}/runs",
            data__train=str(prompts),
            rollout__environment={"name": f"gymnasium:{LAKE}", "options": {"folder": str(steps)}},
            rollout__stop=list("aeiou"),
            rollout__max_response_tokens=80,
            reward={"function": None},
            train__iterations=1,
        )
        path = processes.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        child = processes.cli("train", path, faults=faults)
        code = child.wait()
        assert code == (-signal.SIGKILL if faults else 0), child.text
        return History.of(config), child

    def steps_of(child: Child) -> int:
        lines = map(json.loads, steps.read_text().splitlines())
        return Counter(line["process"] for line in lines)[child.process.pid]

    def answered(name: str) -> dict[str, int]:
        """The number of turns of each trajectory whose answers are stored."""
        files = (processes.folder / "runs" / name / "journals").rglob("calls/generate/*.parquet")
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        return {name: len(row["turn_rewards"]) for name, row in turns_of(rows).items()}

    whole, undisturbed = train("whole")
    whole.check_sound()
    states = [json.loads(state) for states in whole.run.trajectories()["turn_states"].dropna() for state in states]
    assert len(states) > 8 and all("changed" in state for state in states), "not by playing actions again"
    before: dict[str, int] = {}
    lost = []
    calls = "journals/iteration=000000/calls/generate/"
    # as the answers of the second turn are about to be stored, when they are, and before those of a later turn
    for fault in (Fault("put", calls, "before", 4), Fault("put", calls, "after", 2), Fault("put", calls, "before", 2)):
        _, killed = train("killed", fault)
        stored = answered("killed")
        more = {name: count - before.get(name, 0) for name, count in stored.items()}
        lost.append(steps_of(killed) - sum(more.values()))
        assert all(count >= 0 for count in more.values())
        assert 0 <= lost[-1] <= len(stored), "at most a step of each trajectory"
        before = stored
    assert 0 in lost and max(lost) > 0, "kills came on both sides of an answer"
    resumed, last = train("killed")
    resumed.check_sound()
    assert not [*resumed.folder.rglob("calls/**/*.parquet")], "turns are in the committed rows"
    assert resumed.state.weights == whole.state.weights
    columns = ["response_ids", "turns", "turn_rewards", "turn_states", "finish_reason", "score"]
    mine, theirs = (history.run.trajectories(columns=columns) for history in (resumed, whole))
    assert mine.map(str).equals(theirs.map(str)), "the same ice"
    assert steps_of(last) == steps_of(undisturbed) - sum(before.values())


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
