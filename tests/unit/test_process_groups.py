"""How many process groups a rank creates: as many among 512 ranks as among 8, and none twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from ratchet.rlhf.models.sequence_parallel import Team
from tests import megatron_on_cpu
from tests.ranks import in_another_process, only_rank
from tests.tiers import sampled
from tests.unit.test_big_layouts import sharded


def create_fsdp(**options: Any) -> None:
    for _ in range(2):  # such as an actor and its critic
        sharded("7 B", **options)


def create_teams(size: int) -> None:
    for _ in range(2):
        Team.of(size)


def create_megatron(**layout: int) -> None:
    with megatron_on_cpu.installed():
        from ratchet.rlhf.train.megatron_groups import Layout, MegatronGroups

        for _ in range(2):
            MegatronGroups.of(Layout(**layout))


def sizes_of_groups(rank: int, count: int, create: Callable[..., None], options: dict[str, Any]) -> list[int]:
    """The sizes of the groups that a rank takes part in creating, as a member or because PyTorch asks all ranks to."""
    sizes: list[int] = []
    helper = distributed_c10d._new_process_group_helper

    def counting(size: int, *args: Any, **kwargs: Any) -> Any:
        sizes.append(size)
        return helper(size, *args, **kwargs)

    with only_rank(rank, count), pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_new_process_group_helper", counting)
        create(**options)
    return sizes


@sampled(4)
@pytest.mark.parametrize("count", [8, 64, 512])
@pytest.mark.parametrize(
    ("create", "options", "expected"),
    [
        (create_fsdp, {}, []),
        (create_fsdp, {"shard_size": 4}, ["copies", 4]),
        (create_fsdp, {"tensor_parallel": 4}, ["copies", 4]),
        (create_teams, {"size": 4}, [4]),
    ],
)
def test_a_rank_creates_only_the_groups_that_it_uses(
    create: Callable[..., None], options: dict[str, Any], expected: list[int | str], count: int
) -> None:
    sizes = in_another_process(sizes_of_groups, count - 1, count, create, options)
    assert sizes == [count // 4 if size == "copies" else size for size in expected]


@pytest.mark.parametrize("count", [8, 64, 512])
@pytest.mark.parametrize("layout", [{}, {"tensor": 4}, {"tensor": 2, "context": 2, "pipeline": 2}])
def test_a_rank_of_megatron_creates_a_handful_of_groups_and_one_of_its_own(layout: dict[str, int], count: int) -> None:
    sizes = in_another_process(sizes_of_groups, count - 1, count, create_megatron, layout)
    assert len(sizes) <= 16
    assert sizes.count(1) <= 1
