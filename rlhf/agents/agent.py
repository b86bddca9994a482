"""Loads agents' programs by name, checks them, and computes their digests."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ratchet.rlhf.environments.environment import EnvironmentFailed
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.named import load_named, source_of

KEY = "rollout.agent"
BUILT_IN = ("verifiers", "openenv")
"""Programs that run environments of other packages."""
ARGUMENTS = ("task", "base_url", "api_key", "model")
"""Keyword arguments of a program, in addition to `rollout.agent.options`."""
Program = Callable[..., Any]
"""A program, possibly async. Returns a reward, named parts with `reward` among them, or None."""


class AgentFailed(EnvironmentFailed):
    """The program raised an exception, hung, or made a call that the endpoint does not support."""


def load_agent(name: str) -> Program:
    """Loads a program.

    Args:
        name: ``package.module:function``, ``folder/file.py:function`` or a built-in.
    """
    program: Program = load_named(name, KEY, "ratchet.rlhf.agents", ("run",), BUILT_IN)
    return program


def check_agent(name: str, options: Mapping[str, Any]) -> None:
    """Checks a program before any response is generated.

    Raises:
        UserError: it or its dependencies cannot be loaded, or it does not take the arguments of its calls.
    """
    program = load_agent(name)
    source_of(program, KEY, name)
    arguments = [*ARGUMENTS, *options]
    try:
        inspect.signature(program).bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise UserError(
            f"{KEY} {name} is called with {', '.join(f'{argument}=...' for argument in arguments)}: {error}. Define it "
            f"as `def run({', '.join(arguments)})`; more arguments come from rollout.agent.options"
        ) from None

    agent_digest(name, options)


def agent_digest(name: str, options: Mapping[str, Any]) -> str:
    """Returns the sha256 of the source of the program's module, and of what its `identity` returns for the options.

    Changed code is a different agent.
    """
    program = load_agent(name)
    source, identity = source_of(program, KEY, name), getattr(inspect.getmodule(program), "identity", None)
    return hashlib.sha256((source if identity is None else source + identity(**options)).encode()).hexdigest()
