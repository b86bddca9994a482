"""`rollout.environment: verifiers:NAME`: plays tasksets of the package verifiers (its API v1) in this process.

A taskset's tasks, rewards, metrics, stops and tool servers are verifiers' own, and so is its server that records the
conversation. Only the program that talks to the policy is ours (`verifiers_harness`): verifiers starts one as a process
for each trajectory, which takes seconds. A row of the dataset has a whole task: `ratchet data verifiers` writes them.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from ratchet.rlhf.errors import UserError, in_one_line
from ratchet.rlhf.schema import MESSAGES

KEY = "rollout.environment"
PREFIX = "verifiers:"
COLUMN = "verifiers"
"""The field of `extra_info` that has a task as JSON."""
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "reward_model": pa.struct({"ground_truth": pa.string()}),
        "extra_info": pa.struct({"index": pa.int64(), COLUMN: pa.string()}),
    }
)
HARNESS = "ratchet_chat"
OWN = ("harness", "runtime", "model", "client", "sampling")
"""Settings of an agent of verifiers that the run decides."""


class RolloutFailed(Exception):
    """The environment reported an error."""


def identity(environment: str, arguments: Mapping[str, Any]) -> str:
    """Returns the program's dependencies beyond its own code: the taskset's modules, and the package's version."""
    _loaded(environment, arguments)
    path = Path(str(importlib.import_module(module_of(environment)).__file__))
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return f"{version('verifiers')} {json.dumps(arguments, sort_keys=True)} {digest}"


async def run(
    task: Mapping[str, Any], base_url: str, api_key: str, model: str, environment: str, arguments: Mapping[str, Any]
) -> dict[str, float]:
    """Plays a task with the policy; returns the taskset's reward, and the value of each of its rewards and metrics.

    Raises:
        RolloutFailed: the taskset reports an error.
        UserError: the row has no task of the taskset.
    """
    from verifiers import v1

    from ratchet.rlhf.agents.verifiers_harness import API_KEY

    loaded = _loaded(environment, arguments)
    API_KEY.set(api_key)  # of this trajectory's asyncio task
    # a client is shared by the trajectories with an equal config, so the key, which differs, is not in it
    client = v1.EvalClientConfig(base_url=base_url, api_key_var="RATCHET_HAS_NO_SUCH_KEY")
    async with loaded.serving():
        played = loaded.task(task["extra_info"])
        episode = await loaded.environment.run_episode(played, v1.ModelContext(model=model, client=client))
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if errors:
        raise RolloutFailed(in_one_line(f"{errors[0].type}: {errors[0].message}"))
    if len(episode.traces) != 1:
        raise RolloutFailed(f"{PREFIX}{environment} played {len(episode.traces)} conversations for one trajectory")
    [trace] = episode.traces
    parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    parts |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward} | {name: value for name, value in parts.items() if name not in ("reward", "score")}


def prompts(environment: str, arguments: Mapping[str, Any], size: int | None) -> pa.Table:
    """Returns a taskset's tasks as a dataset.

    Args:
        environment: the name of the taskset.
        arguments: `rollout.environment.options`.
        size: largest number of tasks; None: all.

    Raises:
        UserError: the taskset cannot be played, or ends never and `size` is None.
    """
    loaded = _loaded(environment, arguments)
    if size is None and not loaded.environment.taskset.bounded:
        raise UserError(f"{PREFIX}{environment} has tasks without end: choose a number with --size")
    rows = [loaded.row(task) for task in islice(loaded.environment.taskset, size)]
    if not rows:
        raise UserError(f"{PREFIX}{environment} has no tasks")
    return pa.Table.from_pylist(rows, SCHEMA)


def module_of(environment: str) -> str:
    """Returns the module that verifiers imports for the name of a taskset that it does not bring itself."""
    return environment.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


