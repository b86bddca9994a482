"""Rewards: `compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict`.

The built-in rewards are the modules of this package; other functions are named ``package.module:function`` or
``folder/file.py:function``. A returned dict has `score` and named parts; parts that are not finite numbers are dropped.
TRL's functions, `f(completions, **columns) -> list`, are called with lists of one. `rlhf.rewards.pool` calls the
functions.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, get_type_hints

from rlhf.data.formats import Messages
from rlhf.errors import NotFinite, RatchetError, UserError, raised
from rlhf.named import load_named, source_of
from rlhf.rewards.trl import arguments_of, has_trls_signature, number_of

RewardFunction = Callable[..., float | dict[str, float] | list[float | None]]

KEY = "reward.function"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Passed by keyword, as verl does, so a function may take them in any order."""
WRAPPED = ("solution_str", "ground_truth", "extra_info", "data_source")
"""What a wrapper of a function with another signature passes to it, in order."""
COMPARING = ("auto", "code", "countdown", "gsm8k", "math")
"""Built-ins that compare with a ground truth and give 1 to a correct response."""
BUILT_IN = ("auto", "code", "constant", "countdown", "format", "gsm8k", "length", "math")

LARGEST = (2 - 2**-23) * 2.0**127
"""Largest part that is kept: parts are stored as float32."""


class RewardFailed(RatchetError):
    """The reward function raised an exception, took too long, or died."""


@dataclass(frozen=True)
class Score:
    """The score of one response."""

    score: float
    parts: dict[str, float]
    error: str | None = None
    """Why the score could not be computed; `score` is then 0."""


def solved_score(chosen: float | None, function: str | Mapping[str, float] | None, *, alone: bool) -> float | None:
    """The smallest score of a solved answer.

    Args:
        chosen: `validation.solved_score`.
        function: `reward.function`.
        alone: whether the score comes from the function only, without a reward model or an environment.

    Returns:
        The threshold, or None if the scores do not tell right from wrong.
    """
    return 1.0 if chosen is None and alone and function in COMPARING else chosen


def load_reward(name: str) -> RewardFunction:
    """Load a reward function.

    Args:
        name: a built-in, ``package.module:function`` or ``folder/file.py:function``.

    Returns:
        The function.

    Raises:
        UserError: there is no such function, or its module cannot be imported.
    """
    function: RewardFunction = load_named(name, KEY, "rlhf.rewards", "compute_score", BUILT_IN)
    return function


def check_rewards(names: Collection[str], options: Mapping[str, Mapping[str, Any]], allow_code: bool) -> None:
    """Check the reward functions before any response is generated.

    Args:
        names: functions in `reward.function`.
        options: keyword arguments of the functions, by name.
        allow_code: `reward.allow_code`.

    Raises:
        UserError: a function does not accept its arguments or options, has no Python source, or runs programs without
            `reward.allow_code`.
    """
    from pydantic import TypeAdapter, ValidationError  # imported here: the reward processes do not need pydantic

    from rlhf.rewards import code

    for name in names:
        function, chosen = load_reward(name), options.get(name, {})
        source_of(function, KEY, name)
        try:
            _check_signature(function, name, chosen)
            if function.__module__ in (f"rlhf.rewards.{built_in}" for built_in in BUILT_IN):
                hints = get_type_hints(function)
                for option, value in chosen.items():
                    TypeAdapter(hints[option]).validate_python(value)
        except ValidationError as error:
            raise UserError(f"reward.options.{name}.{option} {value!r}: {error.errors()[0]['msg']}") from None
        if function is code.compute_score:
            if not allow_code:
                raise UserError(
                    f"{KEY} {name} runs programs that the model wrote: read docs/security.md, and set "
                    "reward.allow_code: true"
                )
            code.check_sandbox(**chosen)


def _check_signature(function: RewardFunction, name: str, options: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    if has_trls_signature(function):
        unknown = [option for option in options if option not in signature.parameters]
        if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
            raise UserError(f"reward.options.{name} has {unknown[0]}, which {KEY} {name} does not take: remove it")
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **options)
    except TypeError as error:
        called = (
            f"{KEY} {name} cannot be called as compute_score(data_source=, solution_str=, ground_truth=, extra_info="
        )
        try:
            signature.bind_partial(**dict.fromkeys(ARGUMENTS))
        except TypeError:
            raise UserError(f"{called}), nor as TRL's f(completions, **columns): {_wrapper(function, name)}") from None
        raise UserError(f"{called}, **reward.options): {error}") from None


def _wrapper(function: RewardFunction, name: str) -> str:
    """How to wrap a function with another signature."""
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    ]
    given = ", ".join(WRAPPED[: len(needed)])
    arguments = ", ".join(("data_source", "solution_str", "ground_truth", "extra_info=None"))
    module, colon, own_name = name.rpartition(":")
    module, own_name = (module, own_name) if colon else (name, "compute_score")
    return (
        f"wrap it where it is defined, for example `def score_response({arguments}): return {own_name}({given})`, and "
        f"set {KEY}: {module}:score_response"
    )


def reward_digest(names: Collection[str]) -> str:
    """Compute a digest of the sources of the reward modules: changed code is a different reward.

    Args:
        names: functions in `reward.function`, in any order. With ``auto``, the sources of all built-ins are included.

    Returns:
        The sha256 in hex.

    Raises:
        UserError: a function cannot be loaded, or has no Python source.
    """
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
    *,
    prompt: str | Messages = "",
    options: Mapping[str, Any] | None = None,
) -> Score:
    """Score one response.

    Args:
        function: the reward function.
        data_source: data source of the prompt.
        solution_str: text of the response.
        ground_truth: ground truth of the prompt, as in the dataset.
        extra_info: `extra_info` of the prompt, as in the dataset, with the row's other columns.
        prompt: the prompt, as in the dataset; for functions of TRL's signature.
        options: further keyword arguments of the function.

    Returns:
        The score and its named parts, without the parts that are not finite numbers or do not fit into float32.

    Raises:
        RewardFailed: the function raised an exception.
        UserError: the function returned neither a number nor a dict with a numeric `score`, or needs a column that
            there is not.
        NotFinite: the score is NaN or infinite.
        NotApplicable: a function of TRL's signature returned None.
    """
    columns = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
    arguments = {**columns, "solution_str": solution_str, **(options or {})}
    is_trls = has_trls_signature(function)
    if is_trls:
        columns = {**(extra_info if isinstance(extra_info, dict) else {}), **columns}
        arguments = arguments_of(function, prompt, solution_str, columns, options or {})
    try:
        result: Any = function(**arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except Exception as error:
        raise RewardFailed(
            f"the reward raised {raised(error)} (data_source {data_source}, response {solution_str[:60]!r})"
        ) from error
    if is_trls:
        result = number_of(result)
    parts: dict[str, float] = dict(result) if isinstance(result, dict) else {"score": result}
    try:
        total = float(parts.pop("score"))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(
            f"the reward of a response ({data_source}) is {result!r}: return a number, or a dict with `score`"
        ) from None
    if not isfinite(total):
        raise NotFinite(f"the reward of a response ({data_source}) is {total}")
    finite = {name: part for name, part in parts.items() if isinstance(part, Real) and abs(part) <= LARGEST}
    return Score(total, {name: float(part) for name, part in finite.items() if isinstance(name, str)})
