"""Which trajectories each optimizer step learns from, and at which learning rate."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.infra.workers.calls import Call, Context
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.role_engines import Engines
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config import parse_config
from ratchet.rlhf.config.sections import ActorConfig
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.tasks.optimizer_steps import optimizer_steps
from ratchet.tasks.stages.update_actor import UpdateActorConfig

UNSET = {"mini_batch_trajectories": ActorConfig().mini_batch_trajectories}


def schedule(masks: list[list[int]], iteration: int = 0, skipped: int = 0, **actor: Any) -> OptimizerPlan:
    """Of an actor that learns from mini-batches of 16 trajectories."""
    tree = {
        "model": {"path": "model"},
        "data": {"train": "prompts", "prompts_per_iteration": 16},
        "actor": {"mini_batch_trajectories": 16} | actor,
    }
    config = parse_config(tree, "here")
    seen = UpdateActorConfig.of(config)
    call = Call(0, "update_actor", iteration, seen)
    batch = TrajectoryBatch.of({"trajectory_id": [f"{row:06d}-00" for row in range(len(masks))], "loss_mask": masks})
    context = Context(call, batch, Engines(config, ()), Resources(config))
    return optimizer_steps(context, seen.trainer, seen.seed, temperature=1.0, skipped=skipped)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (64, [16, 16, 16, 16]),
        (49, [17, 16, 16]),
        (50, [17, 17, 16]),
        (63, [16, 16, 16, 15]),
        (17, [17]),
        (16, [16]),
        (1, [1]),
    ],
)
def test_the_remainder_is_shared_out(rows: int, sizes: list[int]) -> None:
    steps = schedule([[1]] * rows, ppo_epochs=2).mini_batches
    assert [len(step) for step in steps] == sizes * 2
    for epoch in (steps[: len(sizes)], steps[len(sizes) :]):
        assert sorted(row for step in epoch for row in step) == list(range(rows))
    assert rows == 1 or steps[: len(sizes)] != steps[len(sizes) :], "an order of its own"


@pytest.mark.parametrize(
    ("rows", "sizes"), [(8192, [2048] * 4), (254, [64, 64, 63, 63]), (6, [2, 2, 1, 1]), (4, [1] * 4), (2, [1, 1])]
)
def test_by_default_an_iteration_has_four_steps_whatever_its_size(rows: int, sizes: list[int]) -> None:
    assert [len(step) for step in schedule([[1]] * rows, **UNSET).mini_batches] == sizes


def test_a_step_is_not_smaller_because_trajectories_are_left_out() -> None:
    masks = [[0, 1] if row % 2 else [0] for row in range(64)]
    assert [len(step) for step in schedule(masks, **UNSET).mini_batches] == [16, 16]


def test_trajectories_without_a_token_in_the_losses_take_no_part() -> None:
    masks = [[0, 1] if row % 2 else [0] for row in range(64)]
    steps = schedule(masks).mini_batches
    assert [len(step) for step in steps] == [16, 16]
    assert sorted(row for step in steps for row in step) == list(range(1, 64, 2))


def test_without_a_token_in_the_losses_there_is_no_step() -> None:
    assert schedule([[0, 0], []]).mini_batches == ()


def test_iterations_in_which_only_the_critic_learned_do_not_use_up_the_warm_up() -> None:
    options = {"lr": 1.0, "lr_schedule": {"warmup_iterations": 4}}
    rates = [schedule([[1]], iteration, skipped=2, **options).lr for iteration in range(2, 7)]
    assert rates == [0.25, 0.5, 0.75, 1, 1]
