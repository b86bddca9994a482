"""A child that is ended takes its own children with it, and their memory is free when that is said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlhf import child_processes
from rlhf.engines.device_memory import GIB, await_room
from rlhf.engines.vllm_rollout import VLLMRollout
from rlhf.errors import EngineLost, UserError
from tests.vllm_stand_in.vllm import WORKER

LEADER = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE)
print(worker.pid, worker.stdout.readline(), flush=True)
{{}}
"""


def started(then: str) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """A process of a group of its own, and its child, which holds memory."""
    command = [sys.executable, "-c", LEADER.format(then)]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    return leader, psutil.Process(int(leader.stdout.readline().split()[0]))


@pytest.mark.parametrize("then", ["worker.wait()", ""], ids=["runs", "has ended"])
def test_what_a_process_has_started_is_gone_when_it_is_ended(then: str) -> None:
    leader, child = started(then)
    if not then:
        leader.wait()
    assert child_processes.end(leader) == []
    assert child_processes.remaining([child]) == []
    assert leader.returncode == (-9 if then else 0)


def test_what_does_not_end_is_said() -> None:
    """Here because nobody waits: half a gigabyte is not given back at once."""
    leader, child = started("worker.wait()")
    with pytest.warns(RuntimeWarning, match=rf"killed 0 s ago, and still there: .*process {child.pid}, \w+\)"):
        left = child_processes.end(leader, wait_s=0.0)
    assert child in left
    child_processes.end(leader)
    assert child_processes.remaining(left) == []


def workers() -> list[psutil.Process]:
    """Of the stand-in for vLLM."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "VLLM::Worker" in process.cmdline()]


def is_killed(engine: VLLMRollout, worker: psutil.Process) -> None:
    psutil.Process(worker.ppid()).kill()
    with pytest.raises(EngineLost, match="vLLM's process died: exit code -9"):
        engine.load_weights([])


@pytest.mark.parametrize("ends", [lambda engine, worker: engine.close(), is_killed], ids=["closed", "killed"])
def test_vllm_has_ended_when_its_memory_is_free(
    ends: Callable[[VLLMRollout, psutil.Process], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one would ask for more than there is: worker processes end after the one that started them."""
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests / 'vllm_stand_in'}:{tests.parent}")
    engine = VLLMRollout(tmp_path, eos_token_ids=(1,), max_model_len=64)
    try:
        assert engine.load_weights([]) == 0, "which starts it"
        [worker] = workers()
        ends(engine, worker)
        assert child_processes.remaining([worker]) == []
    finally:
        engine.close()


def test_memory_that_another_process_gives_back_is_waited_for() -> None:
    """Such as the vLLM of a worker that was killed."""
    readings = iter([10 * GIB, 30 * GIB, 50 * GIB, 80 * GIB])
    await_room(0.6, lambda: (next(readings), 80 * GIB), every_s=0.0)
    assert next(readings) == 80 * GIB, "as soon as there is enough"
    with pytest.raises(
        UserError, match=r"0\.6 of 80\.0 GiB is 48\.0 GiB, but other models and processes 70\.0 GiB stay"
    ):
        await_room(0.6, lambda: (10 * GIB, 80 * GIB), wait_s=0.0)
