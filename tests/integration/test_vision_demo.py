"""The vision demo: a tiny vision-language model, made here, learns with GRPO to read pictures."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.data.images import digest_of
from tests.integration.test_cli import Ratchet, ratchet  # noqa: F401  (a fixture)
from tests.vision import EXAMPLE, make_model, make_pictures

CHANCE = 1 / 6


def answers(run: Run, version: int = -1) -> pd.DataFrame:
    """The held-out answers of one validation, the last one unless another is named."""
    validation = run.validation()
    numbers = sorted(validation["iteration"].unique())
    return validation[validation["iteration"] == numbers[version]]


def test_pictures_are_learned_from(ratchet: Ratchet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Two iterations of the demo, from its data to its held-out answers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    make_pictures(Path("data/vision"), train=8, test=4, sft=8)
    make_model(Path("models/vision-base"))
    fit = ("--model", "models/vision-base", "--data", "data/vision/sft.parquet", "--output", "models/vision-sft")
    code, _, err = ratchet("sft", *fit, "--steps", 2, "--batch-examples", 4, "--lr", 1e-3, "model.freeze_vision=false")
    assert code == 0, err
    changes = ("data.prompts_per_iteration=4", "rollout.n=2", "rollout.prompts_per_shard=2", "validation.every=2")
    sizes = ("actor.mini_batch_trajectories=8", "train.iterations=2")
    code, _, err = ratchet("train", "examples/vision/grpo.yaml", *changes, *sizes)
    assert code == 0, err

    run = open_run("file://./runs/vision")
    frame = run.trajectories()
    assert len(frame) == 16
    assert frame["images"].map(len).eq(1).all()
    stored = {path.name for path in (tmp_path / "runs/vision/images").iterdir()}
    assert set(frame["images"].map(lambda digests: digests[0])) <= stored, "each picture is stored by its content"
    assert {digest_of((tmp_path / "runs/vision/images" / name).read_bytes()) for name in stored} == stored
    placeholder = runpy.run_path(str(EXAMPLE / "model.py"))["build_tokenizer"]().convert_tokens_to_ids("<|image_pad|>")
    assert frame["prompt_ids"].map(lambda ids: list(ids).count(placeholder)).eq(16).all()
    assert len(answers(run)) == 4


def held_out(folder: Path, script: str, name: str, server: str) -> list[float]:
    """Runs a script of the example as its users do; returns the share of right held-out answers of each validation."""
    (folder / "examples").symlink_to(EXAMPLE.parent)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", f"examples/vision/{script}"],
        cwd=folder,
        env=os.environ | {"PATH": path, "PREFECT_API_URL": server},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    validation = open_run(f"file://{folder}/runs/{name}").validation()
    return [float(of["score"].mean()) for _, of in validation.groupby("iteration")]


@pytest.mark.slow
def test_held_out_pictures_are_read(tmp_path: Path, prefect_server: str) -> None:
    """The whole demo."""
    scores = held_out(tmp_path, "run.sh", "vision", prefect_server)
    assert scores[0] < 0.8
    assert scores[-1] > 0.9


@pytest.mark.slow
def test_exchanged_pictures_teach_nothing(tmp_path: Path, prefect_server: str) -> None:
    """The control: what learns from the same answers beside other pictures reads no picture."""
    scores = held_out(tmp_path, "control.sh", "vision-exchanged", prefect_server)
    assert max(scores) < CHANCE + 0.1, "4 standard errors of 256 answers"
