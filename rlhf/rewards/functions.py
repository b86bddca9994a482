"""Reward functions of three kinds, distinguished by their parameters.

- ``compute_score(data_source, solution_str, ground_truth, extra_info=None)`` scores one response, as in verl;
- ``compute_scores(group)`` scores the responses to a prompt together, a list of `Trajectory`;
- ``f(completions, **columns)`` scores the responses to a prompt together, as in TRL: `columns` are `prompts`,
  `completion_ids`, `data_source`, `ground_truth`, `extra_info` and the dataset's other columns, each as a list. If the
  dataset has prompts as messages, so are the completions.

Each may be ``async``. The last two return a list with an entry for each response. None abstains from judging a
response; an exception is its failure.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from math import isfinite
from typing import Any, SupportsFloat, TypedDict

from ratchet.rlhf.data.formats import Messages
from ratchet.rlhf.errors import NotFinite, RatchetError, UserError, raised

RewardFunction = Callable[..., object]

KEY = "reward.function"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Passed by keyword, as verl does, so a function may take them in any order."""
BY_NAME = ("prompt", "prompt_tail", "turns", "metadata")
"""Passed to a function of one response that has a parameter of that name."""
WRAPPED = ("solution_str", "ground_truth", "extra_info", "data_source")
"""Arguments that a wrapper passes, in this order, to parameters whose names mean nothing."""
MEANINGS = {
    "solution_str": ("solution", "response", "completion", "answer", "output", "prediction", "generated", "text"),
    "ground_truth": ("truth", "label", "target", "reference", "gold", "expected", "correct", "answer", "solution"),
    "extra_info": ("extra", "info", "extras"),
    "data_source": ("source", "dataset"),
    "prompt": ("question", "query", "instruction", "problem"),
}
"""Parts of other functions' names for an argument, the most likely first."""
NOT_PASSED = ("trainer_state", "log_extra", "log_metric")
"""Arguments that only TRL passes."""
TAIL_CHARACTERS = 200
"""Length of `Trajectory.prompt_tail`."""
LARGEST = (2 - 2**-23) * 2.0**127
"""Largest part that is kept: parts are stored as float32."""


class RewardFailed(RatchetError):
    """The reward function raised an exception, took too long, or died."""


class NotApplicable(RatchetError):
    """The function returned None: it does not judge this response."""


class MissingColumn(UserError):
    """The function needs a column that the dataset lacks."""


@dataclass(frozen=True)
class Score:
    """The score of one response."""

    score: float
    parts: dict[str, float]
    error: str | None = None
    """Why the score could not be computed; `score` is then 0."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Parts that cannot be kept, by name, with the values that the function returned."""


Outcome = Score | RatchetError
"""The score of a response, or the error that prevented it."""
FAILURES: dict[str, type[RatchetError]] = {
    "RewardFailed": RewardFailed,
    "NotApplicable": NotApplicable,
    "NotFinite": NotFinite,
    "UserError": UserError,
}
"""Kinds of errors in outcomes."""


class Metadata(TypedDict):
    """Origin of a response. An unknown value is None."""

    trajectory_id: str
    prompt_id: str
    """The same for all responses to a prompt: their group."""
    sample: int | None
    iteration: int | None
    policy_version: int | None
    finish_reason: str | None
    response_length: int | None
    """Number of tokens that the policy wrote."""


@dataclass(frozen=True)
class Trajectory:
    """A response, and everything that a reward may know about it; the dataset's values are unchanged."""

    data_source: str
    solution_str: str
    """Text of the response."""
    ground_truth: Any
    extra_info: Any
    prompt: str | Messages
    turns: list[dict[str, str]]
    """Turns of the response, `[{role, content}]`; the role is policy or environment."""
    metadata: Metadata
    response_ids: list[int] | None = None
    """Tokens of the response, passed only to functions of TRL's signature, as `completion_ids`."""
    prompt_tail: str = ""
    """The end of the prompt as the chat template renders it: it may open a tag (`<think>`) that the response closes."""


