"""Metrics reach TensorBoard and Weights & Biases (offline), where people look for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flows.tracking import tracking
from tests import tiny


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with tracking(tiny.config(tmp_path, tracking=["tensorboard"])) as track:
        track(0, {"critic/score/mean": 0.25})
        track(1, {"critic/score/mean": 0.5})
    (events,) = (tmp_path / "tracking" / "tiny").rglob("events.*")
    found = EventAccumulator(str(events))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("critic/score/mean")] == [(0, 0.25), (1, 0.5)]


def test_wandb_offline(tmp_path: Path) -> None:
    """In a process of its own: wandb's service writes the log as the process ends."""
    script = (
        "from pathlib import Path; from flows.tracking import tracking; from tests import tiny\n"
        "with tracking(tiny.config(Path('.'), tracking=['wandb'])) as track: track(0, {'critic/score/mean': 0.25})"
    )
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_X_SERVICE_WAIT": "180",  # its service starts slowly where the machine has other things to do
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    environment.pop("LOCAL_RANK", None)  # of DeepSpeed's tests in this process; Accelerate would look for others
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
    (log,) = (tmp_path / "tracking" / "tiny").rglob("*.wandb")
    assert b"critic/score/mean" in log.read_bytes()
