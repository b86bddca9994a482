"""Ranks that lend their devices to one rollout engine: teams, turns, and what the engine's process sees."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ratchet.rlhf.rollout.build import rollout_engine
from ratchet.rlhf.rollout.rollout_team import RolloutTeam
from ratchet.rlhf.rollout.vllm_engine import VLLMRollout, cannot_pass, error_of_worker
from tests import tiny
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), count=4)
    yield ranks
    ranks.close()


def joined_team() -> tuple[bool, tuple[str, ...], bool, bool, str]:
    """What a rank finds in its team of two; each rank has a GPU of its number."""
    from ratchet.rlhf.distributed import ranks
    from ratchet.rlhf.rollout import rollout_team

    rank = ranks.rank()
    team = rollout_team.formed(2, [f"{rank}"], timeout_s=600)
    everywhere, not_on_last = team.agrees(True), team.agrees(rank != 3)
    return team.leads, team.devices, everywhere, not_on_last, team.of_leader(f"of rank {rank}" if team.leads else None)


def test_adjacent_ranks_form_teams(four_ranks: Ranks) -> None:
    assert four_ranks(joined_team) == [
        (True, ("0", "1"), True, True, "of rank 0"),
        (False, ("0", "1"), True, True, "of rank 0"),
        (True, ("2", "3"), True, False, "of rank 2"),
        (False, ("2", "3"), True, False, "of rank 2"),
    ]


def test_a_team_of_one_needs_no_other_rank() -> None:
    team = RolloutTeam()
    team.meet()
    assert team.leads
    assert (team.agrees(True), team.agrees(False), team.of_leader(3)) == (True, False, 3)


def take_turns(folder: Path) -> None:
    """Generate twice with the actor before, between and after. Writes what moves onto and off the devices, in order.

    The rank for which the other one must wait is late: it moves its model when the other one has moved.
    """
    from ratchet.infra.workers.role_engines import Engines
    from ratchet.rlhf.distributed import ranks
    from ratchet.rlhf.rollout import rollout_team
    from ratchet.rlhf.rollout.rollout_team import LentDevices
    from ratchet.rlhf.train.torch_engine import TorchEngine

    rank, is_there = ranks.rank(), {"actor": False, "vllm": False, "lent": False}
    late = {"actor off 1": "actor off 0", "actor off 3": "actor off 2", "vllm off 0": "lent off 1"}
    late["vllm off 2"] = "lent off 3"

    def moving(name: str) -> Any:
        def place(engine: object, *, model: bool, optimizer: bool) -> None:
            if model != is_there[name]:
                is_there[name] = model
                event = f"{name} {'on' if model else 'off'} {rank}"
                deadline = time.monotonic() + 600
                while event in late and events().count(late[event]) <= events().count(event):
                    assert time.monotonic() < deadline, f"{event} waits for {late[event]}"
                    time.sleep(0.01)
                with (folder / "events").open("a") as file:
                    file.write(f"{event}\n")

        return place

    def events() -> list[str]:
        return (folder / "events").read_text().splitlines()

    TorchEngine.place = moving("actor")  # type: ignore[method-assign]
    VLLMRollout.place = moving("vllm")  # type: ignore[method-assign]
    LentDevices.place = moving("lent")  # type: ignore[method-assign]
    config = tiny.config(
        folder,
        pools={"train": {"workers": 4}},
        rollout__engine={"type": "vllm", "tensor_parallel": 2},
        actor__offload_when_idle=True,
    )
    engines = Engines(config, ["actor", "rollout"])
    engines.team = rollout_team.formed(2, [], timeout_s=600)
    for _ in range(2):
        engines.model("actor", learns=True)
        engines.rollout()
        if engines.team.leads:
            engines.rollout()  # alone, as in `Worker.generate`
    engines.model("actor")
    engines.end_rollout()


def test_no_device_has_two_models_at_a_time(four_ranks: Ranks, tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    (tmp_path / "events").touch()
    four_ranks(take_turns, tmp_path)
    trains, generates = set[int](), set[int]()
    seen = []
    for event in (tmp_path / "events").read_text().splitlines():
        name, _, rank = event.split()
        if name == "lent":
            continue
        has_devices, devices = (trains, {int(rank)}) if name == "actor" else (generates, {int(rank), int(rank) + 1})
        has_devices.symmetric_difference_update(devices)
        assert not trains & generates, event
        seen.append(event)
    assert (trains, generates) == ({0, 1, 2, 3}, set())
    assert [seen.count(f"vllm on {rank}") for rank in (0, 2)] == [2, 2]


def test_a_rank_that_lends_its_devices_reads_no_weights(tmp_path: Path) -> None:
    tiny.workspace(tmp_path)
    stored = iter([("a", torch.ones(2))])
    engine = rollout_engine(tiny.config(tmp_path, rollout__engine="vllm"), None, RolloutTeam(leads=False))
    assert engine.load_weights(stored) == 0
    assert [name for name, _ in stored] == ["a"], "the first rank reads them from the store"


def test_the_process_of_vllm_sees_the_devices_of_its_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)

    def engine(**options: Any) -> VLLMRollout:
        return VLLMRollout(tmp_path, eos_token_ids=(1,), max_model_len=64, **options)

    spans = engine(on_gpu=True, tensor_parallel=2, devices=("6", "7"))
    assert spans.environment()["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert spans.environment()["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in spans.environment()
    assert spans.options["tensor_parallel_size"] == 2
    assert spans.options["distributed_executor_backend"] == "mp"
    alone = engine(on_gpu=True)
    assert not {"CUDA_VISIBLE_DEVICES", "VLLM_WORKER_MULTIPROC_METHOD"} & alone.environment().keys(), "inherited"
    assert "distributed_executor_backend" not in alone.options
    assert engine(tensor_parallel=2).environment()["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    assert engine(tensor_parallel=2).environment()["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


def test_why_a_worker_of_vllm_failed_is_found_in_its_log() -> None:
    """What vLLM 0.32 wrote about a folder without weights; all that it raised was "See stack trace"."""
    log = """
