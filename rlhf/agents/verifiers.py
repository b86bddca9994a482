"""`rollout.environment: verifiers:NAME`: environments of the package verifiers, whose rubrics give the reward.

The environment calls the policy through the endpoint, as it calls any model. A row of the run's dataset is its input:
export an environment's own dataset with ``verifiers.load_environment(NAME).get_dataset().to_parquet(FILE)``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import signal
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from ratchet.rlhf.errors import UserError

KEY = "rollout.environment"
PREFIX = "verifiers:"


class RolloutFailed(Exception):
    """The environment reported an error."""


def identity(environment: str, arguments: Mapping[str, Any]) -> str:
    """Returns the program's dependencies beyond its own code: the environment's module, and the package's version."""
    return f"{version('verifiers')} {json.dumps(arguments, sort_keys=True)} {inspect.getsource(_module(environment))}"


async def run(
    task: Mapping[str, Any], base_url: str, api_key: str, model: str, environment: str, arguments: Mapping[str, Any]
) -> dict[str, float]:
    """Runs the environment with the policy; returns the rubric's reward, and the value of each of its functions.

    Raises:
        RolloutFailed: the environment reports an error.
    """
    extra = task["extra_info"]
    row = {
        "prompt": task["messages"],
        "answer": task["ground_truth"] or "",
        "info": extra.get("info") or {},
        "example_id": extra.get("example_id") or 0,
        "task": extra.get("task") or environment,
    }
    client = _client().with_options(base_url=base_url, api_key=api_key)
    loaded = _environment(environment, json.dumps(arguments, sort_keys=True))
    output = await loaded.run_rollout(row, client, model, {})
    if output["error"]:
        raise RolloutFailed(str(output["error"]))
    metrics = {name: value for name, value in output["metrics"].items() if name not in ("reward", "score")}
    return {"reward": output["reward"], **metrics}


@cache
def _client() -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=None)  # copies share its connections


@cache
def _environment(name: str, arguments: str) -> Any:
    import verifiers
    from verifiers.envs import environment

    # it would install signal handlers, which works in the main thread only, and replace those that stop a run
    environment.signal = _NoSignals()
    return verifiers.load_environment(name, **json.loads(arguments))


class _NoSignals:
    """Stands in for the module signal, and leaves the process's handlers as they are."""

    SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM
    default_int_handler = staticmethod(signal.default_int_handler)

    def signal(self, number: int, handler: object) -> None:
        pass


def _module(name: str) -> Any:
    """Imports the module of an environment. Raises UserError if it, or the package, is not installed."""
    try:
        importlib.import_module("verifiers")
        return importlib.import_module(name.replace("-", "_").split("/")[-1])
    except ImportError as error:
        raise UserError(
            f"{KEY} {PREFIX}{name}: {error}; install verifiers (extra verifiers) and the environment's package"
        ) from None
