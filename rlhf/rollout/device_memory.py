"""Estimates whether vLLM fits on a GPU beside the models that stay there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from ratchet.rlhf.config.roles import ROLES
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.model_folders import model_folder, parameter_count

if TYPE_CHECKING:
    from ratchet.rlhf.config import ModelConfig, RunConfig
    from ratchet.rlhf.config.engines import VLLMConfig

GIB = 2**30
ROOM_S = 30.0
"""Seconds that a killed process of another worker or run has to return its memory."""


def resident(config: RunConfig, parameters: Mapping[str, int], ranks: int, *, idle: bool = False) -> dict[str, float]:
    """Estimates what stays on each GPU while the rollout generates, apart from what depends on the batch.

    Args:
        parameters: number of parameters of each model in the same processes, by role.
        ranks: number of those processes.
        idle: count models that leave the GPU when idle, too.

    Returns:
        Bytes by what they hold; empty if all of them give way.
    """
    held: dict[str, float] = {}
    for role, count in parameters.items():
        facts, trainer, model = ROLES[role], config.trainer_of(role), config.model_of(role)
        if trainer.offload_when_idle and not idle:
            continue
        if facts.head == "reward":
            held["weights of the reward model"] = count * width(model)
        elif not facts.computes:
            held[f"weights of the {role} (host memory)"] = 4 * count
        elif not facts.learns:
            if not facts.shares_actor(config):
                share = trainer.engine.frozen_share(ranks)
                held[f"weights of the {role}"] = share * count * width(model)
        else:
            learned = 0 if model.lora is not None else count  # adapters do not count
            moments = 4 * len(trainer.optimizer.state) * learned
            held_weights, state = trainer.engine.held(count, learned, moments, width(model), ranks)
            held |= {f"weights of the {role}": held_weights, f"optimizer state of the {role}": state}
    return {what: size for what, size in held.items() if size}


def gradients(config: RunConfig, parameters: Mapping[str, int], ranks: int) -> dict[str, float]:
    """Estimates the bytes of gradients that each process holds while it trains; adapters', which are small, are left
    out.

    Args:
        parameters: number of parameters of each model in the same processes, by role.
    """
    held: dict[str, float] = {}
    for role, trainer in config.trainers.items():
        if role in parameters and config.model_of(role).lora is None:
            held[f"gradients of the {role}"] = 4 * parameters[role] * trainer.engine.gradient_share(ranks)
    return held


def width(model: ModelConfig) -> int:
    """Returns the bytes of an element in the type of a model's computation."""
    return 2 if model.dtype == "bfloat16" else 4


def check_fits(utilization: float, total: float, held: Mapping[str, float]) -> None:
    """Raises UserError if vLLM cannot have the share of a GPU that it asks for.

    Args:
        utilization: `rollout.engine.gpu_memory_utilization`.
        total: memory of the GPU in bytes.
        held: bytes of it that others hold, by holder.
    """
    left = total - sum(held.values())
    if utilization * total <= left:
        return
    parts = " + ".join(f"{what} {size / GIB:.1f}" for what, size in held.items())
    largest = math.floor(100 * left / total) / 100
    lower = f"lower it to {largest:.2f}, or " if largest > 0 else ""
    raise UserError(
        f"rollout.engine.gpu_memory_utilization {utilization:g} of {total / GIB:.1f} GiB is "
        f"{utilization * total / GIB:.1f} GiB, but {parts} GiB stay on the GPU, which leaves {max(left, 0) / GIB:.1f}: "
        f"{lower}let the models take turns (actor.offload_when_idle, critic.offload_when_idle)"
    )


def await_room(utilization: float) -> None:
    """Waits until vLLM can have the share of this process's GPU that it asks for.

    Raises UserError if it cannot after `ROOM_S` seconds.
    """
    accelerator.empty_cache(accelerator.device())
    for attempt in Retrying(
        retry=retry_if_exception_type(UserError), stop=stop_after_delay(ROOM_S), wait=wait_fixed(0.2), reraise=True
    ):
        with attempt:
            free, total = accelerator.free_and_total()
            own = accelerator.reserved()
            check_fits(utilization, total, {"tensors of this process": own, "other processes": total - free - own})


def parameter_counts(models: Mapping[str, Mapping[str, ModelConfig]]) -> dict[str, int]:
    """Returns the number of parameters of each role, which may have several models by key."""
    return {role: sum(parameter_count(model_folder(model)) for model in own.values()) for role, own in models.items()}


def check_config(config: RunConfig, vllm: VLLMConfig, roles: Iterable[str], total: float) -> None:
    """Raises UserError if vLLM does not fit beside the other models of its processes, before anything is loaded."""
    counts = parameter_counts({role: models for role, models in config.models.items() if role in roles})
    pool = config.pool_of("rollout")
    ranks = 1 if pool is None else config.pools[pool].workers
    check_fits(vllm.gpu_memory_utilization, total, resident(config, counts, ranks))
