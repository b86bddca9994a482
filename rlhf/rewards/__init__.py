"""Rewards: `compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict`.

A built-in is a module here; anything else is named ``package.module:function``. A dict has `score` and named parts, of
which those that are finite numbers are kept.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import numpy as np

from rlhf.errors import NotFinite, RatchetError, UserError

RewardFunction = Callable[..., float | dict[str, float]]


LARGEST = float(np.finfo(np.float32).max)
"""Parts are stored in single precision: what does not fit, or is no number, is left out."""


class RewardFailed(RatchetError):
    """The reward function raised an exception."""


@dataclass(frozen=True)
class Score:
    score: float
    parts: dict[str, float]


def load_reward(name: str) -> RewardFunction:
    """The function of a built-in reward, or of ``package.module:function``; raises `UserError` if there is none."""
    module_name, colon, function = name.partition(":")
    if not colon:
        module_name, function = f"rlhf.rewards.{name}", "compute_score"
    try:
        found = getattr(importlib.import_module(module_name), function)
    except Exception as error:  # whatever a user's module raises as it is imported
        raise UserError(
            f"reward.function {name}: {type(error).__name__}: {error}; name a built-in (countdown, constant) or "
            "package.module:function"
        ) from None
    if not callable(found):
        raise UserError(f"reward.function {name} is not a function")
    return found  # type: ignore[no-any-return]


def reward_digest(name: str) -> str:
    """sha256 of the source of the module that holds the reward: changed code is another reward."""
    module = inspect.getmodule(load_reward(name))
    try:
        source = inspect.getsource(module)  # type: ignore[arg-type]
    except (OSError, TypeError):
        raise UserError(f"reward.function {name} has no Python source to take a digest of: wrap it") from None
    return hashlib.sha256(source.encode()).hexdigest()


def score(function: RewardFunction, data_source: str, solution_str: str, ground_truth: str, extra_info: str) -> Score:
    """Score one response; `ground_truth` and `extra_info` are JSON text where the dataset held structures."""
    try:
        result = function(data_source, solution_str, ground_truth, json.loads(extra_info))
    except Exception as error:
        raise RewardFailed(
            f"the reward raised {type(error).__name__}: {error} (data_source {data_source}, response "
            f"{solution_str[:60]!r}): nothing of the shard is committed; mend the reward and resume"
        ) from error
    parts = dict(result) if isinstance(result, dict) else {"score": result}
    try:
        total = float(parts.pop("score"))
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"the reward of a response ({data_source}) is {result!r}: return a number, or a dict with `score`"
        ) from None
    if not math.isfinite(total):
        raise NotFinite(f"the reward of a response ({data_source}) is {total}: nothing of it is committed")
    parts = {name: float(part) for name, part in parts.items() if isinstance(part, Real)}
    return Score(total, {name: part for name, part in parts.items() if abs(part) <= LARGEST})
