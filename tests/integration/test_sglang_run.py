"""Runs whose responses come from a real SGLang server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.extras import needs
from tests.history import History
from tests.integration.test_vllm_run import gap
from tests.processes import Fault, Processes
from tests.served import end_servers
from tests.sglang_server import serving

pytestmark = needs("sglang")


@pytest.fixture(scope="module", autouse=True)
def _memory_is_freed() -> Iterator[None]:
    yield
    end_servers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.workspace(tmp_path_factory.mktemp("sglang"))
    tiny.model_folder(folder / "model", hidden=64, heads=2, key_value_heads=1)
    return folder


def grpo(
    folder: Path, processes: Processes, name: str, url: str, weights: Path | None = None, **changes: Any
) -> tuple[RunConfig, Path]:
    """A run; its new weights are broadcast unless they have a folder."""
    config = tiny.config(
        folder,
        run__name=name,
        run__store=f"file://{processes.folder}/runs",
        reward__function=None if "rollout__agent" in changes else "tests.rewards:letters",
        algorithm__advantage="grpo",
        algorithm__kl__in_reward=None,
        rollout__engine={"type": "server", "api": "sglang", "urls": [url], "weights_folder": weights and str(weights)},
        actor__lr=1e-2,
        **changes,
    )
    path = processes.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return config, path


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    return serving(folder / "model")


def test_a_run_that_is_killed_continues_with_the_newest_weights(folder: Path, url: str, processes: Processes) -> None:
    config, path = grpo(folder, processes, "killed", url)
    killed = processes.cli("train", path, faults=(Fault("step", count=3),))
    assert killed.wait() == -9, killed.text
    resumed = processes.cli("train", path)
    assert resumed.wait() == 0, resumed.text
    history = History.of(config)
    history.check_sound(killed=True)
    assert sorted(gap(history)) == [0, 1, 2]
    assert max(gap(history).values()) < 1e-4
    short = ["--max-response-tokens", "8"]
    answered = processes.cli(
        "evaluate", folder / "model", "--data", folder / "prompts.parquet", "--server", url, "--api", "sglang", *short
    )
    assert answered.wait() == 0, answered.text


def test_a_server_that_ignores_seeds_is_for_its_own_noise(folder: Path, processes: Processes) -> None:
    """Each of the changes that the error names is made."""
    url = serving(folder / "model", seeded=False)
    _, path = grpo(folder, processes, "ignored", url, train__iterations=1)
    refused = processes.cli("train", path)
    assert refused.wait() == 2, refused.text
    assert f"{url} ignores seeds: start SGLang with --enable-deterministic-inference" in refused.text
    assert "Traceback" not in refused.text
    assert not refused.computed_shards
    changes = {"rollout__seeds": "engine", "rollout__min_p": 0.05, "train__iterations": 1}
    weights = folder / "weights"
    config, path = grpo(folder, processes, "own", url, weights, **changes)
    child = processes.cli("train", path)
    assert child.wait() == 0, child.text
    assert max(gap(History.of(config)).values()) < 1e-4
    assert not list(weights.iterdir()), "nothing is left behind"


def test_a_program_that_was_killed_keeps_its_answers(folder: Path, url: str, processes: Processes) -> None:
    """Through the gateway, by the official client; each turn has the log-probs of the newest weights."""
    diary = processes.folder / "diary.jsonl"
    agent = {"name": "tests.agents:remembers", "options": {"diary": str(diary)}, "on_error": "fail"}
    changes = {"rollout__agent": agent, "rollout__max_response_tokens": 60, "train__iterations": 2}
    config, path = grpo(folder, processes, "agent", url, **changes)
    stored = Fault("put", "journals/iteration=000001/calls/generate", "after", count=3)
    killed = processes.cli("train", path, faults=(stored,))
    assert killed.wait() == -9, killed.text
    resumed = processes.cli("train", path)
    assert resumed.wait() == 0, resumed.text
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    assert sorted(frame["iteration"].unique()) == [0, 1]
    for _, row in frame.iterrows():
        drawn = row["response_mask"] == 1
        np.testing.assert_allclose(row["rollout_log_probs"][drawn], row["old_log_probs"][drawn], rtol=0, atol=1e-4)
    given = {json.loads(line)[1] for line in diary.read_text().splitlines()}
    assert given == {json.loads(call["answer"])["content"] for calls in frame["calls"] for call in calls}
    assert sorted(frame["branch"].unique()) == [0, 1], "the edited history"
