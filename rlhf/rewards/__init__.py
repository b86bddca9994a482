"""Rewards: `compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict`.

A built-in is a module here; anything else is named ``package.module:function`` or ``folder/file.py:function``. A dict
has `score` and named parts, of which those that are finite numbers are kept. `rlhf.rewards.pool` calls them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.errors import NotFinite, RatchetError, UserError

RewardFunction = Callable[..., float | dict[str, float]]


BUILT_IN = ("auto", "code", "constant", "countdown", "format", "gsm8k", "length", "math")

LARGEST = (2 - 2**-23) * 2.0**127
"""Parts are stored in single precision: what does not fit, or is no number, is left out."""


class RewardFailed(RatchetError):
    """The reward function raised an exception, took too long, or died."""


@dataclass(frozen=True)
class Score:
    score: float
    parts: dict[str, float]
    error: str | None = None
    """Why there is none: then it is 0."""


def load_reward(name: str) -> RewardFunction:
    """The function of a built-in reward, or of ``package.module:function``; raises `UserError` if there is none."""
    module_name, colon, function = name.rpartition(":")
    if not colon:
        module_name, function = name, "compute_score"
    try:
        found = getattr(_module(module_name, built_in=not colon), function)
    except Exception as error:  # whatever a user's module raises as it is imported
        raise UserError(
            f"reward.function {name}: {type(error).__name__}: {error}; name a built-in ({', '.join(BUILT_IN)}), "
            "package.module:function or file.py:function"
        ) from None
    if not callable(found):
        raise UserError(f"reward.function {name} is not a function")
    return found  # type: ignore[no-any-return]


def _module(name: str, built_in: bool) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(f"rlhf.rewards.{name}" if built_in else name)
    path = Path(name).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reward_digest(names: Collection[str]) -> str:
    """sha256 of the source of the modules that hold the rewards: changed code is another reward."""
    sources = [_source(name) for name in sorted(names)]
    if "auto" in names:
        sources += [_source(name) for name in BUILT_IN if name != "auto"]
    return hashlib.sha256("".join(sources).encode()).hexdigest()


def _source(name: str) -> str:
    function = load_reward(name)
    try:
        return Path(inspect.getsourcefile(function) or "").read_text()
    except (OSError, TypeError):
        raise UserError(f"reward.function {name} has no Python source to take a digest of: wrap it") from None


def score(
    function: RewardFunction,
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: str,
    options: Mapping[str, Any] | None = None,
) -> Score:
    """Score one response; `ground_truth` and `extra_info` are JSON text where the dataset held structures."""
    try:
        result = function(data_source, solution_str, ground_truth, json.loads(extra_info), **(options or {}))
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
    if not isfinite(total):
        raise NotFinite(f"the reward of a response ({data_source}) is {total}: nothing of it is committed")
    parts = {name: float(part) for name, part in parts.items() if isinstance(part, Real)}
    return Score(total, {name: part for name, part in parts.items() if abs(part) <= LARGEST})
