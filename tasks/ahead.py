"""Starts the generations of the open iteration and, if `rollout.mode` allows it, of later ones.

While iteration k trains, iteration k + 1 generates with the weights that k started with (`one_step_off`), or up to
`rollout.max_staleness` later iterations generate, each shard with the newest weights of the rollout (`async`); see
arXiv 2410.18252. New weights arrive when an iteration opens: after the trajectories in flight are complete, or in the
middle of them (`rollout.partial`, arXiv 2505.24298).

Generations of iteration j with weights of version v are j - v updates behind. They start once iteration
j - `max_staleness` is open; by then the rollout has at least that version.
"""

from __future__ import annotations

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.progress import note
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.errors import NotFinite
from ratchet.tasks.recording import recorded_task
from ratchet.tasks.restore import ensure_weights
from ratchet.tasks.runner import finish, is_given_up, start
from ratchet.tasks.stages.generate import GENERATE


def generations(driver: Driver, k: int) -> StageHandle | None:
    """Starts generating for iteration `k`, and for later iterations if the mode allows it; returns the handle of `k`.

    Returns None, and starts no later iteration, if an earlier driver gave `k` up before it had generated.
    """
    rollout, config, store = driver.rollout, driver.config, driver.store
    if is_given_up(driver, k) and store.committed_stage(k, "generate") is None:
        return None
    iterations = range(k, max(k, min(k + config.rollout.ahead, config.iterations - 1)) + 1)
    if any(store.committed_stage(j, "generate") is None for j in iterations):
        is_separate = driver.groups.executor_of("rollout") != driver.groups.executor_of("actor")
        if config.rollout.ahead or is_separate:  # otherwise the rollout shares or follows the actor's weights
            update_rollout_weights(driver, k)
    # a later iteration joins as soon as the engine has room, so that it never waits for the longest response of an
    # iteration; unless the engine generates in batches, or it is not known in advance how many prompts are drawn
    overlap = (
        config.rollout.ahead > 0 and not config.rollout.engine.in_batches and config.algorithm.dynamic_sampling is None
    )
    before: StageHandle | None = None
    for j in iterations:
        # generations that failed ahead of their iteration start again
        if j not in rollout.started or rollout.started[j].failed:
            after = None if before is None else before.all_begun if overlap else before.manifest
            lane = f" {j % (config.rollout.ahead + 1)}" if overlap else ""
            rollout.started[j] = start(driver, GENERATE, j, {}, after=after, ahead=j > k, lane=lane)
        before = rollout.started[j]
    # from here on, `finish` waits for it and raises its errors
    handle = rollout.started.pop(k)
    driver.executors.adopt(handle)
    return handle


def finish_ahead(driver: Driver, k: int) -> None:
    """Waits, with `one_step_off`, for the generations of the next iteration before new weights arrive."""
    following = driver.rollout.started.get(k + 1)
    if driver.config.rollout.mode == "one_step_off" and following is not None:
        driver.executors.adopt(following)
        try:
            finish(driver)
        except NotFinite as error:  # the next iteration handles it
            note(str(error))


@recorded_task("update_rollout_weights")
def update_rollout_weights(driver: Driver, iteration: int) -> None:
    """Gives the rollout the newest weights, with which the open iteration starts."""
    newest = driver.state.starting["actor"]
    group = driver.groups.of("rollout")
    # no shard is assigned weights, and none generates, while they change
    with driver.rollout.weights_lock.writing():
        if not group.call(Worker.has_weights, "rollout", newest):
            group.call(Worker.pause)
            ensure_weights(driver, "rollout", newest)
        if driver.config.rollout.ahead:
            driver.rollout.loaded = newest
