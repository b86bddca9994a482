"""What the simulated GPU finds, and how often engines wait for it; test_simulated_gpu.py runs this elsewhere."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratchet.rlhf import child_processes
from ratchet.rlhf.algorithms import PPOClip
from ratchet.rlhf.algorithms.objectives import ActorObjective, Objective
from ratchet.rlhf.algorithms.policy_losses import PolicyLossBase, SelectingLoss
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.errors import EngineLost, UserError
from ratchet.rlhf.rollout import device_memory
from ratchet.rlhf.train.engine import TrainEngine
from tests.contract.test_train_engines import PLAN, Kind, kind_of
from tests.ranks import Ranks
from tests.simulated import device
from tests.unit.test_child_processes import is_killed, on_stand_in, workers

GPU = torch.device(device.NAME)


def test_it_is_the_accelerator_of_this_process() -> None:
    assert accelerator.device() == torch.device(device.NAME, 0)
    assert accelerator.backend() == f"cpu:gloo,{device.NAME}:simccl"
    assert accelerator.name() == "simulated GPU"


def test_tensors_of_the_host_do_not_mix_with_its_own() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=GPU) + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=GPU).index_select(0, torch.tensor([0]))
    assert (torch.ones(2, device=GPU) + torch.tensor(1.0)).tolist() == [2, 2], "a scalar is an argument of the kernel"


def test_new_memory_is_not_zero() -> None:
    assert torch.empty(4, device=GPU).isnan().all()


def test_a_copy_that_does_not_wait_arrives_later() -> None:
    on_host = torch.empty(3, pin_memory=True)
    on_host.copy_(torch.ones(3, device=GPU), non_blocking=True)
    assert on_host.isnan().all()
    torch.accelerator.synchronize()
    assert on_host.tolist() == [1, 1, 1]


def test_freed_memory_cannot_be_read() -> None:
    tensor = torch.ones(3, device=GPU)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was freed"):
        tensor + 1


def test_it_has_a_size() -> None:
    before = torch.accelerator.memory_allocated()
    tensor = torch.empty(2**20, device=GPU)
    assert torch.accelerator.memory_allocated() - before == 4 * 2**20
    torch.accelerator.empty_cache()
    free, total = accelerator.free_and_total()
    assert total == 80 * device.GIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free + 1, dtype=torch.uint8, device=GPU)
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert accelerator.free_and_total()[0] == free, "PyTorch keeps it for the next tensor"
    torch.accelerator.empty_cache()
    assert accelerator.free_and_total()[0] == free + 4 * 2**20


def test_it_reports_what_the_host_waits_for() -> None:
    tensor = torch.arange(3.0, device=GPU)
    with device.reported() as reports:
        tensor.sum().item()
        tensor.cpu()
        torch.ones(2).to(GPU)
        accelerator.placed(torch.ones(2), GPU)
        tensor.nonzero()
        tensor[tensor > 1] = 0.0
        tensor[tensor > 1] = tensor[:0]
    kinds = [kind for kind, _, _ in reports]
    assert kinds == ["synchronize", "to host", "to device", "to device, later", "synchronize", "synchronize"]


def test_a_backward_pass_has_a_thread_of_its_own() -> None:
    threads: list[int] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            threads.append(threading.get_ident())
            return gradients[0]

    Noted.apply(torch.ones(1, device=GPU, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    assert threads and threads[0] != threading.get_ident()


def rows(count: int) -> TrajectoryBatch:
    """Trajectories of equal lengths, so that the number of micro-batches follows from their number."""
    rng = np.random.default_rng(count)

    def per_token(shift: float = 0.0) -> list[list[float]]:
        values: list[list[float]] = (shift + 0.5 * rng.standard_normal((count, 4))).tolist()
        return values

    return TrajectoryBatch.of(
        {
            "trajectory_id": [f"it000000-p{row:05d}-s00" for row in range(count)],
            "prompt_ids": rng.integers(3, 78, (count, 5)).tolist(),
            "response_ids": rng.integers(3, 78, (count, 4)).tolist(),
            "loss_mask": [[1] * 4] * count,
            "advantages": per_token(),
            "returns": per_token(),
            "values": per_token(),
            "old_log_probs": per_token(-4.5),
            "ref_log_probs": per_token(-4.5),
            "selection_noise": rng.random((count, 4)).tolist(),
        }
    )


def waits(engine: TrainEngine, objective: Objective, micro_batches: int) -> Counter[tuple[str, str]]:
    """How often an update of one mini-batch waits for the GPU, by what for."""
    count = 2 * micro_batches
    plan = replace(PLAN, mini_batches=(tuple(range(count)),), micro_batch_tokens=2 * 8)
    with device.reported() as reports:
        engine.update(rows(count), objective, plan)
    assert sum(kind == "to device, later" for kind, _, _ in reports) > micro_batches, "at least, of one of two ranks"
    return Counter((kind, operation) for kind, operation, _ in reports if not kind.endswith("later"))


PER_MINI_BATCH = {("synchronize", "item"): 1, ("to host", "copy"): 1}
"""The gradient's norm, which decides whether there is a step, and all metrics."""
SELECTING = {("synchronize", "item"): 4}
"""The numbers of the mini-batch's tokens, twice, of its trajectories, and of the tokens that may be selected."""


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("engine", ["torch", "fsdp"])
def test_an_update_does_not_wait_for_its_micro_batches(
    engine: str, head: Any, options: dict[str, Any], policy_folder: Path, critic_folder: Path
) -> None:
    kind = kind_of(engine, head, policy_folder, critic_folder)
    built = kind.build(**options)
    for micro_batches in (2, 7):
        assert waits(built, kind.objective, micro_batches) == PER_MINI_BATCH


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


