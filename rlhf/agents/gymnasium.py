"""`rollout.environment: gymnasium:ID`: text environments of the package gymnasium.

Observations and actions are texts (`gymnasium.spaces.Text`). The observation follows the prompt of the dataset's row,
the policy's answer is the action, and the reward is the sum over the episode. `extra_info.seed` seeds the environment.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from ratchet.rlhf.errors import UserError

KEY = "rollout.environment"
PREFIX = "gymnasium:"


def identity(environment: str, arguments: Mapping[str, Any]) -> str:
    """Returns the program's dependencies beyond its own code: the environment's module."""
    module = inspect.getmodule(type(_made(environment, arguments).unwrapped))
    assert module is not None
    return f"{json.dumps(arguments, sort_keys=True)} {inspect.getsource(module)}"


def run(
    task: Mapping[str, Any], base_url: str, api_key: str, model: str, environment: str, arguments: Mapping[str, Any]
) -> float:
    """Plays one episode; returns the sum of its rewards.

    ``module:ID`` as `environment` imports the module that registers it.
    """
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"}
    played = _made(environment, arguments)
    try:
        observation, _ = played.reset(seed=task["extra_info"].get("seed"))
        *before, last = task["messages"]
        messages: list[dict[str, Any]] = [*before, {**last, "content": f"{last['content']}\n{observation}"}]
        total, ended = 0.0, False
        while not ended:
            body = {"model": model, "messages": messages}
            answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=None)
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
            observation, reward, terminated, truncated, _ = played.step(message["content"])
            total, ended = total + float(reward), terminated or truncated
            messages += [message, {"role": "user", "content": str(observation)}]
        return total
    finally:
        played.close()


def _made(environment: str, arguments: Mapping[str, Any]) -> Any:
    """Builds an environment. Raises UserError if there is none, or its spaces are not texts."""
    try:
        gymnasium = importlib.import_module("gymnasium")
        made = gymnasium.make(environment, disable_env_checker=True, **arguments)
    except Exception as error:  # an environment's module may raise anything
        raise UserError(f"{KEY} {PREFIX}{environment}: {error}; is it installed (extra gymnasium)?") from None
    for space in (made.observation_space, made.action_space):
        if not isinstance(space, gymnasium.spaces.Text):
            raise UserError(f"{KEY} {PREFIX}{environment} has the space {space}: only gymnasium.spaces.Text is a text")
    return made
