"""Which process of a pool gets which rank, and which errors end a pool."""

from __future__ import annotations

from random import Random

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ratchet.infra.workers.ray_group import in_order, room_for
from ratchet.rlhf.distributed.device_errors import is_lost, out_of_memory
from tests.padded import properties


@properties
@given(ranks=st.sampled_from([8, 64]), team=st.sampled_from([1, 2, 4, 8]), random=st.randoms())
def test_teams_of_adjacent_ranks_share_a_machine(ranks: int, team: int, random: Random) -> None:
    """Ray places whole teams on machines of 16 GPUs, not all of which are free, and starts processes in any order."""
    machines = [f"machine {number}" for number in range(8)]
    places = random.sample([machine for machine in machines for _ in range(16 // team)], ranks // team)
    free = {machine: random.sample(range(16), 16) for machine in machines}
    locations = [(machine, (str(free[machine].pop()),)) for machine in places for _ in range(team)]
    random.shuffle(locations)
    by_rank = [locations[number] for number in in_order(locations)]
    assert sorted(by_rank) == sorted(locations)
    for first in range(0, ranks, team):
        members = by_rank[first : first + team]
        assert len({machine for machine, _ in members}) == 1
        gpus = [int(gpu) for _, (gpu,) in members]
        assert gpus == sorted(gpus), "10 comes after 9"


def test_gpus_may_be_named_by_uuid() -> None:
    assert in_order([("b", ("GPU-1f",)), ("a", ("GPU-9c",)), ("a", ("GPU-0a",))]) == [2, 1, 0]


def test_processes_without_gpus_keep_their_order() -> None:
    assert in_order([("a", ()), ("a", ()), ("a", ())]) == [0, 1, 2]


def test_a_team_needs_room_on_one_machine() -> None:
    eight, four = {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 4.0}
    team = {"CPU": 4.0, "GPU": 4.0, "accelerator_type:H100": 0.004}
    typed = {"accelerator_type:H100": 1.0}
    assert room_for(team, [eight | typed] * 8) == 16, "64 ranks"
    assert room_for({"GPU": 8.0}, [four, four]) == 0, "eight GPUs, on two machines"
    assert room_for({"GPU": 8.0}, [four, eight]) == 1
    assert room_for(team, [eight, four | typed]) == 1, "another type"
    assert room_for({"CPU": 0.1}, [{"CPU": 0.3}]) == 3, "0.3 / 0.1 is 2.9999999999999996"


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