def waits_of_rank(kind: Kind, options: dict[str, Any]) -> list[Counter[tuple[str, str]]]:
    built = kind.build(**options)
    return [waits(built, kind.objective, micro_batches) for micro_batches in (2, 7)]


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("torch", {}),
        ("fsdp", {}),
        ("fsdp", {"reshard_after_forward": False}),
        ("fsdp", {"tensor_parallel": 2}),
        ("torch", {"sequence_parallel": 2}),
        ("fsdp", {"sequence_parallel": 2}),
    ],
)
def test_ranks_do_not_wait_for_their_micro_batches(
    engine: str, options: dict[str, Any], policy_folder: Path, ranks: Ranks
) -> None:
    kind = kind_of(engine, "policy", policy_folder, policy_folder)
    for few, many in ranks(waits_of_rank, kind, options):
        assert few == many == PER_MINI_BATCH


def losses(of: Any) -> set[Any]:
    below = {loss for kind in of.__subclasses__() for loss in losses(kind)}
    return below or {of}


LOSSES = sorted(losses(PolicyLossBase) | {PPOClip}, key=lambda loss: loss.__name__)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_waits_for_micro_batches(loss: type[PolicyLossBase], policy_folder: Path) -> None:
    expected = Counter(PER_MINI_BATCH)
    if issubclass(loss, SelectingLoss):
        expected += SELECTING
    objective = ActorObjective(loss(), kl_in_loss=0.1, kl_estimator="k3", entropy_coef=0.01, on_policy=False)
    built = Kind("torch", "policy", policy_folder, objective, (), "").build()
    for micro_batches in (2, 7):
        assert waits(built, objective, micro_batches) == expected


@pytest.mark.parametrize("mixture", ["qwen3_moe", "mixtral"])
def test_experts_do_not_wait(mixture: str, mixtures: dict[str, Path]) -> None:
    kind = kind_of("torch", "policy", mixtures[mixture], mixtures[mixture])
    built = kind.build()
    for micro_batches in (2, 7):
        assert waits(built, kind.objective, micro_batches) == PER_MINI_BATCH


