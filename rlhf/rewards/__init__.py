"""Rewards: `compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict`.

A built-in is a module here; anything else is named ``package.module:function`` or ``folder/file.py:function``. A dict
has `score` and named parts, of which those that are finite numbers are kept. `rlhf.rewards.pool` calls them.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, get_type_hints

from rlhf.errors import NotFinite, RatchetError, UserError, raised
from rlhf.named import load_named, source_of

RewardFunction = Callable[..., float | dict[str, float]]


KEY = "reward.function"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""By name, as verl gives them, in whatever order a function takes them."""
COMPARING = ("auto", "code", "countdown", "gsm8k", "math")
"""Those that need a ground truth, and give 1 to what is right."""
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


def solved_score(chosen: float | None, function: str | Mapping[str, float] | None, *, alone: bool) -> float | None:
    """The score from which on an answer is solved; None where scores do not mean that.

    Args:
        chosen: `validation.solved_score`.
        function: `reward.function`.
        alone: whether the function alone makes the score: no reward model and no environment has a part in it.
    """
    return 1.0 if chosen is None and alone and function in COMPARING else chosen


def load_reward(name: str) -> RewardFunction:
    """The function of a built-in reward, or of ``package.module:function``; raises `UserError` if there is none."""
    found: RewardFunction = load_named(name, KEY, "rlhf.rewards", "compute_score", BUILT_IN)
    return found


def check_rewards(names: Collection[str], options: Mapping[str, Mapping[str, Any]], allow_code: bool) -> None:
    """Refuse functions that cannot be called with their options, before a response is generated for them, or that have
    no source to know them by; and programs that nobody has allowed, whatever name they go by."""
    from pydantic import TypeAdapter, ValidationError  # which the processes that compute rewards do without

    from rlhf.rewards import code

    for name in names:
        function, chosen = load_reward(name), options.get(name, {})
        source_of(function, KEY, name)
        try:
            inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS), **chosen)
            if function.__module__ in (f"rlhf.rewards.{each}" for each in BUILT_IN):
                hints = get_type_hints(function)
                for option, value in chosen.items():
                    TypeAdapter(hints[option]).validate_python(value)
        except TypeError as error:
            raise UserError(
                f"{KEY} {name} cannot be called as compute_score(data_source=, solution_str=, ground_truth=, "
                f"extra_info=, **reward.options): {error}"
            ) from None
        except ValidationError as error:
            raise UserError(f"reward.options.{name}.{option} {value!r}: {error.errors()[0]['msg']}") from None
        if function is code.compute_score:
            if not allow_code:
                raise UserError(
                    f"{KEY} {name} runs programs that the model wrote: read docs/security.md, and set "
                    "reward.allow_code: true"
                )
            code.check_sandbox(**chosen)


def reward_digest(names: Collection[str]) -> str:
    """sha256 of the source of the modules that hold the rewards: changed code is another reward."""
    sources = [_source(name) for name in sorted(names)]
    if "auto" in names:
        sources += [_source(name) for name in BUILT_IN if name != "auto"]
    return hashlib.sha256("".join(sources).encode()).hexdigest()


def _source(name: str) -> str:
    return source_of(load_reward(name), KEY, name)


def score(
    function: RewardFunction,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    options: Mapping[str, Any] | None = None,
) -> Score:
    """Score one response; `ground_truth` and `extra_info` are what the dataset holds."""
    try:
        result = function(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **(options or {}),
        )
    except Exception as error:
        raise RewardFailed(
            f"the reward raised {raised(error)} (data_source {data_source}, response {solution_str[:60]!r})"
        ) from error
    parts = dict(result) if isinstance(result, dict) else {"score": result}
    try:
        total = float(parts.pop("score"))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(
            f"the reward of a response ({data_source}) is {result!r}: return a number, or a dict with `score`"
        ) from None
    if not isfinite(total):
        raise NotFinite(f"the reward of a response ({data_source}) is {total}")
    small = {name: part for name, part in parts.items() if isinstance(part, Real) and abs(part) <= LARGEST}
    return Score(total, {name: float(part) for name, part in small.items() if isinstance(name, str)})
