"""Runs whose responses come from a real `vllm serve`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.integration.test_vllm_run import gap
from tests.processes import Child, Processes
from tests.vllm_server import serving

pytestmark = pytest.mark.skipif(
    not os.environ.get("RATCHET_VLLM") and find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.workspace(tmp_path_factory.mktemp("served"))
    tiny.model_folder(folder / "model", hidden=64, heads=2, key_value_heads=1)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    return serving(folder / "model")


def config(folder: Path, processes: Processes, name: str, urls: list[str], **changes: Any) -> RunConfig:
    return tiny.config(
        folder,
        run__name=name,
        run__store=f"file://{processes.folder}/runs",
        reward__function="tests.rewards:letters",
        rollout__engine="server",
        rollout__server={"urls": urls, "weights_folder": str(folder / "weights"), **changes},
        actor__lr=1e-2,
    )


def train(processes: Processes, config: RunConfig) -> Child:
    path = processes.folder / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return processes.cli("train", path)


def test_a_server_generates_with_the_newest_weights(folder: Path, url: str, processes: Processes) -> None:
    run = config(folder, processes, "served", [url])
    child = train(processes, run)
    assert child.wait(240) == 0, child.text
    history = History.of(run)
    history.check_sound()
    assert max(gap(history).values()) < 1e-3
    assert not list((folder / "weights").iterdir()), "nothing is left behind"

    data = folder / "prompts.parquet"
    short = ["--max-response-tokens", "8"]
    answered = processes.cli("evaluate", folder / "model", "--data", data, "--server", url, *short)
    assert answered.wait(240) == 0, answered.text


def test_what_a_server_cannot_do_is_said(folder: Path, url: str, processes: Processes) -> None:
    for changes, code, says in (
        ({"weights_folder": None}, 2, "rollout.server.weights_folder is null"),
        ({"api": "sglang"}, 2, "/update_weights_from_disk answered 404"),
    ):
        child = train(processes, config(folder, processes, "cannot", [url], **changes))
        assert child.wait(240) == code, child.text
        assert says in child.text
        assert "Traceback" not in child.text