@pytest.mark.parametrize("engine", ["torch", "fsdp"])
def test_log_probs_leave_the_device_together(engine: str, policy_folder: Path) -> None:
    built = kind_of(engine, "policy", policy_folder, policy_folder).build()
    for count in (4, 14):
        with device.reported() as reports:
            built.infer(rows(count), ("log_probs", "entropy"), temperature=1.0, micro_batch_tokens=16)
        waited = [kind for kind, _, _ in reports if not kind.endswith("later")]
        assert waited == ["to host", "to host"], "one copy per output"


def test_making_room_frees_the_device(policy_folder: Path) -> None:
    kind = kind_of("torch", "policy", policy_folder, policy_folder)
    before = torch.accelerator.memory_allocated()
    built: Any = kind.build()
    built.update(rows(4), kind.objective, replace(PLAN, mini_batches=((0, 1, 2, 3),)))
    held = torch.accelerator.memory_allocated() - before
    digest = built.digest()
    built.place(model=False, optimizer=False)
    left = torch.accelerator.memory_allocated() - before
    assert left < 0.02 * held, "rotary frequencies and the like"
    assert built.digest() == digest
    built.place(model=True, optimizer=True)
    assert built.digest() == digest


VLLM = {"on_gpu": True, "gpu_memory_utilization": 0.5, "tensor_parallel": 2}
"""Its weights go through host memory, which the simulated GPU can."""


@pytest.fixture
def small_gpu() -> Iterator[None]:
    """A GPU of 1 GiB, whose memory others may hold."""
    device.enable(device.GIB)
    yield
    device.others_hold(0)
    device.enable()


def test_vllm_starts_again_once_the_memory_of_its_dead_workers_is_free(
    small_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may count memory for a while after the process that held it has ended."""
    with on_stand_in(tmp_path, **VLLM) as engine:
        engine.load_weights([])
        [worker] = workers()
        device.others_hold(device.GIB // 2 + device.GIB // 4)
        is_killed(engine, worker)
        assert child_processes.remaining([worker]) == []
        readings: list[int] = []

        def read() -> tuple[int, int]:
            readings.append(len(workers()))
            if len(readings) == 3:
                device.others_hold(0)
            return free_and_total()

        free_and_total = accelerator.free_and_total
        monkeypatch.setattr(accelerator, "free_and_total", read)
        engine.load_weights([])
        assert readings == [0, 0, 0], "it starts when the memory is there, and not before"
        assert len(workers()) == 1


def test_vllm_that_cannot_start_again_says_what_holds_the_memory(
    small_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, as after every loss: what fitted once fits once the memory comes back."""
    monkeypatch.setattr(device_memory, "ROOM_S", 0.0)
    with on_stand_in(tmp_path, **VLLM) as engine:
        engine.load_weights([])
        is_killed(engine, workers()[0])
    with on_stand_in(tmp_path, **VLLM) as engine:  # a worker builds another one
        tensors = torch.empty(device.GIB * 3 // 8, dtype=torch.uint8, device=GPU)
        device.others_hold(device.GIB // 2)
        with pytest.raises(
            EngineLost, match=r"cannot start again: .*tensors of this process 0\.4 \+ other processes 0\.5"
        ):
            engine.load_weights([])
        device.others_hold(0)
        engine.load_weights([])
        del tensors


def test_vllm_that_never_fitted_is_a_mistake_of_the_user(
    small_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "ROOM_S", 0.0)
    device.others_hold(device.GIB * 7 // 8)
    options = {**VLLM, "gpu_memory_utilization": 0.6}
    with on_stand_in(tmp_path, **options) as engine, pytest.raises(UserError, match=r"lower it to 0\.12, or let"):
        engine.load_weights([])


def test_memory_that_pytorch_only_keeps_is_vllms(small_gpu: None, tmp_path: Path) -> None:
    """Such as that of the activations of the last update."""
    with on_stand_in(tmp_path, **VLLM) as engine:
        torch.empty(device.GIB * 3 // 4, dtype=torch.uint8, device=GPU)
        assert accelerator.free_and_total()[0] < device.GIB // 2
        engine.load_weights([])
