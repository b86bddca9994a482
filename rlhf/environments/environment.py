"""The interface of environments, and their registry: loads, checks and digests them by name."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ratchet.rlhf.data.formats import Chat, Messages
from ratchet.rlhf.errors import RatchetError, UserError
from ratchet.rlhf.named import load_named, source_of

BUILT_IN = ("calculator", "gymnasium", "harbor", "tools")
KEY = "rollout.environment"


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a turn of the policy."""

    content: str | Sequence[Mapping[str, object]] | Chat | None
    """Text that is appended to the turn unchanged, such as tool output within a message; or messages (`user`, `tool`),
    which the chat template renders and the policy answers; or None: the trajectory ends. A message's content is a text,
    or OpenAI's parts: ``{"type": "text", "text": ...}``, and ``{"type": "image", "image": ...}`` with bytes, a path or
    a PIL image."""
    reward: float = 0.0
    """Reward of the turn, added to the trajectory's score and placed on the turn's last token."""
    error: str | None = None
    """An error that did not end the trajectory, such as a tool's; the first one is stored as `tool_error`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named numbers of the turn, which do not count in the score. Their sums over the trajectory are among its
    `reward_parts`, and so in the metrics."""


class Environment(Protocol):
    """The interface of an environment. Each trajectory has its own, created with `rollout.environment.options`.

    It must be deterministic: the same turns give the same observations. The environments of a shard run concurrently,
    but only one thread at a time uses each of them. It may have the methods of `Ending` and `Closing`, too.
    """

    stop: tuple[str, ...]
    """Texts that end a turn, such as the end of a tool call; the turn keeps them."""

    def reset(self, messages: Messages, ground_truth: Any, extra_info: Any) -> None:
        """Starts a trajectory.

        Args:
            ground_truth: ground truth of the prompt, as in the dataset; the environment may modify it.
            extra_info: `extra_info` of the prompt, as in the dataset; the environment may modify it.
        """
        ...

    def step(self, turn: str) -> Observation:
        """Answers the text that the policy wrote since the last observation."""
        ...


@runtime_checkable
class DurableEnvironment(Protocol):
    """The interface of an environment whose steps have effects, which no crash repeats.

    A turn of the policy is stored before `step` reads it, and the observation before the policy reads it. A trajectory
    that continues after a crash gets a new environment, which is restored to the state after the last stored
    observation. If the crash came while the environment answered, `step` gets the same turn with the same key again.
    """

    stop: tuple[str, ...]
    """See `Environment.stop`."""

    def reset(self, messages: Messages, ground_truth: Any, extra_info: Any) -> None:
        """See `Environment.reset`. It may run again after a crash, so it must have no effect."""
        ...

    def step(self, turn: str, key: str) -> Observation:
        """See `Environment.step`.

        Args:
            key: names this turn of this trajectory: calls with the same key must have their effects once. A turn with
                several calls appends their numbers.
        """
        ...

    def snapshot(self) -> str:
        """Returns the state after the last step, or the name of a place that holds it."""
        ...

    def restore(self, state: str) -> None:
        """Brings a new environment into a state. Called in place of `reset`."""
        ...

    def is_repeatable(self, turn: str) -> bool:
        """Returns False if `step` must not get a turn again whose answer a crash has lost: its trajectory is dropped,
        and counted in `rollout/errors`."""
        ...


@runtime_checkable
class Ending(Protocol):
    """An environment that rewards a trajectory which the environment itself has not ended."""

    def ended(self) -> Observation:
        """Returns the reward and the parts of a trajectory that has no more room, or has had its last turn; the
        content is not read. It may run again after a crash, in the same state."""
        ...


@runtime_checkable
class Closing(Protocol):
    """An environment that holds what has to be given back, such as a folder or a connection."""

    def close(self) -> None:
        """Gives it back. Called when the environment is no longer needed, once it answers nothing."""
        ...


class EnvironmentFailed(RatchetError):
    """The environment raised an exception, or did not answer in time."""


def load_environment(name: str) -> Callable[..., Environment | DurableEnvironment]:
    """Loads an environment class by name; raises UserError if there is none, or its module cannot be imported."""
    environment_class: Callable[..., Environment | DurableEnvironment] = load_named(
        name, KEY, "ratchet.rlhf.environments", ("Environment",), BUILT_IN
    )
    return environment_class


def check_environment(
    name: str, options: Mapping[str, Any], played_on_by: str | None = None, *, shared: bool = False
) -> None:
    """Checks an environment class before any response is generated.

    Args:
        played_on_by: the setting that plays on from the turns of stored trajectories; None: there is none.
        shared: other processes may generate the same trajectories (`rollout.workers`).

    Raises:
        UserError: the class cannot be loaded, cannot be created with the options, lacks `stop`, `reset` or `step`, or
            cannot be brought to the state after a stored turn, as `played_on_by` needs.
    """
    make = load_environment(name)
    source_of(make, KEY, name)
    try:
        environment = make(**options)
    except Exception as error:
        raise UserError(f"{KEY} {name} cannot be created with rollout.environment.options: {error}") from None
    stop = getattr(environment, "stop", None)
    texts = [] if isinstance(stop, str) or not isinstance(stop, Sequence) else stop
    if texts is not stop or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f'{KEY} {name} needs `stop`, the texts that end a turn, such as stop = ("</tool>",), or ()')
    durable = hasattr(environment, "restore")
    needed = (
        "reset(messages, ground_truth, extra_info), step(turn, key), snapshot(), restore(state) and is_repeatable(turn)"
        if durable
        else "reset(messages, ground_truth, extra_info) and step(turn)"
    )
    for method in ("reset", "step", *(("snapshot", "restore", "is_repeatable") if durable else ())):
        if not callable(getattr(environment, method, None)):
            raise UserError(f"{KEY} {name} has no method {method}: it needs {needed}")
    if played_on_by is not None:
        check_returns(make, name, played_on_by)
    if durable and shared:
        raise UserError(
            f"{KEY} {name} keeps its state across crashes, and two processes may play the same trajectory with "
            "rollout.workers: set rollout.workers to false"
        )
    arguments = ["turn", "key"] if durable else ["turn"]
    try:
        inspect.signature(environment.step).bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"{KEY} {name} cannot be called as step({', '.join(arguments)}): {error}: it needs {needed}"
        ) from None


def check_returns(make: Callable[..., Any], name: str, needed_by: str) -> None:
    """Checks that an environment can be brought to the state after a stored turn.

    Args:
        make: the environment's class.
        name: its name in the config.
        needed_by: what plays on from stored turns, for the error.

    Raises:
        UserError: it can neither be restored nor replayed.
    """
    if not hasattr(make, "restore") and not getattr(make, "replayable", False):
        raise UserError(
            f"{KEY} {name} cannot return to the state after a turn, as {needed_by} needs: set replayable = True on "
            "the class if the same turns lead to the same state, or give it snapshot() and restore(state)"
        )


def environment_digest(name: str, options: Mapping[str, Any]) -> str:
    """Returns the sha256 of the environment module's source, and of what the class method `identity` returns."""
    make = load_environment(name)
    source, identity = source_of(make, KEY, name), getattr(make, "identity", None)
    return hashlib.sha256((source if identity is None else source + identity(**options)).encode()).hexdigest()
