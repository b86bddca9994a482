"""Generations of an iteration, and, where `rollout.mode` lets them run ahead, of those that come after it.

While iteration k trains, iteration k + 1 generates with the weights with which k began (`one_step_off`), or up to
`rollout.max_staleness` iterations after k do, each shard with the newest weights that the rollout was given (`async`):
the trade of arXiv 2410.18252. New weights are brought when an iteration begins, between two shards, or within one
(`rollout.partial`, arXiv 2505.24298). What iteration j trains on lacks j - v updates if version v generated it: it is
started no earlier than iteration j - `max_staleness` is open, when the rollout has version j - `max_staleness` at
least.
"""

from __future__ import annotations

from infra.execution.driver import Driver
from infra.execution.executors import StageHandle
from infra.progress import note
from rlhf.errors import NotFinite
from tasks.generate import GENERATE
from tasks.recording import recorded_task
from tasks.restore import ensure_weights
from tasks.runner import finish, is_given_up, start


def generations(driver: Driver, k: int) -> StageHandle | None:
    """What iteration `k` trains on; later iterations begin to generate, if they may. None: it was given up before it
    had generated, and so do those that come after it not."""
    rollout, config, store = driver.rollout, driver.config, driver.store
    if is_given_up(driver, k) and store.committed_stage(k, "generate") is None:
        return None
    mine = range(k, max(k, min(k + config.rollout.ahead, config.train.iterations - 1)) + 1)
    if any(store.committed_stage(j, "generate") is None for j in mine):
        apart = driver.groups.executor_of("rollout") != driver.groups.executor_of("actor")
        if config.rollout.ahead or apart:  # else they are the actor's own, or follow them
            bring_weights(driver, k)
    before = None  # whose prompts come first
    for j in mine:
        if j not in rollout.begun or rollout.begun[j].failed:
            rollout.begun[j] = start(driver, GENERATE, j, {}, after=before, ahead=j > k)
        before = rollout.begun[j]
    handle = rollout.begun.pop(k)
    driver.executors.adopt(handle)
    return handle


def finish_ahead(driver: Driver, k: int) -> None:
    """With `one_step_off`, wait for what the next iteration trains on, before new weights can come."""
    following = driver.rollout.begun.get(k + 1)
    if driver.config.rollout.mode == "one_step_off" and following is not None:
        driver.executors.adopt(following)
        try:
            finish(driver)
        except NotFinite as error:  # which is the next iteration's affair
            note(str(error))


@recorded_task("bring_weights")
def bring_weights(driver: Driver, iteration: int) -> None:
    """Give the rollout what the open iteration begins with: the newest weights that there are."""
    newest = driver.state.starting["actor"]
    with driver.rollout.turn:
        ensure_weights(driver, "rollout", newest)
        if driver.config.rollout.ahead:
            driver.rollout.holds = newest
