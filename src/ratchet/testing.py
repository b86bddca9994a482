"""Checks for the tests of your own losses, advantages, stages, environments and agents.

>>> from ratchet.testing import check_loss
>>> check_loss(MyLoss(beta=0.2))

Each check raises `UserError` with what is wrong and how to fix it. `ratchet train` checks losses and advantages in the
same way, with fewer examples, before it starts.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence

import pandas as pd

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.runs.run import Run
from ratchet.infra.workers.calls import C, RowsCall, S
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.agents.checks import check_agent
from ratchet.rlhf.algorithms.checks import check_advantage, check_loss
from ratchet.rlhf.environments import environment
from ratchet.rlhf.environments.environment import DurableEnvironment, Environment, Observation
from ratchet.rlhf.errors import UserError
from ratchet.tasks.pipeline import STAGES
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.user_stages import check_fits
from ratchet.tasks.worker_calls import call_of

__all__ = ["check_advantage", "check_agent", "check_environment", "check_loss", "check_stage"]


def check_stage(stage: RowsStage[C, S], run: Run, iteration: int = 0) -> pd.DataFrame:
    """Computes a stage twice from what a run has committed. Writes nothing.

    The stage reads stages and columns that exist. It returns the columns that it declares, one row per trajectory, and
    the same values each time.

    Args:
        run: a run whose iteration has committed the stages that this one reads.

    Returns:
        The stage's columns, a row per trajectory.

    Raises:
        UserError: what does not hold.
    """
    if mistakes := check_fits(stage, STAGES):
        raise UserError("\n".join(f"the stage {stage.name} {mistake}" for mistake in mistakes))
    manifests = run.store.manifests(iteration)
    inputs = {name: StageHandle.of(manifests[name]) for name in stage.reads if name in manifests}
    if not inputs:
        raise UserError(f"iteration {iteration} of {run.store.url} has committed no stage that {stage.name} reads")
    driver = Driver(run.config.as_committed({"pools": {}, "placement": "colocated"}), run.store)
    shards = len(next(iter(inputs.values())).manifest().shards) if stage.sharded else 1
    tables = []
    for shard in range(shards):
        rows = RowsCall(call_of(driver, stage, iteration, inputs, shard=shard), stage.compute, stage.writes)
        (once, _), (again, _) = (driver.groups.local.call(Worker.computed, [rows]) for _ in range(2))
        if once[0].batch.table != again[0].batch.table or once[0].summary != again[0].summary:
            raise UserError(
                f"the stage {stage.name} computes other values of shard {shard} the second time, so it could not be "
                "reproduced: draw random numbers from ratchet.rlhf.seeding.generator"
            )
        tables.append(once[0].batch.table.to_pandas())
    frame: pd.DataFrame = pd.concat(tables, ignore_index=True)
    return frame


def check_environment(
    name: str, turns: Sequence[str], prompt: Mapping[str, object] | None = None, **options: object
) -> list[Observation]:
    """Plays an environment with the same turns three times, two of them at once.

    It has the methods of `Environment` or `DurableEnvironment`. Its observations have the right types and are the same
    each time, so no state is shared between trajectories. A durable one is restored from its snapshot after each turn.

    Args:
        name: ``package.module:Class`` or ``file.py:Class``, as in `rollout.environment`.
        turns: what the policy writes, turn by turn.
        prompt: `messages`, `ground_truth` and `extra_info` of the prompt.
        options: `rollout.environment.options`.

    Returns:
        The observations, up to the one that ends the trajectory.

    Raises:
        UserError: what does not hold.
    """
    environment.check_environment(name, options)
    make = environment.load_environment(name)
    given = {"messages": [], "ground_truth": None, "extra_info": {}, **(prompt or {})}

    def started() -> Environment | DurableEnvironment:
        played = make(**options)
        _awaited(played.reset(given["messages"], given["ground_truth"], given["extra_info"]))  # type: ignore[arg-type]
        return played

    def answer(number: int, player: int) -> object:
        """Lets one of the environments answer a turn."""
        played, turn = environments[player], turns[number]
        if not isinstance(played, DurableEnvironment):
            return _awaited(played.step(turn))
        observation = _awaited(played.step(turn, f"{player}/{number}"))
        state = _awaited(played.snapshot())
        if not isinstance(state, str):
            raise UserError(f"{name}: snapshot() returned {state!r}: return a text")
        restored = make(**options)
        assert isinstance(restored, DurableEnvironment)
        _awaited(restored.restore(state))  # type: ignore[func-returns-value]
        environments[player] = restored
        return observation

    environments = [started(), started(), started()]
    observations: list[Observation] = []
    for number, turn in enumerate(turns):
        observation = answer(number, 0)
        if not isinstance(observation, Observation):
            raise UserError(f"{name}: step({turn!r}) returned {observation!r}: return Observation(content, reward)")
        if not isinstance(observation.content, str | list | tuple | None):
            raise UserError(f"{name}: the content of {observation!r} should be a text, messages, or None at the end")
        observations.append(observation)
        if observation.content is None:
            break
    for number, (turn, expected) in enumerate(zip(turns, observations, strict=False)):
        for player in (1, 2):
            if (differs := answer(number, player)) != expected:
                raise UserError(
                    f"{name}: step({turn!r}) returned {expected!r} once and {differs!r} another time: keep state in the "
                    "object, not in the class or the module, and draw nothing at random"
                )
    return observations


def _awaited(result: object) -> object:
    """Returns the result of a method that may be `async`."""

    async def awaited() -> object:
        return await result if inspect.isawaitable(result) else result

    return asyncio.run(awaited())
