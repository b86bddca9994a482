"""Builds the calls of stages to workers, and restores the weights that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.store.records import RunState, Weights
from ratchet.infra.workers.calls import C, Call, S
from ratchet.infra.workers.held_weights import WrongPolicyVersion
from ratchet.infra.workers.ray_group import GroupLost
from ratchet.tasks.fingerprints import weights_for
from ratchet.tasks.restore import ensure_weights, followed
from ratchet.tasks.stage import RowsStage, UpdateStage

R = TypeVar("R")
TRIES = 3
"""Attempts to call a worker. Between restoring the weights and the call, another executor may load others."""

Handles = Mapping[str, StageHandle]
"""Handles of stages, by stage name."""


def on_worker(driver: Driver, needs: Mapping[str, Weights], call: Callable[[], R]) -> R:
    """Calls the workers of a role, after restoring the weights in `needs` that they do not hold.

    Raises `GroupLost` if the workers died, or did not keep the weights in `TRIES` attempts.
    """
    for _ in range(TRIES):
        try:
            return call()
        except GroupLost:
            driver.store.log.check_claim()  # a driver that took the run over may have ended the workers: raises Fenced
            raise
        except WrongPolicyVersion:
            for role, weights in needs.items():
                ensure_weights(driver, role, weights)
    versions = ", ".join(f"the {role}'s weights of version {weights.version}" for role, weights in needs.items())
    raise GroupLost(f"the workers do not keep {versions}")


def call_of(
    driver: Driver,
    stage: RowsStage[C, S] | UpdateStage[C],
    iteration: int,
    inputs: Handles,
    *,
    shard: int = 0,
    attempt: int = 0,
    config: C | None = None,
    began: RunState | None = None,
) -> Call[C]:
    """Builds the call that a worker receives.

    Args:
        shard: Index of the shard; 0 for an update.
        attempt: Number that distinguishes the files of this attempt.
        config: Config of the stage; None: from the run's config.
        began: State in which the iteration started, to recompute it; None: the driver's state.
    """
    state = driver.state if began is None else began
    # a recomputation starts from nothing, not from the tokens that a driver journaled
    journals = driver.store.journals(iteration, stage.name) if began is None else []
    config = stage.config.of(driver.config) if config is None else config
    cursor = state.cursor_before(iteration, driver.config.data.prompts_per_iteration)
    draws, replays = (stage.draws, stage.replays) if isinstance(stage, RowsStage) else (None, None)
    return Call(
        term=driver.term,
        stage=stage.name,
        iteration=iteration,
        shard=shard,
        attempt=attempt,
        config=config,
        inputs=stage.inputs(inputs, shard),
        role=stage.role,
        weights=weights_for(driver, stage, iteration, shard),
        follows=followed(driver, stage, iteration) if isinstance(stage, UpdateStage) else {},
        cursor=cursor,
        drawn=None if draws is None else draws(driver, iteration, shard, config, cursor),
        replayed={} if replays is None else replays(driver, iteration, shard, config),
        controllers=dict(state.controllers),
        journal=tuple(part for journal in journals for part in journal.parts),
    )
