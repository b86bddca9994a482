"""Reward functions with TRL's signature: ``f(completions, **columns)`` returns a list with a number per completion.

They are called for one response at a time, with lists of one. `columns` are `prompts`, `data_source`, `ground_truth`,
`extra_info`, and the dataset's other columns. Where the dataset has prompts as messages, so are the completions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.data.formats import Messages
from rlhf.errors import RatchetError, UserError

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class NotApplicable(RatchetError):
    """The function gave None: it does not judge this response."""


def has_trls_signature(function: Callable[..., object]) -> bool:
    """Whether a reward function takes `completions`."""
    return "completions" in inspect.signature(function).parameters


def arguments_of(
    function: Callable[..., object],
    prompt: str | Messages,
    solution_str: str,
    columns: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments for one response; those that the function does not take are left out.

    Args:
        function: the reward function.
        prompt: the prompt as in the dataset, a text or messages.
        solution_str: text of the response.
        columns: the other columns of the row.
        options: `reward.options` of the function.

    Raises:
        UserError: the function needs an argument that there is not.
    """
    completion = solution_str if isinstance(prompt, str) else [{"role": "assistant", "content": solution_str}]
    known = {name: [value] for name, value in columns.items()} | {"prompts": [prompt], "completions": [completion]}
    known |= options
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in known and parameter.default is parameter.empty and parameter.kind not in VARIADIC
    ]
    if missing:
        raise UserError(
            f"the reward needs the column {', '.join(missing)}, which the dataset does not have (it has "
            f"{', '.join(sorted(known))}): add it, or give it a default"
        )
    return {name: value for name, value in known.items() if takes_all or name in parameters}


def number_of(result: object) -> object:
    """The only number of a list that a function of TRL's signature returned.

    Raises:
        NotApplicable: it is None.
        UserError: the function did not return a list of one number.
    """
    if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 1:
        raise UserError(f"the reward returned {result!r:.200}: return a list with a number for each completion")
    if result[0] is None:
        raise NotApplicable("the reward gave None to a response that no other reward judges: return a number")
    return result[0]
