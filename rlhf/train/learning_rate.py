"""The learning rate as a pure function of the iteration."""

import math

from ratchet.rlhf.config import LRScheduleConfig


def learning_rate(peak: float, schedule: LRScheduleConfig, iteration: int) -> float:
    """Computes the learning rate of an iteration, counted from 0.

    It warms up linearly from ``peak / warmup`` to `peak`, and is then constant, or decays to ``min_ratio * peak``.
    """
    if iteration < schedule.warmup_iterations:
        return peak * (iteration + 1) / schedule.warmup_iterations
    if schedule.type == "constant" or schedule.decay_iterations is None:
        return peak
    done = min((iteration - schedule.warmup_iterations) / schedule.decay_iterations, 1.0)
    remaining = 1.0 - done if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * remaining)