(Worker_TP0 pid=28480) WARNING 11-24 11:58:40 [cpu_worker.py:114] libiomp is not found: ImportError: libiomp
(Worker_TP0 pid=28480) ERROR 11-24 11:58:48 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker_TP0 pid=28480) ERROR 11-24 11:58:48 [multiproc_executor.py:953]     raise RuntimeError(
(Worker_TP0 pid=28480) ERROR 11-24 11:58:48 [multiproc_executor.py:953] RuntimeError: Cannot find any model weights
(MainProcess pid=27772) ERROR 11-24 11:58:53 [core.py:1] Exception: WorkerProc initialization failed
"""
    assert error_of_worker(log) == "RuntimeError: Cannot find any model weights"
    assert error_of_worker(log.replace("RuntimeError:", "torch.OutOfMemoryError:")) is not None
    assert error_of_worker("(MainProcess pid=1) ERROR 11-24 11:58:53 [core.py:1] ValueError: of vLLM itself") is None


@pytest.mark.parametrize(
    ("error", "refuses"),
    [
        ("RuntimeError: Unsupported CPU attention configuration: head_dim=40", True),
        ("ValueError: Model architectures ['Mine'] are not supported for now", True),
        ("pydantic_core.ValueError: bad", True),
        ("NotImplementedError: no such kernel", True),
        ("ModuleNotFoundError: No module named 'flashinfer'", True),
        ("ValueError: Free memory on device (1/8 GiB) on startup is less than desired GPU memory utilization", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("RuntimeError: NCCL error", False),
        ("exit code -9", False),
        ("it did not start within 900 s", False),
    ],
)
def test_what_vllm_would_refuse_again_is_not_tried_again(error: str, refuses: bool) -> None:
    assert cannot_pass(error) is refuses
