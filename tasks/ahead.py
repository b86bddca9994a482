"""Generations of an iteration, and, where `rollout.mode` lets them run ahead, of those that come after it.

While iteration k trains, iteration k + 1 generates with the weights with which k began (`one_step_off`), or up to
`rollout.max_staleness` iterations after k do, each shard with the newest weights that the rollout was given (`async`):
the trade of arXiv 2410.18252. New weights are brought when an iteration begins, between two shards, or within one
(`rollout.partial`, arXiv 2505.24298). What iteration j trains on lacks j - v updates if version v generated it: it is
started no earlier than iteration j - `max_staleness` is open, when the rollout has version j - `max_staleness` at
least.
"""

from __future__ import annotations

from infra.driver import Driver
from infra.lanes import Output
from tasks.generate import generate
from tasks.restore import restore


def generations(k: int) -> Output:
    """What iteration `k` trains on; later iterations begin to generate, if they may."""
    driver = Driver.current()
    rollout, config = driver.rollout, driver.config
    mine = [k, *range(k + 1, min(k + config.rollout.ahead, config.train.iterations - 1) + 1)]
    if config.rollout.ahead and any(driver.store.committed_stage(j, "generate") is None for j in mine):
        bring_weights(driver)
    before = None  # whose prompts come first
    for j in mine:
        if j not in rollout.begun or rollout.begun[j].failed:
            rollout.begun[j] = generate(j, after=before, ahead=j > k and config.rollout.mode == "async")
        before = rollout.begun[j]
    output = rollout.begun.pop(k)
    driver.lanes.adopt(output)
    return output


def bring_weights(driver: Driver) -> None:
    """Give the rollout what the open iteration began with: the newest weights that there are."""
    newest = driver.state.starting["actor"]
    with driver.rollout.turn:
        if not driver.groups.of("rollout").call("holds", "rollout", newest):
            restore(driver, "rollout", newest)
        driver.rollout.holds = newest
