"""A run that trains adapters, through the command line."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes

IDS = torch.tensor([[5, 9, 30, 31, 7]])


@pytest.fixture
def cli(workspace: Path, processes: Processes) -> Any:
    def train(name: str, *faults: Fault, **changes: Any) -> tuple[Child, History]:
        defaults: dict[str, Any] = {
            "run__name": name,
            "run__store": f"file://{processes.folder}/runs",
            "reward__function": "tests.rewards:letters",
            "model__lora": {"r": 4, "alpha": 8},
            "actor__lr": 1e-2,
            "checkpoint__every": 2,
            "train__iterations": 3,
        }
        config = tiny.config(workspace, **defaults | changes)
        path = processes.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        child = processes.cli("train", path, faults=faults)
        child.wait()
        return child, History.of(config)

    return train


def test_a_run_that_trains_adapters(cli: Any, workspace: Path, processes: Processes, tmp_path: Path) -> None:
    child, quiet = cli("quiet")
    assert child.wait() == 0, child.text
    quiet.check_sound()

    # killed where a replay from the initial adapters is needed: the same bits
    killed, _ = cli("killed", Fault("create", '{"kind":"stage","iteration":1,"stage":"update_critic"'))
    assert killed.wait() == -signal.SIGKILL
    child, resumed = cli("killed")
    assert child.wait() == 0, child.text
    assert resumed.state.weights == quiet.state.weights

    frame = quiet.run.trajectories(columns=["ref_log_probs", "old_log_probs"])
    first, last = (frame[frame["iteration"] == iteration] for iteration in (0, 2))
    assert gap(first) == 0, "adapters start at zero: the actor is its base, which is the reference"
    assert gap(last) > 1e-4

    # a checkpoint holds adapters only; an export is a plain model, or the adapter
    store = f"file://{processes.folder}/runs"
    [weights] = (quiet.folder / "checkpoints" / "actor").glob("000003*/*model*.safetensors")
    assert weights.name == "adapter_model.safetensors"
    for options in ([], ["--adapter"]):
        exported = processes.cli("export", "quiet", tmp_path / f"export{len(options)}", "--store", store, *options)
        assert exported.wait() == 0, exported.text
    base = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export0", dtype=torch.float32)
    with torch.no_grad():
        expected = merged(IDS).logits
        assert (expected - base(IDS).logits).abs().max() > 1e-3
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "export1"))
        torch.testing.assert_close(adapted(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    settings = json.loads((tmp_path / "export1" / "adapter_config.json").read_text())
    assert settings["r"] == 4
    assert settings["base_model_name_or_path"] is None, "a folder of this machine is nothing to others"
    cards = [ModelCard.load(tmp_path / folder / "README.md") for folder in ("export0", "export1")]
    assert [card.data.library_name for card in cards] == ["transformers", "peft"]
    assert ["| LoRA | rank 4, merged into the weights |" in card.text for card in cards] == [True, False]
    assert "PeftModel.from_pretrained(base, path)" in cards[1].text
    assert all("lora" in card.data.tags for card in cards)

    answered = processes.cli(
        "evaluate", "quiet", "--store", store, "--data", workspace / "held_out.parquet", "--temperature", "0"
    )
    assert answered.wait() == 0, answered.text

    refused, _ = cli("quiet", model__lora={"r": 8})
    assert refused.wait() == 2
    assert "model.lora" in refused.text.splitlines()[-1], refused.text


def gap(frame: pd.DataFrame) -> float:
    return float(max(abs(a - b).max() for a, b in zip(frame["ref_log_probs"], frame["old_log_probs"], strict=True)))
