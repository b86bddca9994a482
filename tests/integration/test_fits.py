"""Fits (supervised, reward models) are runs: stopped, killed, contested and changed like others."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from ratchet.infra.runs.run import open_run
from tests import cards, modes, tiny
from tests.crash.test_two_drivers import wait_until
from tests.hub_server import validated
from tests.processes import Child, Fault, Processes

ROWS = [{"prompt": f"say {number}", "response": "abc"[number % 3] * 5} for number in range(40)]


@pytest.fixture
def sft(workspace: Path, processes: Processes, s3: str) -> Any:
    data = processes.folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def sft(name: str, *more: object, faults: tuple[Fault, ...] = (), store: str = "") -> Child:
        return processes.cli(
            *("sft", "--model", workspace / "model", "--data", data, "--output", processes.folder / name),
            *("--store", store or f"file://{processes.folder}/runs", "--steps", 9, "--batch-examples", 8, "--lr", 0.01),
            *("checkpoint_steps=3", *more),
            faults=faults,
            setup=modes.for_group,
        )

    return sft


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_stopped_killed_and_contested_it_comes_out_the_same(sft: Any, processes: Processes, s3: str) -> None:
    quiet = sft("quiet")
    assert quiet.wait() == 0, quiet.text
    assert "continues without Prefect" not in quiet.text

    slow = sft("slow", faults=(Fault("step", count=5, delay_s=3600.0),))
    wait_until(lambda: "waiting at" in slow.text)
    contested = sft("slow")
    assert contested.wait() == 3, contested.text
    assert "run slow is being driven (pid" in contested.text
    shown = processes.cli("status", "slow", "--store", f"file://{processes.folder}/runs")
    assert shown.wait() == 0, shown.text
    assert "slow: a fit, " in shown.text
    assert "driven by pid" in shown.text
    stopped = processes.cli("stop", "slow", "--store", f"file://{processes.folder}/runs")
    assert stopped.wait() == 0, stopped.text
    assert "slow has stopped; the command that started it continues from the last commit" in stopped.text
    assert slow.wait() == 1, slow.text
    assert "stopped; the same command continues" in slow.text
    again = sft("slow")
    assert again.wait() == 0, again.text
    assert len(again.engine_calls) < 9, "what was committed is not computed again"
    assert same(processes.folder / "slow", processes.folder / "quiet")
    exported = processes.cli("export", "slow", processes.folder / "again", "--store", f"file://{processes.folder}/runs")
    assert exported.wait() == 2
    assert f"slow is a fit, whose model is already in {processes.folder}/slow: " in exported.text
    assert not (processes.folder / "again").exists()

    killed = sft("killed", store=s3, faults=(Fault("put", "checkpoints/actor/000002.*/manifest", "before"),))
    assert killed.wait() == -signal.SIGKILL, killed.text
    again = sft("killed", store=s3)
    assert again.wait() == 0, again.text
    assert len(again.engine_calls) == 6
    assert same(processes.folder / "killed", processes.folder / "quiet")


def test_ctrl_c_ends_it_at_once(sft: Any) -> None:
    child = sft("slow", faults=(Fault("step", count=2, delay_s=600),))
    wait_until(lambda: "waiting at" in child.text)
    child.signal(signal.SIGINT)
    assert child.wait() == 1, child.text
    assert "stopped; the same command continues from the last commit (uncommitted work is abandoned)" in (child.text)


def test_adapters_are_merged_into_the_folder(sft: Any, processes: Processes, workspace: Path) -> None:
    assert sft("adapted", "model.lora.r=2").wait() == 0
    config = json.loads((processes.folder / "adapted" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not same(processes.folder / "adapted", workspace / "model")
    assert weights(processes.folder / "adapted").keys() >= weights(workspace / "model").keys()


def test_a_fit_is_one_thing(sft: Any, processes: Processes, workspace: Path) -> None:
    """Other settings, examples or kinds of run are refused; where things lie may change."""
    assert sft("one").wait() == 0
    other = sft("one", "seed=3")
    assert other.wait() == 2
    assert "seed is not a key" in other.text
    other = sft("one", "lr=0.02", "batch_examples=4")
    assert other.wait() == 2
    assert "run one in" in other.text
    assert "was started with different settings (batch_examples 8 -> 4; lr 0.01 -> 0.02)" in other.text
    moved = processes.folder / "moved.jsonl"
    moved.write_text((processes.folder / "rows.jsonl").read_text())
    assert sft("one", f"data={moved}", "checkpoint_steps=5").wait() == 0
    moved.write_text(json.dumps(ROWS[0]) + "\n")
    other = sft("one", f"data={moved}")
    assert other.wait() == 2
    assert "was started with different settings (the model's files or the examples)" in other.text

    config = tiny.config(workspace, run__name="one", run__store=f"file://{processes.folder}/runs")
    path = processes.folder / "one.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run = processes.cli("train", path)
    assert run.wait() == 2, run.text
    assert "runs/one is a fit (sft, reward-model), and this is a run of iterations" in run.text
    config = config.with_values({"run.name": "run", "train.iterations": 1})
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert processes.cli("train", path).wait() == 0
    fit = sft("run")
    assert fit.wait() == 2, fit.text
    assert "is a run of iterations, and this is a fit" in fit.text


def test_examples_that_are_too_long_are_counted(sft: Any) -> None:
    child = sft("short", "max_tokens=11")
    assert child.wait() == 0, child.text
    assert "30 examples are longer than max_tokens 11: left out" in child.text


def test_the_folder_has_a_model_card(sft: Any, processes: Processes, workspace: Path) -> None:
    child = sft("carded", "--steps", 3)
    assert child.wait() == 0, child.text
    text = (processes.folder / "carded" / "README.md").read_text()
    assert validated(text) == {"errors": [], "warnings": []}
    assert ModelCard(text).data.tags == ["sft", "ratchet"]
    cards.printed(processes.folder / "carded")
    assert modes.others(processes.folder / "carded", modes.FOR_GROUP) == {}
    loss = open_run(f"file://{processes.folder}/runs/carded").metrics()["sft/loss"].iloc[-1]
    for fact in ("# `carded`", "supervised fine-tuning", f"| `sft/loss` | {loss:.4g} |", "AutoModelForCausalLM"):
        assert fact in text
    for private in (processes.folder, workspace):
        assert str(private) not in text
