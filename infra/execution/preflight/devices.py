"""Checks that this machine has the devices that a run asks for, before anything starts on them."""

from __future__ import annotations

from ratchet.infra.execution.preflight.mistakes import refuse
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.distributed.gpus import GPUs
from ratchet.rlhf.errors import counted


def check_devices(config: RunConfig, named: GPUs | None = None) -> None:
    """Raises `UserError` if this machine, or `named` instead, lacks the GPUs of a run's pools, or of its vLLM."""
    gpus = accelerator.count() if named is None else named.count
    where = "this machine" if named is None else f"--gpu {named}"
    if not config.pools:
        refuse(_missing_to_vllm(config, gpus, where))
    elif named is None:
        refuse(_missing_gpus(config, gpus))
    else:
        asked = sum(pool.workers * pool.gpus_per_worker for pool in config.pools.values())
        refuse([f"pools ask for {asked:g} GPUs, but {where} has {gpus}: name more, or lower workers"] * (asked > gpus))


def _missing_to_vllm(config: RunConfig, gpus: int, where: str) -> list[str]:
    devices = config.rollout.engine.devices
    if devices <= max(gpus, 1):
        return []
    has = f"{where} has {counted(gpus, 'GPU') if gpus else 'no GPU'}"
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
