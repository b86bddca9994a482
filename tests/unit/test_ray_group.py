"""Which process of a pool gets which rank, and which errors end a pool."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from infra.workers.ray_group import in_order
from rlhf.engines.device_errors import is_lost, out_of_memory
from tests.padded import properties


@properties
@given(st.permutations([(machine, (gpu,)) for machine in ("b", "a", "c") for gpu in range(8)]))
def test_adjacent_ranks_share_a_machine(locations: list[tuple[str, tuple[int, ...]]]) -> None:
    by_rank = [locations[number] for number in in_order(locations)]
    teams = [by_rank[first : first + 8] for first in range(0, 24, 8)]
    assert all(len({machine for machine, _ in team}) == 1 for team in teams)
    assert all([gpus for _, gpus in team] == [(gpu,) for gpu in range(8)] for team in teams)


def test_processes_without_gpus_keep_their_order() -> None:
    assert in_order([("a", ()), ("a", ()), ("a", ())]) == [0, 1, 2]


def test_errors_of_a_gpu_or_a_connection_are_told_from_mistakes() -> None:
    lost = [
        dist.DistBackendError("NCCL error"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
    ]
    assert all(is_lost(error) and out_of_memory(error) is None for error in lost)
    for mistake in (RuntimeError("shape '[2]' is invalid for input of size 3"), ValueError("gloo"), KeyError("a")):
        assert not is_lost(mistake)
        assert out_of_memory(mistake) is None
    too_large = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. GPU 0 has ...")
    assert not is_lost(too_large)
    assert str(out_of_memory(too_large)).startswith("CUDA out of memory: lower micro_batch_tokens")
