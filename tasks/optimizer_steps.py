"""The optimizer steps of an update: a pure function of seed, stage, iteration and the trainer's config."""

from __future__ import annotations

from typing import Any

from infra.workers.worker import Context
from rlhf.engines.base import Schedule
from rlhf.engines.learning_rate import learning_rate
from rlhf.seeding import generator

TRAINER_KEYS = (
    "lr",
    "lr_schedule",
    "betas",
    "weight_decay",
    "ppo_epochs",
    "mini_batch_trajectories",
    "grad_clip",
)
"""Keys of a trainer's section that change what an update computes."""


def optimizer_steps(context: Context, trainer: Any, *, temperature: float) -> Schedule:
    """Every epoch goes over all trajectories, in mini-batches, in an order of its own.

    `trainer` is the section `actor` or `critic` of the stage's config.
    """
    rows, size = len(context.batch), trainer.mini_batch_trajectories
    mini_batches = []
    for epoch in range(trainer.ppo_epochs):
        draw = generator(context.config.run.seed, context.call.stage, context.iteration, epoch)
        order = draw.permutation(rows).tolist()
        mini_batches += [tuple(order[start : start + size]) for start in range(0, rows, size)]
    return Schedule(
        lr=learning_rate(trainer.lr, trainer.lr_schedule, context.iteration),
        betas=trainer.betas,
        weight_decay=trainer.weight_decay,
        grad_clip=trainer.grad_clip,
        micro_batch_tokens=trainer.micro_batch_tokens,
        mini_batches=tuple(mini_batches),
        temperature=temperature,
    )