@dataclass(frozen=True)
class Reward:
    """A reward function and its options."""

    name: str
    """Its name in `reward.function`."""
    function: RewardFunction
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @property
    def is_async(self) -> bool:
        """True if it may score many responses concurrently."""
        return inspect.iscoroutinefunction(self.function)

    @property
    def takes_group(self) -> bool:
        """True if it scores the trajectories of a prompt together, as `group`."""
        return "group" in self._parameters and not self._is_trls

    @property
    def takes_several(self) -> bool:
        """True if it takes all responses to a prompt in one call."""
        return self._is_trls or self.takes_group

    @property
    def takes_ids(self) -> bool:
        """True if it takes the tokens of the responses."""
        return self._is_trls and (self._takes_all or "completion_ids" in self._parameters)

    @property
    def _is_trls(self) -> bool:
        return "completions" in self._parameters

    def check(self) -> None:
        """Raises UserError if the function does not take its arguments and options."""
        signature = inspect.signature(self.function)
        if self._is_trls:
            absent = [name for name in NOT_PASSED if name in self._parameters and name not in self.options]
            if required := [name for name in absent if self._parameters[name].default is inspect.Parameter.empty]:
                raise UserError(
                    f"{KEY} {self.name} requires {' and '.join(required)}, which only TRL passes: write "
                    f"{', '.join(f'{name}=None' for name in required)}, and do without it where it is None"
                )
            unknown = [option for option in self.options if option not in self._parameters]
            if unknown and not self._takes_all:
                raise UserError(
                    f"reward.options.{self.name} has {unknown[0]}, which {KEY} {self.name} does not take: remove it"
                )
        elif self.takes_group:
            try:
                signature.bind(group=None, **self.options)
            except TypeError as error:
                called = f"{KEY} {self.name} cannot be called as compute_scores(group=, **reward.options)"
                raise UserError(f"{called}: {error}") from None
        else:
            self._check_single(signature)

    def _check_single(self, signature: inspect.Signature) -> None:
        known = dict.fromkeys((*ARGUMENTS, *(name for name in BY_NAME if name in self._parameters)))
        try:
            signature.bind(**{**known, **self.options})
        except TypeError as error:
            arguments = "data_source=, solution_str=, ground_truth=, extra_info="
            called = f"{KEY} {self.name} cannot be called as compute_score({arguments}"
            try:
                signature.bind_partial(**known)
            except TypeError:
                raise UserError(
                    f"{called}), nor as compute_scores(group), nor as TRL's f(completions, **columns): {self._wrapper}"
                ) from None
            raise UserError(f"{called}, **reward.options): {error}") from None

    @property
    def _wrapper(self) -> str:
        """An example of a wrapper for a function with another signature, matching its parameters by their names."""
        meanings, misspelt = _meanings(
            {name: parameter for name, parameter in self._parameters.items() if name not in self.options}
        )
        is_keyword = {name: self._parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY for name in meanings}
        given = [f"{name}={value}" if is_keyword[name] else value for name, value in meanings.items()]
        if not given and any(parameter.kind is parameter.VAR_POSITIONAL for parameter in self._parameters.values()):
            given = ["solution_str", "ground_truth"]
        more = [name for name in BY_NAME if name in meanings.values()]
        arguments = [
            "data_source",
            "solution_str",
            "ground_truth",
            "extra_info=None",
            *(f"{name}=None" for name in more),
        ]
        if self.options:
            given, arguments = [*given, "**options"], [*arguments, "**options"]
        module, colon, own_name = self.name.rpartition(":")
        module, own_name = (module, own_name) if colon else (self.name, self.function.__name__)
        is_async, is_awaited = ("async ", "await ") if self.is_async else ("", "")
        names = " and ".join(f"{meaning} instead of {name}" for name, meaning in misspelt.items())
        hint = f"did you mean {names}? Rename it, or " if names else ""
        return (
            f"{hint}wrap it where it is defined, for example `{is_async}def score_response({', '.join(arguments)}): "
            f"return {is_awaited}{own_name}({', '.join(given)})`, and set {KEY}: {module}:score_response"
        )

    def score(self, group: Sequence[Trajectory]) -> list[Outcome]:
        """Scores some responses in one call.

        Returns:
            The outcome of each, in order. Parts of a score that are not finite numbers or do not fit into float32 are
            in `Score.left_out`.
        """
        try:
            result = self.function(**self._arguments(group))
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except Exception as error:
            return [self._failure(error, group)] * len(group)
        return self._outcomes(result, group)

    async def score_async(self, group: Sequence[Trajectory]) -> list[Outcome]:
        """Scores some responses in one call of an async function; see `score`."""
        try:
            result = await self.function(**self._arguments(group))  # type: ignore[misc]
        except Exception as error:
            return [self._failure(error, group)] * len(group)
        return self._outcomes(result, group)

    def _arguments(self, group: Sequence[Trajectory]) -> dict[str, Any]:
        if self._is_trls:
            return self._columns(group)
        if self.takes_group:
            return {"group": list(group), **self.options}
        [trajectory] = group
        names = (*ARGUMENTS, *(name for name in BY_NAME if name in self._parameters))
        return {**{name: getattr(trajectory, name) for name in names}, **self.options}

    def _columns(self, group: Sequence[Trajectory]) -> dict[str, Any]:
        """Returns the arguments that a function of TRL's signature takes."""
        rows = [
            {
                **(trajectory.extra_info if isinstance(trajectory.extra_info, dict) else {}),
                "data_source": trajectory.data_source,
                "ground_truth": trajectory.ground_truth,
                "extra_info": trajectory.extra_info,
                "prompts": trajectory.prompt,
                "prompt_tail": trajectory.prompt_tail,
                "completion_ids": trajectory.response_ids,
                "completions": trajectory.solution_str
                if isinstance(trajectory.prompt, str)
                else [{"role": "assistant", "content": trajectory.solution_str}],
            }
            for trajectory in group
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        known: dict[str, Any] = {**{name: [row.get(name) for row in rows] for name in names}, **self.options}
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        missing = [
            name
            for name, parameter in self._parameters.items()
            if name not in known and parameter.default is parameter.empty and parameter.kind not in variadic
        ]
        if missing:
            raise MissingColumn(
                f"the reward needs the column {', '.join(missing)}, which the dataset does not have (it has "
                f"{', '.join(sorted(known))}): add it, or give it a default"
            )
        return {name: value for name, value in known.items() if self._takes_all or name in self._parameters}

    @property
    def _takes_all(self) -> bool:
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values())

    def _failure(self, error: Exception, group: Sequence[Trajectory]) -> RatchetError:
        if isinstance(error, MissingColumn):
            return error
        reason = str(error) if isinstance(error, RewardFailed) else f"the reward raised {raised(error)}"
        return RewardFailed(f"{reason} ({place_of(group)})")

    def _outcomes(self, result: Any, group: Sequence[Trajectory]) -> list[Outcome]:
        if not self.takes_several:
            return [_outcome(result, group[0])]
        sized = hasattr(result, "__len__") and not isinstance(result, str | bytes | Mapping)
        if not sized or len(result) != len(group):
            what = "completion" if self._is_trls else "trajectory of the group"
            error = UserError(f"the reward returned {result!r:.200}: return a list with a number for each {what}")
            return [error] * len(group)
        return [self._entry(entry, trajectory) for entry, trajectory in zip(result, group, strict=True)]

    def _entry(self, entry: object, trajectory: Trajectory) -> Outcome:
        if entry is None:
            return NotApplicable("the reward gave None to a response that no other reward judges: return a number")
        if isinstance(entry, Exception):
            return self._failure(entry, [trajectory])
        return _outcome(entry, trajectory)


