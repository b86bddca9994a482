"""Deterministic computing: what it sets, and how a replay is judged. That a GPU then repeats its bits: tests/gpu."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ratchet.rlhf.config import parse_config
from ratchet.rlhf.errors import UserError
from ratchet.tasks.restore import explained
from tests.unit.test_config import MINIMAL

NOW = {"version": 1}
DETERMINISTIC = {**NOW, "deterministic": True}


@pytest.mark.slow
def test_a_worker_sets_it_before_cuda_starts() -> None:
    """In a process of its own, since it holds for the whole process."""
    script = """
import os, tempfile, torch
from pathlib import Path
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.worker import Worker
from tests import tiny
folder = Path(tempfile.mkdtemp())
tiny.workspace(folder)
store = RunStore(ObjectStore(f"file://{folder}"))
Worker(tiny.config(folder), store)
assert not torch.are_deterministic_algorithms_enabled()
worker = Worker(tiny.config(folder, run__deterministic=True), store)
assert torch.are_deterministic_algorithms_enabled()
assert torch.backends.cudnn.deterministic
assert not torch.cuda.is_initialized()
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("then", "device", "deterministic", "is_expected", "is_usual"),
    [
        (NOW, "cpu", False, False, False),
        (NOW, "cuda", False, True, True),
        (DETERMINISTIC, "cuda", True, False, False),
        (DETERMINISTIC, "cuda", False, True, True),  # computed with it, replayed without
        (NOW, "cuda", True, True, True),  # the other way round
        ({**NOW, "version": 0}, "cpu", False, False, False),
        ({**NOW, "version": 0}, "cuda", False, True, False),
    ],
)
def test_only_a_replay_that_must_repeat_the_bits_is_held_to_them(
    then: dict[str, object], device: str, deterministic: bool, is_expected: bool, is_usual: bool
) -> None:
    mismatch = explained(1, then, device=device, deterministic=deterministic)
    assert (mismatch.is_expected, mismatch.is_usual) == (is_expected, is_usual)


def test_noise_that_cannot_be_repeated_is_not_deterministic() -> None:
    tree = {**MINIMAL, "run": {"deterministic": True}, "rollout": {"engine": "vllm", "seeds": "engine"}}
    with pytest.raises(UserError, match=r"rollout\.seeds engine draws responses that cannot be repeated"):
        parse_config(tree, "config")
