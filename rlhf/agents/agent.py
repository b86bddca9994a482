"""Finds the programs that are agents by name, checks them, and computes their digests."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ratchet.rlhf.environments.environment import EnvironmentFailed
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.named import load_named, source_of

KEY = "rollout.agent"
BUILT_IN = ("verifiers", "gymnasium")
"""Programs that run environments of other packages."""
ARGUMENTS = ("task", "base_url", "api_key", "model")
"""What a program is called with, by name, in addition to `rollout.agent.options`."""
Program = Callable[..., Any]
"""A program, which may be async. It returns a reward, named parts with `reward` among them, or None."""


class AgentFailed(EnvironmentFailed):
    """The program raised an exception, hung, or asked for something that the endpoint does not do."""


def load_agent(name: str) -> Program:
    """Load a program.

    Args:
        name: ``package.module:function``, ``folder/file.py:function`` or a built-in.

    Raises:
        UserError: there is no such function, or its module cannot be imported.
    """
    program: Program = load_named(name, KEY, "ratchet.rlhf.agents", ("run",), BUILT_IN)
    return program


def check_agent(name: str, options: Mapping[str, Any]) -> None:
    """Check a program before any response is generated.

    Args:
        name: `rollout.agent.name`.
        options: `rollout.agent.options`.

    Raises:
        UserError: it cannot be loaded, nor what it depends on, or does not take the arguments that it is called with.
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
    """sha256 of the source of the program's module, and of what its function `identity` says of the options: changed
    code is a different agent."""
    program = load_agent(name)
    source, identity = source_of(program, KEY, name), getattr(inspect.getmodule(program), "identity", None)
    return hashlib.sha256((source if identity is None else source + identity(**options)).encode()).hexdigest()
