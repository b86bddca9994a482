"""Checks that the packages that a config needs are installed, and can be used on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ratchet.infra.execution.preflight.mistakes import refuse
from ratchet.infra.execution.preflight.wandb_login import has_login
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.distributed import accelerator


def check_packages(config: RunConfig) -> None:
    """Raises `UserError` if a package of the config is not installed, lacks a GPU that it needs, or is not logged
    in."""
    engines = {trainer.engine.type: trainer.engine for trainer in config.trainers.values()}
    rollout = config.rollout.engine
    adapts = any(model.lora is not None for models in config.models.values() for model in models.values())
    without_gpu = list(_without_gpu(config))
    mistakes, unusable = [mistake for _, mistake in without_gpu], {package for package, _ in without_gpu}
    for key, asked, package, extra in (
        *((f"engine: {name}", True, engine.package, engine.extra) for name, engine in engines.items()),
        ("pools", bool(config.pools), "ray", "ray"),
        ("model.lora", adapts, "peft", "lora"),
        ("model.kernels: liger", _has_liger(config), "liger_kernel", "liger"),
        (f"rollout.engine: {rollout.type}", True, rollout.package, rollout.extra),
        *((f"tracking: {name}", True, name, "tracking" if name == "tensorboard" else name) for name in config.tracking),
        ("tracking", bool(config.tracking), "accelerate", "tracking"),
    ):
        if key == "tracking" and any(mistake.startswith("tracking: ") for mistake in mistakes):
            continue  # their extras contain accelerate
        if asked and package is not None and package not in unusable and not is_installed(package):
            mistakes.append(f'{key} needs the package {package}: pip install "ratchet-rlhf[{extra}]"')
    if "wandb" in config.tracking and is_installed("wandb") and not has_login():
        mistakes.append(
            "tracking: wandb is not logged in: run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
        )
    refuse(mistakes)


def is_installed(package: str) -> bool:
    """True if a package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _without_gpu(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields packages that are useless in a process without a GPU, with the mistake."""

    for role, trainer in config.trainers.items():
        engine = trainer.engine
        # workers in pools report this themselves
        if engine.needs_gpu and engine.package and not config.pools and not accelerator.is_available():
            fix = f"{role}.engine {engine.type} needs a GPU, and there is none: set {role}.engine to fsdp"
            yield engine.package, fix
    if _has_liger(config) and not _trains_on_gpus(config):
        fix = "model.kernels is liger, which needs GPUs, but the trainers have none: set it to torch or compile"
        yield "liger_kernel", fix


def _has_liger(config: RunConfig) -> bool:
    return any(model.kernels == "liger" for models in config.models.values() for model in models.values())


def _trains_on_gpus(config: RunConfig) -> bool:

    if not config.pools:
        return accelerator.is_available()
    pools = map(config.pool_of, config.trainers)
    return all(pool is not None and config.pools[pool].gpus_per_worker > 0 for pool in pools)
