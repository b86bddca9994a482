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
from peft import AutoPeftModelForCausalLM, AutoPeftModelForTokenClassification
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests import cards, modes, tiny
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
        child = processes.cli("train", path, faults=faults, setup=modes.for_group)
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
    auto = {
        "actor": (AutoModelForCausalLM, AutoPeftModelForCausalLM, {}),
        "critic": (AutoModelForTokenClassification, AutoPeftModelForTokenClassification, {"num_labels": 1}),
    }
    for role, (whole, adapted, labels) in auto.items():
        folder = tmp_path / role
        for name, options in (("merged", []), ("adapter", ["--adapter"])):
            exported = processes.cli(
                "export", "quiet", folder / name, "--role", role, "--store", store, *options, setup=modes.for_group
            )
            assert exported.wait() == 0, exported.text
        settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert (settings["r"], settings["base_model_name_or_path"]) == (4, str(workspace / "model"))
        with torch.no_grad():
            base = whole.from_pretrained(workspace / "model", dtype=torch.float32, **labels)(IDS).logits
            expected = whole.from_pretrained(folder / "merged", dtype=torch.float32)(IDS).logits
            assert (expected - base).abs().max() > 1e-3
            logits = adapted.from_pretrained(folder / "adapter", dtype=torch.float32, **labels)(IDS).logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        shown = {name: ModelCard.load(folder / name / "README.md") for name in ("merged", "adapter")}
        assert {name: card.data.library_name for name, card in shown.items()} == {
            "merged": "transformers",
            "adapter": "peft",
        }
        assert "| LoRA | rank 4, merged into the weights |" in shown["merged"].text
        assert "| LoRA | rank 4, not merged |" in shown["adapter"].text
        assert "a folder of the machine that trained" in shown["adapter"].text
        assert all("lora" in card.data.tags for card in shown.values())
        cards.printed(folder / "adapter")
    published = quiet.run.export(3, tmp_path / "published", adapter=True, is_published=True)
    settings = json.loads((published / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "…/model"
    assert str(workspace) not in (published / "README.md").read_text()
    for given in (quiet.folder, *(tmp_path / role for role in auto)):
        assert modes.others(given, modes.FOR_GROUP) == {}

    answered = processes.cli(
        "evaluate", "quiet", "--store", store, "--data", workspace / "held_out.parquet", "--temperature", "0"
    )
    assert answered.wait() == 0, answered.text

    refused, _ = cli("quiet", model__lora={"r": 8})
    assert refused.wait() == 2
    assert "model.lora" in refused.text.splitlines()[-1], refused.text


def gap(frame: pd.DataFrame) -> float:
    return float(max(abs(a - b).max() for a, b in zip(frame["ref_log_probs"], frame["old_log_probs"], strict=True)))