class _Loaded:
    """An environment of verifiers with one agent, which is the policy."""

    def __init__(self, name: str, environment: Any) -> None:
        self.name, self.environment = name, environment
        self._kind = type(environment.taskset).task_type()
        self._data = self._kind.data_type()
        self._users, self._stack, self._lock = 0, AsyncExitStack(), asyncio.Lock()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keeps the server that records conversations, and the taskset's tools, while trajectories are played."""
        async with self._lock:
            if self._users == 0:
                await self._stack.enter_async_context(self.environment.serving())
            self._users += 1
        try:
            yield
        finally:
            async with self._lock:
                self._users -= 1
                if self._users == 0:
                    await self._stack.aclose()

    def task(self, extra: Mapping[str, Any]) -> Any:
        """Returns the task in a row's `extra_info`; raises UserError if there is none."""
        if not isinstance(stored := extra.get(COLUMN), str):
            raise UserError(
                f"{KEY} {PREFIX}{self.name}: a row of data.train has no extra_info.{COLUMN}: write the dataset with "
                f"`ratchet data verifiers {self.name} FILE.parquet`"
            )
        try:
            data = self._data.model_validate_json(stored)
        except ValueError as error:
            raise UserError(
                f"{KEY} {PREFIX}{self.name}: extra_info.{COLUMN} of a row is no task of it: {in_one_line(error)}"
            ) from None
        return self._kind(data, self.environment.config.taskset.task)

    def row(self, task: Any) -> dict[str, object]:
        """Returns a task as a row; raises UserError if it cannot be stored, or played here."""
        where = f"{PREFIX}{self.name}: task {task.data.idx}"
        stored = task.data.model_dump_json()
        if self._data.model_validate_json(stored) != task.data:
            raise UserError(f"{where} is another one after it was stored as JSON: give its fields types that JSON has")
        if task.data.image is not None:
            raise UserError(f"{where} needs the image {task.data.image}: only tasks without containers are played here")
        system, prompt = task.data.system_prompt, task.data.prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        for message in [] if prompt is None or isinstance(prompt, str) else prompt:
            if not isinstance(message.content, str):
                raise UserError(f"{where} has a message that is not a text: only texts are played here")
            messages.append({"role": message.role, "content": message.content})
        if prompt is None:  # the environment begins
            messages.append({"role": "user", "content": task.data.description or task.data.name or ""})
        answer = getattr(task.data, "answer", None)
        return {
            "data_source": f"{PREFIX}{self.name}",
            "prompt": messages,
            "reward_model": {"ground_truth": "" if answer is None else str(answer)},
            "extra_info": {"index": task.data.idx, COLUMN: stored},
        }


def _loaded(name: str, arguments: Mapping[str, Any]) -> _Loaded:
    return _load(name, json.dumps(arguments, sort_keys=True))


@cache
def _load(name: str, arguments: str) -> _Loaded:
    """Loads an environment. Raises UserError if there is none, or it cannot be played here."""
    where = f"{KEY} {PREFIX}{name}"
    try:
        importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise UserError(f"{where}: {error}; install verifiers 0.4 or later (extra verifiers)") from None
    try:
        return _Loaded(name, _environment(where, name, json.loads(arguments)))
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(f"{where}: {in_one_line(error)}; install the package of the taskset") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["options", *map(str, first["loc"])])
        raise UserError(f"{where}: {key}: {in_one_line(first['msg'])}") from None
    except Exception as error:  # a taskset's module may raise anything
        raise UserError(f"{where}: {in_one_line(error)}") from None


def _environment(where: str, name: str, settings: dict[str, Any]) -> Any:
    from verifiers import v1
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import environment_class, resolve_env_config

    from ratchet.rlhf.agents import verifiers_harness

    # it warns of each conversation that reaches a limit of the run
    logging.getLogger("verifiers").setLevel(logging.ERROR)
    # verifiers finds harnesses by the name of a module in this package
    sys.modules[f"verifiers.v1.harnesses.{HARNESS}"] = verifiers_harness
    config = resolve_env_config({**settings, "taskset": {**settings.get("taskset", {}), "id": name}})
    agents = agent_config_fields(config)
    if len(agents) != 1:
        raise UserError(
            f"{where} has {len(agents)} agents ({', '.join(agents)}): the policy is the only one here; choose an "
            "environment with one agent"
        )
    [(seat, agent)] = agents.items()
    given = settings.get(seat, {})
    if chosen := [key for key in OWN if key in given]:
        raise UserError(f"{where}: options.{seat}.{chosen[0]} is decided by the run: remove it")
    kind = environment_class(name, config.id)
    harness = agent.harness or v1.default_agent_harness(name)
    if harness.id not in ("bash", "null"):  # `bash` is what verifiers takes if none is named
        raise UserError(f"{where} brings the harness {harness.id}, a program around the policy: write a rollout.agent")
    own = {"harness": verifiers_harness.ChatHarnessConfig(id=HARNESS), "runtime": v1.SubprocessConfig()}
    environment = kind(config.model_copy(update={seat: agent.model_copy(update=own)}))
    if type(environment.taskset).task_type().NEEDS_CONTAINER:
        raise UserError(f"{where} needs a container for each task: only tasks without containers are played here")
    return environment
