"""Conversions that several tables use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlhf.algorithms import PolicyLoss
from rlhf.config.counterparts.base import Assumed, Converted, NoEqual, Settings, Value

DEFAULT_ITERATIONS = 30
"""`train.iterations` where the number cannot be computed."""


def files(settings: Settings, key: str) -> list[str]:
    """Names of data files, with the home folder written out."""
    return [str(Path(name).expanduser()) if name.startswith("~") else name for name in settings.texts(key)]


def sole_file(names: Sequence[str]) -> Value | Assumed:
    """The first of several files, where we take one."""
    return names[0] if len(names) == 1 else Assumed(names[0], f"one file: {', '.join(names[1:])} left out")


def iterations(settings: Settings, names: Sequence[str], epochs: float, prompts: int, key: str) -> Converted:
    """The number of iterations in some passes over the data.

    Args:
        settings: the other program's settings.
        names: the data files.
        epochs: passes over the data.
        prompts: prompts that an iteration takes.
        key: the other program's key for the epochs.

    Returns:
        `train.iterations`.
    """
    rows = settings.rows(names)
    if rows is None:
        why = f"the data cannot be read here: set it to {epochs:g} ({key}) x rows / {prompts}, rounded down"
        return {"train.iterations": Assumed(DEFAULT_ITERATIONS, why)}
    why = f"{epochs:g} ({key}) x {rows} rows / {prompts} prompts; dropped prompts are not counted"
    return {"train.iterations": Assumed(max(1, int(rows // prompts * epochs)), why)}


def known_iterations(converted: Converted) -> int | None:
    """The number of iterations, if it follows from the settings or the data."""
    value = converted["train.iterations"]
    if isinstance(value, Assumed):
        return value.value if isinstance(value.value, int) and value.value != DEFAULT_ITERATIONS else None
    return value if isinstance(value, int) else None


def loss_option(loss: str, option: str, value: Value) -> Converted:
    """An option of our policy loss, if that loss has it."""
    from rlhf.config.reading import models_in

    model = next(model for model in models_in(PolicyLoss) if model.model_fields["type"].default == loss)
    if option not in model.model_fields:
        raise NoEqual(f"the loss {loss} has no {option}")
    return {} if value is None else {f"algorithm.loss.{option}": value}


def run_name(text: str) -> str:
    """A name that a run may have."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name).strip("-._")[:100]
    return name or "run"


def services(names: Sequence[str]) -> Converted:
    """The trackers among the services that another program logs to."""
    ours = [name for name in names if name in ("tensorboard", "wandb")]
    others = [name for name in names if name not in ("tensorboard", "wandb", "console", "none", "all")]
    if others:
        return {"tracking": Assumed(ours, f"there is no {', '.join(others)}")}
    return {"tracking": ours}
