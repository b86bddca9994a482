"""Plans and takes the optimizer steps of an update: a pure function of seed, stage, iteration and config."""

from __future__ import annotations

import time

import numpy as np

from ratchet.infra.workers.calls import C, Context
from ratchet.rlhf.algorithms.objectives import Objective
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.config.sections import STEPS, UpdateConfig
from ratchet.rlhf.seeding import generator
from ratchet.rlhf.train.engine import OptimizerPlan
from ratchet.rlhf.train.learning_rate import learning_rate
from ratchet.rlhf.train.performance import utilization


def optimizer_steps(
    context: Context[C], trainer: UpdateConfig, seed: int, *, temperature: float, skipped: int = 0
) -> OptimizerPlan:
    """Splits the trajectories into shuffled mini-batches.

    Each epoch covers all trajectories with a token in the losses, in a new order. Without any, the plan has no steps.

    Args:
        context: Context of the update, with the column `loss_mask`.
        trainer: The section `actor` or `critic`.
        temperature: Temperature of the log-probs.
        skipped: Number of first iterations in which this role did not learn; its learning-rate schedule does not
            count them.
    """
    rows = np.flatnonzero([sum(mask) > 0 for mask in context.batch.list("loss_mask")])
    trajectories = context.batch.trajectory_index()
    # a quarter of all trajectories, masked ones included: with many of these there are fewer steps, not smaller ones
    size = trainer.mini_batch_trajectories or max(1, len(np.unique(trajectories)) / STEPS)
    _, index = np.unique(trajectories[rows], return_inverse=True)
    branches = np.split(rows[np.argsort(index, kind="stable")], np.cumsum(np.bincount(index))[:-1])
    """The rows of each trajectory, which share an optimizer step."""
    # the remainder is spread, so that sizes differ by at most one trajectory: a small last mini-batch would move
    # the weights as far as a full one
    count = max(1, round(len(branches) / size)) if len(rows) else 0
    mini_batches: list[tuple[int, ...]] = []
    for epoch in range(trainer.ppo_epochs if count else 0):
        draw = generator(seed, context.call.stage, context.iteration, epoch)
        order = draw.permutation(len(branches))
        mini_batches += [
            tuple(int(row) for number in mini_batch for row in branches[number])
            for mini_batch in np.array_split(order, count)
        ]
    return OptimizerPlan(
        lr=learning_rate(trainer.lr, trainer.lr_schedule, max(context.iteration - skipped, 0)),
        optimizer=trainer.optimizer,
        grad_clip=trainer.grad_clip,
        micro_batch_tokens=trainer.micro_batch_tokens,
        mini_batches=tuple(mini_batches),
        temperature=temperature,
    )


def updated(context: Context[C], batch: TrajectoryBatch, objective: Objective, plan: OptimizerPlan) -> dict[str, float]:
    """Takes the optimizer steps of a plan; returns the engine's metrics, the learning rate, and the MFU if it is known.

    Raises `NotFinite` if the norm of a gradient is not finite.
    """
    role, trainer = context.call.role, context.trainer
    started = time.perf_counter()
    metrics = {**trainer.update(batch, objective, plan), f"{role}/lr": plan.lr}  # numbers: the device has computed them
    mfu = utilization(trainer.update_flops(batch, plan), time.perf_counter() - started)
    return metrics if mfu is None else {**metrics, f"perf/mfu/{role}": mfu}
