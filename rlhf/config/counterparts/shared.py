"""Conversions that several tables share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ratchet.rlhf.algorithms import PolicyLoss
from ratchet.rlhf.config.counterparts.translation import (
    Assumed,
    Converted,
    Counterpart,
    NoEqual,
    Settings,
    Value,
    computed,
)
from ratchet.rlhf.config.engine_args import VLLM_ROUNDS, VLLM_SPEED
from ratchet.rlhf.config.sections import ENDINGS
from ratchet.rlhf.errors import UserError


def sole_file(names: Sequence[str]) -> Value | Assumed:
    """Returns the first of several files, where we accept only one."""
    return names[0] if len(names) == 1 else Assumed(names[0], f"one file: {', '.join(names[1:])} left out")


LENGTH = ("train.iterations", "train.epochs")
"""`run_length` sets one of these keys."""


def run_length(
    settings: Settings,
    names: Sequence[str],
    epochs: float,
    prompts: int,
    key: str,
    *,
    is_dynamic: bool = False,
    most: int | None = None,
) -> Converted:
    """Computes the length of a run that makes some passes over the data.

    Args:
        is_dynamic: an iteration draws more prompts if it needs them: `train.epochs` is then refused.
        most: maximum number of rows that are used; None: all.

    Returns:
        `train.iterations` if the number of rows is known, otherwise `train.epochs`; if that is refused, no number, so
        that the user must set one.
    """
    rows = settings.rows(names)
    if rows is None and most is None and is_dynamic:
        why = f"the data cannot be read here: set it, to at most {epochs:g} ({key}) x rows / {prompts}"
        return {"train.iterations": Assumed(None, why)}
    if rows is None and most is None:
        return {"train.epochs": epochs}
    remark = "if the data has as many" if rows is None else "dropped prompts are not counted"
    rows = min(count for count in (rows, most) if count is not None)
    why = f"{epochs:g} ({key}) x {rows} rows / {prompts} prompts; {remark}"
    return {"train.iterations": Assumed(max(1, int(rows // prompts * epochs)), why)}


def known_iterations(converted: Converted) -> int | None:
    """Returns the number of iterations, if it follows from the settings or the data."""
    value = converted.get("train.iterations")
    if isinstance(value, Assumed):
        value = value.value
    return value if isinstance(value, int) else None


def loss_option(loss: str, option: str, value: Value) -> Converted:
    """Sets an option of our policy loss; null: not given. Raises NoEqual if the loss lacks it."""
    from ratchet.rlhf.config.reading import models_in

    model = next(model for model in models_in(PolicyLoss) if model.model_fields["type"].default == loss)
    if option not in model.model_fields:
        raise NoEqual(f"the loss {loss} has no {option}")
    return {} if value is None else {f"algorithm.loss.{option}": value}


def run_name(text: str) -> str:
    """Returns a valid name of a run."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name).strip("-._")[:100]
    return name or "run"


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def services(names: Sequence[str]) -> Converted:
    """Returns the trackers among the services that another program logs to."""
    ours = [name for name in names if name in TRACKERS]
    others = [name for name in names if name not in (*TRACKERS, "console", "none", "all")]
    if others:
        return {"tracking": Assumed(ours, f"there is no {', '.join(others)}")}
    return {"tracking": ours}


NO_DUAL_CLIP = 1e6
"""A bound that no ratio reaches: the loss then has no dual clip."""


def data_file(settings: Settings, key: str, split: str, config: str = "") -> Converted:
    """Returns files of prompts or datasets of the hub; others become the file that `ratchet data` could write.

    Args:
        split, config: keys of the split, which is train by default, and of the config of datasets of the hub.
    """
    if not settings.has(key):
        return {}
    names = settings.texts(key)
    if all(name.endswith(ENDINGS) for name in names):
        return {"data.train": names}
    if all(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name, re.ASCII) for name in names):
        part = settings.text(split) if settings.has(split) else "train"
        if settings.has(config):
            part = f"{settings.text(config)}/{part}"
        why = "its prompts are in the column prompt, question or problem (docs/rewards.md)"
        return {"data.train": Assumed([f"{name}:{part}" for name in names], why)}
    local = [f"data/{run_name(name)}/train.parquet" for name in names]
    return {"data.train": Assumed(local, f"write {', '.join(names)} there, in verl's columns (`ratchet data --help`)")}


def vllm_args(prefix: str) -> Counterpart:
    """Builds a row of arguments of vLLM, which have the same names in `rollout.engine.args`."""
    names = tuple(f"{prefix}.{name}" for name in (*sorted(VLLM_SPEED), *VLLM_ROUNDS, "speculative_config"))

    def convert(settings: Settings) -> Converted:
        args: dict[str, Value] = {}
        for key, value in settings.given.items():
            if value is not None and any(key == name or key.startswith(f"{name}.") for name in names):
                section = args
                *parents, last = key.removeprefix(f"{prefix}.").split(".")
                for parent in parents:
                    section = section.setdefault(parent, {})  # type: ignore[assignment]
                section[last] = value
        return {"rollout.engine.args": args} if args else {}

    return computed((*names, *(f"{name}.*" for name in names)), "rollout.engine.args", convert, "the same arguments")


def python_reward(name: str) -> str:
    """Converts `package.module.function` to our notation."""
    module, _, function = name.rpartition(".")
    return f"{module}:{function}" if module else name


def lr_schedule(role: str, shape: str, warmup: int, ratio: float, least: float, total: int | None) -> Converted:
    """Converts the schedule of a role's learning rate; raises UserError if there is none.

    Args:
        shape: the other program's name of the schedule, one of transformers'.
        warmup: iterations of warm-up; 0: by `ratio`.
        ratio: iterations of warm-up as a share of all.
        least: minimum learning rate, as a share of the maximum.
        total: iterations of the run; None if unknown.
    """
    prefix, decay = f"{role}.lr_schedule", next((ours for ours in ("linear", "cosine") if shape.startswith(ours)), None)
    if decay is None and not shape.startswith("constant"):
        raise UserError(f"{prefix} has no {shape}: choose constant, linear or cosine")
    if total is None and (decay is not None or ratio):
        why = f"{shape} depends on the number of iterations, which is unknown: set {prefix}"
        return {f"{prefix}.type": Assumed("constant", why)}
    iterations_of_warmup = warmup or int(ratio * (total or 0))
    schedule: dict[str, Value | Assumed] = {f"{prefix}.warmup_iterations": iterations_of_warmup}
    if decay is not None and total is not None:
        schedule[f"{prefix}.type"] = decay
        schedule[f"{prefix}.decay_iterations"] = max(1, total - iterations_of_warmup)
        schedule[f"{prefix}.min_ratio"] = least
    return schedule
