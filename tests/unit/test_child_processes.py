"""A child that is ended takes its own children with it, and their memory is free when that is said."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from ratchet.rlhf import child_processes
from ratchet.rlhf.errors import EngineLost
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.rollout.vllm_engine import VLLMProcess, VLLMRollout
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


PTRACE_SEIZE, PTRACE_DETACH, PTRACE_O_TRACEEXIT, WALL = 0x4206, 17, 0x40, 0x40000000


def ptrace(request: int, process: psutil.Process, options: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(request, process.pid, None, ctypes.c_void_p(options)) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace of process {process.pid}")


@contextmanager
def held(process: psutil.Process) -> Iterator[None]:
    """A killed process does not end before the end of this: its tracer, this thread, does not let it."""
    ptrace(PTRACE_SEIZE, process, PTRACE_O_TRACEEXIT)
    try:
        yield
    finally:
        process.kill()
        os.waitpid(process.pid, WALL)
        ptrace(PTRACE_DETACH, process)
        while child_processes.remaining([process]):
            time.sleep(0.01)


def test_what_does_not_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, child = started("worker.wait()")
    with held(child), monkeypatch.context() as patch:
        patch.setattr(child_processes, "END_S", 0.0)
        with pytest.warns(RuntimeWarning, match=rf"killed 0 s ago, and still there: .*process {child.pid}, [\w-]+\)"):
            left = child_processes.end(leader)
        assert child in left
    child_processes.end(leader)
    assert child_processes.remaining(left) == []


def test_a_group_that_is_empty_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among thousands of processes, after each program of a reward."""
    leader = subprocess.Popen(["true"], start_new_session=True)
    leader.wait()
    monkeypatch.setattr(psutil, "pids", lambda: pytest.fail("it lists every process"))
    assert child_processes.end(leader) == []


def workers() -> list[psutil.Process]:
    """Of the stand-in for vLLM."""
    running = (
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE  # of another test, which nobody has waited for
    )
    return [process for process in running if "VLLM::Worker" in process.cmdline()]


def is_killed(engine: VLLMRollout, worker: psutil.Process) -> None:
    psutil.Process(worker.ppid()).kill()
    with pytest.raises(EngineLost, match="vLLM's process died: exit code -9"):
        engine.load_weights([])


@contextmanager
def on_stand_in(folder: Path, **options: Any) -> Iterator[VLLMRollout]:
    """An engine that runs the stand-in for vLLM."""
    tests = Path(__file__).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tests / 'vllm_stand_in'}:{tests.parent}")
        engine = VLLMRollout(folder, eos_token_ids=(1,), max_model_len=64, **options)
        try:
            yield engine
        finally:
            engine.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[VLLMRollout]:
    with on_stand_in(tmp_path) as engine:
        assert engine.load_weights([]) == 0, "which starts it"
        yield engine


@pytest.mark.parametrize("ends", [lambda engine, worker: engine.close(), is_killed], ids=["closed", "killed"])
def test_vllm_has_ended_when_its_memory_is_free(
    ends: Callable[[VLLMRollout, psutil.Process], None], engine: VLLMRollout
) -> None:
    """The next one would ask for more than there is: worker processes end after the one that started them."""
    [worker] = workers()
    ends(engine, worker)
    assert child_processes.remaining([worker]) == []


def test_vllm_that_dies_just_before_a_call_has_ended_after_it(
    engine: VLLMRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    [worker] = workers()
    send = VLLMProcess.send

    def send_to_dead(process: VLLMProcess, *message: Any) -> None:
        psutil.Process(worker.ppid()).kill()
        while process.lost is None:
            time.sleep(0.001)
        send(process, *message)

    with monkeypatch.context() as patch:
        patch.setattr(VLLMProcess, "send", send_to_dead)
        with pytest.raises(EngineLost, match="vLLM's process died: exit code -9"):
            engine.load_weights([])
    assert child_processes.remaining([worker]) == []
    assert engine.load_weights([]) == 0, "it reports the loss once"


@pytest.mark.filterwarnings("ignore:killed 0 s ago:RuntimeWarning")
def test_vllm_is_not_started_beside_one_that_holds_its_memory(
    engine: VLLMRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, as after every loss: there may be nothing for the user to change."""
    [worker] = workers()
    with held(worker), monkeypatch.context() as patch:
        patch.setattr(child_processes, "END_S", 0.0)
        is_killed(engine, worker)
        with pytest.raises(EngineLost, match=rf"was killed, but holds its memory: .*process {worker.pid}, "):
            engine.load_weights([])
    assert engine.load_weights([]) == 0


@pytest.mark.filterwarnings("error:killed 0 s ago:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_warning_that_is_an_error_keeps_nobody_waiting(engine: VLLMRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = SimpleQueue[BaseException]()

    def generate() -> None:
        """The stand-in cannot, and is lost."""
        try:
            engine.generate([Request("it000000-p00000-s00", (1,))], Sampling(1.0, 1.0, max_tokens=2, seed=0))
        except EngineLost as error:
            heard.put(error)

    [worker] = workers()
    with held(worker), monkeypatch.context() as patch:
        patch.setattr(child_processes, "END_S", 0.0)
        threading.Thread(target=generate, daemon=True).start()
        assert "vLLM failed: ModuleNotFoundError" in str(heard.get(timeout=60))
