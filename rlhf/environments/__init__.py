"""Environments: what a policy talks to while it responds, such as tools, or the other side of a game.

A built-in is a module here with a class `Environment`; anything else is named ``package.module:Class`` or
``folder/file.py:Class``. What the environment says becomes part of the response, with `response_mask` 0: it is read,
and never learned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf.data.prompts import Messages
from rlhf.errors import RatchetError, UserError
from rlhf.named import load_named, source_of

BUILT_IN = ("calculator",)
KEY = "rollout.environment"


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a turn of the policy."""

    content: str | Messages | None
    """A text that follows the turn as it is, as tool output within a message does; messages (`user`, `tool`), through
    the chat template, to which the policy then answers; None: the trajectory ends."""
    reward: float = 0.0
    """Added to the trajectory's score."""


class Environment(Protocol):
    """One for each trajectory, made from `rollout.environment.options`. Given the same turns, it says the same.

    Those of a shard are made and asked at the same time, each by one thread at once.
    """

    stop: tuple[str, ...]
    """Texts that end a turn, such as that which ends a tool call; the turn keeps them."""

    def reset(self, messages: Messages, ground_truth: Any, extra_info: Any) -> None:
        """A trajectory begins with this prompt; the dataset holds the others, and they are its own."""
        ...

    def step(self, turn: str) -> Observation:
        """The policy has written this, since it was last told something."""
        ...


class EnvironmentFailed(RatchetError):
    """The environment raised an exception, or did not answer in time."""


def load_environment(name: str) -> Callable[..., Environment]:
    """The class that a name stands for; raises `UserError`."""
    found: Callable[..., Environment] = load_named(name, KEY, "rlhf.environments", "Environment", BUILT_IN)
    return found


def check_environment(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a class that cannot be made with these options, or that lacks something."""
    make = load_environment(name)
    source_of(make, KEY, name)
    try:
        made = make(**options)
    except Exception as error:
        raise UserError(f"{KEY} {name} cannot be made with rollout.environment.options: {error}") from None
    stop = getattr(made, "stop", None)
    texts = [] if isinstance(stop, str) or not isinstance(stop, Sequence) else stop
    if texts is not stop or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f'{KEY} {name} has no `stop`: the texts that end a turn, such as stop = ("</tool>",), or ()')
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise UserError(
                f"{KEY} {name} has no method {method}: it needs reset(messages, ground_truth, extra_info) "
                "and step(turn)"
            )


def environment_digest(name: str) -> str:
    return hashlib.sha256(source_of(load_environment(name), KEY, name).encode()).hexdigest()
