"""Rollouts of OpenRLHF, which its executors write down by `recorded`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet.infra.observe.importing import Imported, import_run
from ratchet.infra.observe.openrlhf import recorded
from ratchet.infra.observe.sources.openrlhf import OpenRLHF
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.errors import UserError


class Tokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return " ".join(map(str, ids))


class Executor:
    """An `AgentExecutorBase` of OpenRLHF 0.11.2, with its signature and the result of its multi-turn executor."""

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        sampling_params.temperature = 0.1  # as an environment may
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "mm_train_inputs": None,
            "reward": None if label == "broken" else float(label),
            "scores": 0.5,
            "observation_tokens": [1, 2, 3, 9, 4],
            "action_ranges": [(2, 3), (4, 5)],
            "rollout_log_probs": [0.0, 0.0, -0.5, 0.0, -0.25],
            "truncated": label == "0",
            "extra_logs": {"format": 1.0, "note": "text"},
        }


def play(executor: Any, *labels: str, temperature: float = 1.0) -> None:
    """Asks for answers as the rollout engine does, several at once."""

    async def together() -> None:
        asked = {"max_length": 64, "hf_tokenizer": Tokenizer(), "llm_engine": None, "images": None}
        calls = [
            executor.execute(
                prompt=f"q{n // 2}", label=label, sampling_params=SimpleNamespace(temperature=temperature), **asked
            )
            for n, label in enumerate(labels)
        ]
        for label, result in zip(labels, await asyncio.gather(*calls), strict=True):
            assert result["label"] == label  # the trainer receives what it did without us

    asyncio.run(together())


def recording(folder: Path) -> Any:
    class AgentExecutor(Executor):
        execute = recorded(Executor.execute, str(folder), per_step=4)  # type: ignore[assignment]

    return AgentExecutor()


def imported(tmp_path: Path) -> Imported:
    return import_run(OpenRLHF(tmp_path / "rollouts"), "open", f"file://{tmp_path}/runs")


def test_steps_and_validations(tmp_path: Path) -> None:
    executor = recording(tmp_path / "rollouts")
    play(executor, "1", "0", "1", "1")
    play(executor, "1", "1", temperature=0.6)
    play(executor, "1", "0", "broken", "1")
    play(executor, "1", "0")  # of a step that has not ended
    run = open_run(imported(tmp_path).url)
    rows = run.trajectories(0).to_dict("records")
    assert run.state.iteration == 2 and [row["score"] for row in rows] == [1, 0, 1, 1]
    assert [row["sample"] for row in rows] == [0, 1, 0, 1]
    assert (rows[0]["prompt"], rows[0]["response"], rows[0]["ground_truth"]) == ("q0", "3 9 4", "1")
    assert list(rows[0]["prompt_ids"]) == [1, 2] and list(rows[0]["response_ids"]) == [3, 9, 4]
    assert list(rows[0]["response_mask"]) == [1, 0, 1] and list(rows[0]["rollout_log_probs"]) == [-0.5, 0, -0.25]
    assert [row["finish_reason"] for row in rows[:2]] == ["stop", "length"]
    assert rows[0]["reward_parts"] == {"score": 0.5, "format": 1.0}
    assert run.trajectories(1)["reward_error"].notna().tolist() == [False, False, True, False]
    assert run.store.validation_metrics(1)["val-core/openrlhf/reward/mean@2"] == 1.0
    again = imported(tmp_path)
    assert (again.steps, again.validations, again.already) == (0, 0, 3)


def test_processes_write_files_of_their_own(tmp_path: Path) -> None:
    for times, name in (([1, 4], "a"), ([2, 3], "b")):
        lines = [json.dumps({"time": t, "per_step": 2, "response": str(t), "score": 0}) for t in times]
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    assert open_run(imported(tmp_path).url).trajectories()["response"].tolist() == ["1", "2", "3", "4"]


def test_without_a_recording_the_error_says_how(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(UserError, match=r"OpenRLHF|record its rollouts with ratchet.infra.observe.openrlhf.recorded"):
        OpenRLHF(tmp_path / "rollouts")
    (tmp_path / "rollouts" / "a.jsonl").write_text('{"query": 1}\n')
    with pytest.raises(UserError, match=r"a.jsonl, line 1: this is no line of"):
        imported(tmp_path)
