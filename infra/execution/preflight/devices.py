"""Checks that this machine has the devices that a run asks for, before anything starts on them."""

from __future__ import annotations

from ratchet.infra.execution.preflight.mistakes import refuse
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.distributed import accelerator


def check_devices(config: RunConfig) -> None:
    """Raises `UserError` if this machine lacks the GPUs of a run's pools, or of its vLLM."""
    gpus = accelerator.count()
    refuse(_missing_gpus(config, gpus) if config.pools else _missing_to_vllm(config, gpus))


def _missing_to_vllm(config: RunConfig, gpus: int) -> list[str]:
    devices = config.rollout.engine.devices
    if devices <= max(gpus, 1):
        return []
    has = f"this machine has {gpus} GPU{'' if gpus == 1 else 's'}" if gpus else "this machine has no GPU"
    fix = "remove it" if gpus < 2 else f"lower it to {gpus} or less"
    return [f"rollout.engine.tensor_parallel is {devices}, but {has}: {fix}"]


def _missing_gpus(config: RunConfig, gpus: int) -> list[str]:
    asked = {name: pool.workers * pool.gpus_per_worker for name, pool in config.pools.items()}
    if sum(asked.values()) <= gpus:
        return []
    from ratchet.infra.workers.ray_group import connect_to_running

    # a running Ray has machines of its own, and refuses pools that do not fit when they start
    if connect_to_running():
        return []
    if not gpus:
        without = "pools" if config.placement == "colocated" else "pools and placement"
        return [
            f"pools.{name} asks for {count:g} GPU{'' if count == 1 else 's'}, but this machine has none: remove "
            f"{without}, or set RAY_ADDRESS to a cluster's address"
            for name, count in asked.items()
            if count
        ]
    counts = " + ".join(f"{count:g}" for count in asked.values() if count)
    names = ", ".join(f"pools.{name}" for name, count in asked.items() if count)
    has = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return [
        f"{names} ask for {counts} GPUs, but this machine has {has}: lower workers or gpus_per_worker, or set "
        "RAY_ADDRESS to a cluster's address"
    ]
