"""`rollout.environment: gymnasium:ID`: environments of the package gymnasium, as texts.

Observations are texts, numbers or tuples of these, and actions texts or numbers, of which the last in the policy's turn
counts. The first observation is in the prompt: `ratchet data gymnasium` writes such prompts, one for each seed.

After a crash the environment is restored, by its attributes (`gymnasium_state`) or, if these cannot be stored, by the
actions since its reset.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ratchet.rlhf.data.formats import Messages
from ratchet.rlhf.environments.environment import KEY, Observation
from ratchet.rlhf.environments.gymnasium_state import Attributes, NotStorable
from ratchet.rlhf.errors import UserError, in_one_line
from ratchet.rlhf.schema import MESSAGES

PREFIX = "gymnasium:"
LONGEST_NUMBER = 18
"""Digits of a number that Python reads at once."""
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "extra_info": pa.struct({"index": pa.int64(), "seed": pa.int64()}),
    }
)


class Environment:
    """An episode. A turn of the policy is an action, or is answered with an error that says what an action is."""

    stop = ()

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Makes the environment.

        Args:
            environment: its id; ``module:ID`` imports the module that registers it.
            arguments: keyword arguments of `gymnasium.make`.

        Raises:
            UserError: there is no such environment, or its spaces have no texts.
        """
        self._name, self._made = environment, made(environment, arguments or {})
        self._numbers = _numbers(self._made)
        self._seed = 0
        self._attributes: Attributes | None = None
        """None: they cannot be stored."""
        self._actions: list[str | int] | None = []
        """The actions since the reset; None: unknown, because the attributes were restored."""

    @classmethod
    def identity(cls, environment: str, arguments: Mapping[str, Any] | None = None) -> str:
        """Returns the environment's dependencies beyond its own code: its module."""
        module = inspect.getmodule(type(made(environment, arguments or {}).unwrapped))
        assert module is not None
        return f"{json.dumps(arguments, sort_keys=True)} {inspect.getsource(module)}"

    def reset(self, messages: Messages, ground_truth: Any, extra_info: Any) -> None:
        """Starts the episode of the seed in `extra_info`. Raises UserError if the prompt lacks its first
        observation."""
        first = self._begin(int(extra_info.get("seed") or 0))
        if first not in str(messages[-1]["content"]):
            raise UserError(
                f"{KEY} {PREFIX}{self._name} begins with {first[:60]!r} for the seed {self._seed}, which the prompt "
                f"does not say: `ratchet data gymnasium {self._name} OUT.parquet` writes prompts that do"
            )

    def step(self, turn: str, key: str) -> Observation:
        """Plays the action in a turn."""
        action: str | int = turn
        if self._numbers is not None:
            first, last = self._numbers[0], self._numbers[-1]
            written = re.findall(r"-?\d+" if first < 0 else r"\d+", turn)
            action = int(written[-1][:LONGEST_NUMBER]) if written else first - 1
            if action not in self._numbers:
                return Observation(_said(f"error: an answer is a number from {first} to {last}"))
        observation, reward, terminated, truncated, _ = self._made.step(action)
        if self._actions is not None:
            self._actions.append(action)
        content = None if terminated or truncated else _said(text_of(observation))
        return Observation(content, float(reward))

    def snapshot(self) -> str:
        """Returns the seed and the attributes that have changed since the reset, or else the actions, as JSON."""
        try:
            if self._attributes is not None:
                kept = {"first": self._attributes.digest, "changed": self._attributes.changed()}
                return json.dumps({"seed": self._seed, **kept})
        except NotStorable as error:
            if self._actions is None:  # it was restored without them
                raise ValueError(f"{PREFIX}{self._name} can no longer be stored: {error}") from None
        return json.dumps({"seed": self._seed, "actions": self._actions})

    def restore(self, state: str) -> None:
        """Resets the environment with the same seed, and sets its attributes or plays its actions again."""
        kept = json.loads(state)
        self._begin(kept["seed"])
        if "actions" in kept:
            for action in kept["actions"]:
                self._made.step(action)
            self._actions = kept["actions"]
        elif self._attributes is None or self._attributes.digest != kept["first"]:
            raise ValueError(f"{PREFIX}{self._name} does not begin as before with the seed {self._seed}")
        else:
            self._attributes.set(kept["changed"])
            self._actions = None

    def is_repeatable(self, turn: str) -> bool:
        """Returns True: a restored environment gets an action whose answer a crash has lost in the same state."""
        return True

    def close(self) -> None:
        self._made.close()

    def _begin(self, seed: int) -> str:
        """Starts an episode; returns the first observation."""
        observation, _ = self._made.reset(seed=seed)
        self._seed, self._actions = seed, []
        try:
            self._attributes = Attributes(self._made)
        except NotStorable:
            self._attributes = None
        return text_of(observation)


def made(environment: str, arguments: Mapping[str, Any]) -> Any:
    """Builds an environment of the package.

    Raises:
        UserError: there is none, or its spaces have no texts.
    """
    try:
        gymnasium = importlib.import_module("gymnasium")
        built = gymnasium.make(environment, disable_env_checker=True, **arguments)
    except Exception as error:  # an environment's module may raise anything
        raise UserError(f"{KEY} {PREFIX}{environment}: {error}; is it installed (extra gymnasium)?") from None
    spaces = gymnasium.spaces
    observed = built.observation_space
    parts = observed.spaces if isinstance(observed, spaces.Tuple) else [observed]
    for space in (*parts, built.action_space):
        if not isinstance(space, spaces.Text | spaces.Discrete):
            raise UserError(
                f"{KEY} {PREFIX}{environment} has the space {in_one_line(str(space))}: only Text, Discrete and, of "
                "observations, Tuple of them are texts; a wrapper can make texts of others"
            )
    return built


def text_of(observation: Any) -> str:
    """Returns what the policy reads of an observation."""
    return ", ".join(map(str, observation)) if isinstance(observation, tuple) else str(observation)


def prompts(environment: str, arguments: Mapping[str, Any], seeds: range, instruction: str | None) -> pa.Table:
    """Returns a dataset with a prompt for each seed: the instruction, and the first observation.

    Args:
        environment: see `Environment`, as `arguments`.
        instruction: what the policy reads first; None: what an action is, if it is a number.

    Raises:
        UserError: as `made`.
    """
    built = made(environment, arguments)
    numbers = _numbers(built)
    if instruction is None and numbers is not None:
        instruction = f"Each answer is a number from {numbers[0]} to {numbers[-1]}."
    rows = []
    for index, seed in enumerate(seeds):
        first = text_of(built.reset(seed=seed)[0])
        content = "\n".join(filter(None, (instruction, first)))
        message = {"role": "user", "content": content}
        extra = {"index": index, "seed": seed}
        rows.append({"data_source": environment, "prompt": [message], "extra_info": extra})
    built.close()
    return pa.Table.from_pylist(rows, SCHEMA)


def _numbers(built: Any) -> range | None:
    """Returns the numbers that are actions; None: actions are texts."""
    space = built.action_space
    return range(int(space.start), int(space.start + space.n)) if hasattr(space, "n") else None


def _said(text: str) -> Messages:
    return [{"role": "user", "content": text}]
