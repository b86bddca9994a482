"""Suites on a simulated GPU, whose memory is not the host's (tests/simulated), each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.simulated.device import library

ROOT = Path(__file__).parents[2]
compiles = pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="the device is compiled by g++, with the headers of Python",
)
ENGINES = "(torch or fsdp) and not megatron and not zero and not deepspeed"


def run(*arguments: str, plugin: str = "tests.simulated.plugin") -> None:
    library()
    options = ["-p", plugin, "-p", "no:cacheprovider", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@compiles
@pytest.mark.slow
def test_what_it_finds_and_how_often_engines_wait() -> None:
    run("tests/contract/on_simgpu.py")


@compiles
@pytest.mark.slow
def test_engines_of_real_sizes() -> None:
    run("tests/contract/on_hollow.py")


@compiles
@pytest.mark.slow
def test_what_every_engine_promises() -> None:
    run("tests/contract/test_train_engines.py", "-k", ENGINES)


@compiles
@pytest.mark.slow
def test_how_often_deepspeed_waits() -> None:
    run("tests/contract/on_simgpu_deepspeed.py", plugin="tests.simulated.deepspeed")


@compiles
@pytest.mark.slow
def test_layouts_of_several_processes() -> None:
    run("tests/contract/test_layouts.py", "-k", "not megatron and not zero and not deepspeed")


OTHERS = (
    *("contract/test_lora.py", "contract/test_preference_engine.py"),
    *("unit/test_generation.py", "unit/test_host_buffers.py", "unit/test_log_probs.py"),
    *("unit/test_prefix_sharing.py", "unit/test_reward_model.py", "unit/test_skeleton.py", "unit/test_state_digest.py"),
    *("unit/test_stored_state.py", "unit/test_token_outputs.py", "unit/test_weight_transfer.py", "unit/test_worker.py"),
)


@compiles
@pytest.mark.slow
def test_generation_adapters_weights_and_state() -> None:
    run(*(f"tests/{suite}" for suite in OTHERS), "-k", "not megatron and not zero and not deepspeed")


@compiles
@pytest.mark.slow
def test_whole_runs_that_are_killed_and_resumed() -> None:
    run("tests/integration/test_train.py", "-k", "not a_replay_that_differs")  # which is an error on a CPU only


@compiles
@pytest.mark.slow
def test_what_runs_on_a_gpu_where_there_is_one() -> None:
    run("tests/gpu")


def test_one_module_names_cuda() -> None:
    """Another accelerator, and the simulated one, would not be seen elsewhere."""
    only = ROOT / "rlhf/distributed/accelerator.py"
    folders = ("flows", "tasks", "rlhf", "infra", "benchmarks", "tests/gpu")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert only in sources
    for path in sources:
        if path != only:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert "torch.cuda" not in line and ".is_cuda" not in line, f"{path}:{number} should ask {only.name}"
