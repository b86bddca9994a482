"""Shares a stage's shards between the processes that generate them: the driver, and rollout workers.

A process leases shards in a record before it generates them. It leaves alone what another live process has leased, and
takes over what a dead one has. Two processes may still generate the same shard, such as after a long pause of one of
them; the first to commit it wins.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection

from ratchet.infra.execution.driver import Driver
from ratchet.infra.store.log import Late
from ratchet.infra.store.records import Lease, ShardCommit

PATIENCE_S = 120.0
"""Seconds after which a process that waits for the shards of others generates one of them, too."""


class Leases:
    """The shards of a stage of the open iteration."""

    def __init__(self, driver: Driver, stage: str, iteration: int, total: int) -> None:
        self._driver, self._stage, self._iteration, self._total = driver, stage, iteration, total
        self._committed, self._progress = 0, time.monotonic()
        """Number of committed shards, and when it changed last."""

    def committed(self) -> dict[int, ShardCommit] | None:
        """Reads the log; returns the committed shards, or None if the stage is over."""
        store = self._driver.store
        store.log.check_claim()
        state = store.state
        if state.iteration != self._iteration or self._stage in state.stages:
            return None
        committed = dict(state.shards.get(self._stage, {}))
        if len(committed) != self._committed:
            self._committed, self._progress = len(committed), time.monotonic()
        return committed

    def take(self, beside: Collection[int], room: int) -> list[int]:
        """Leases shards, and returns them: at most `room`, and at most a fair share of those that nobody works on. If
        others have all, and commit none of them for `PATIENCE_S`, it is one of theirs.

        Args:
            beside: committed shards, and those that this process generates.
        """
        store = self._driver.store
        alive, me = self._driver.neighbours.alive(), store.log.worker
        holders = dict(store.state.leases.get(self._stage, {}))  # other threads of a driver append, too
        left = [shard for shard in range(self._total) if shard not in beside]
        free = [shard for shard in left if shard not in holders or holders[shard] == me or holders[shard] not in alive]
        share = -(-len(free) // len(alive | {me}))
        chosen = tuple(free[: min(room, share)])
        if not chosen and left and time.monotonic() - self._progress >= PATIENCE_S:
            # not all the same one
            chosen, self._progress = (random.choice(left),), time.monotonic()
        if not chosen:
            return []
        try:
            store.commit(Lease(iteration=self._iteration, stage=self._stage, shards=chosen, worker=me))
        except Late:  # another process was first to append a record: it may have leased the same shards
            return []
        return list(chosen)