def continued(solution_str: str, prompt_tail: str, *openings: str) -> str:
    """Returns a response together with the opening, such as `<think>`, that ends its prompt, if any."""
    end = prompt_tail.rstrip()
    opened = next((len(opening) for opening in openings if end.endswith(opening)), None)
    return solution_str if opened is None else prompt_tail[len(end) - opened :] + solution_str


def _meanings(parameters: Mapping[str, inspect.Parameter]) -> tuple[dict[str, str], dict[str, str]]:
    """Chooses what to pass to parameters with names of the function's own.

    Returns:
        An expression for each parameter, by name: the argument that the name means, else the next one that is left,
        else the value of that name in `extra_info`. And the misspelt arguments, by the parameter's name.
    """
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic}
    known = (*ARGUMENTS, *BY_NAME)
    meant = {name: name for name in named if name in known}
    misspelt: dict[str, str] = {}
    for name in named:
        near = get_close_matches(name, [argument for argument in known if argument not in meant.values()], 1, 0.85)
        if name not in meant and near:
            meant[name] = misspelt[name] = near[0]
    ranked = sorted(
        (rank, name, argument)
        for argument, parts in MEANINGS.items()
        for rank, part in enumerate(parts)
        for name in named
        if part in name.lower().split("_")
    )
    for _, name, argument in ranked:
        if name not in meant and argument not in meant.values():
            meant[name] = argument
    left = [argument for argument in WRAPPED if argument not in meant.values()]
    for name, parameter in named.items():
        if name not in meant and parameter.default is parameter.empty:
            meant[name] = left.pop(0) if left else f"extra_info[{name!r}]"
    return {name: meant[name] for name in named if name in meant}, misspelt


def is_failure(outcome: Outcome) -> bool:
    """Returns True if a response should have a score, but has none."""
    return not isinstance(outcome, Score | NotApplicable)


def place_of(group: Sequence[Trajectory]) -> str:
    """Describes the responses that an error is about."""
    first = group[0]
    if len(group) == 1:
        return f"data_source {first.data_source}, response {first.solution_str[:60]!r}"
    return f"data_source {first.data_source}, the {len(group)} responses to prompt {first.metadata['prompt_id']}"


def took_too_long(timeout_s: float, group: Sequence[Trajectory]) -> RewardFailed:
    """Returns the error of responses whose call took longer than `reward.timeout_s` for each of them."""
    limit = f"reward.timeout_s {timeout_s:g} s" + (f" for each of {len(group)} responses" if len(group) > 1 else "")
    return RewardFailed(f"the reward took longer than {limit}, and was ended ({place_of(group)})")


def _outcome(result: Any, trajectory: Trajectory) -> Outcome:
    """Reads the score in a function's result for a response."""
    parts: dict[str, float] = dict(result) if isinstance(result, dict) else {"score": result}
    source = trajectory.data_source
    try:
        total = float(parts.pop("score"))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several values
        return UserError(f"the reward of a response ({source}) is {result!r}: return a number, or a dict with `score`")
    if not isfinite(total):
        return NotFinite(f"the reward of a response ({source}) is {total}")
    kept: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, part in parts.items():
        number = _number(part)
        if isinstance(name, str) and number is not None and abs(number) <= LARGEST:
            kept[name] = number
        else:
            left_out[str(name)] = f"{part!r:.60}"
    return Score(total, kept, left_out=left_out)


def _number(value: object) -> float | None:
    """Returns the value of a number, also of NumPy's and of a zero-dimensional tensor; None for anything else."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
