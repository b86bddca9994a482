"""Which group serves which role: one in the driver's process, and one for each pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from infra.store import RunStore
from infra.workers.local import LocalGroup
from infra.workers.worker import Worker
from rlhf.config import RunConfig


class Pending(Protocol):
    """A call that others may overlap."""

    def result(self) -> Any: ...


class WorkerGroup(Protocol):
    """The processes that hold the models of some roles: each is asked, and the first one's answer is given."""

    def call(self, method: str, *arguments: Any) -> Any: ...

    def submit(self, method: str, *arguments: Any) -> Pending: ...


class Groups:
    def __init__(self, config: RunConfig, store: RunStore, identity: Callable[[], str]) -> None:
        """`identity` tells models, code and data apart, for workers that outlive a driver."""
        self.config, self.store, self.identity = config, store, identity
        here = [role for role in config.roles if config.pool_of(role) is None]
        self.local = LocalGroup(Worker(config, store, here))
        self._pools: dict[str, Any] = {}
        self._lock = threading.Lock()

    def of(self, role: str | None) -> WorkerGroup:
        """The group of a role; what has no role is computed in the driver's process."""
        pool = None if role is None else self.config.pool_of(role)
        if pool is None:
            return self.local
        with self._lock:
            if pool not in self._pools:
                import torch

                from infra.workers.ray_group import RayGroup

                threads = torch.get_num_threads()
                self._pools[pool] = RayGroup(self.config, self.store.url, pool, threads, self.identity())
            group = self._pools[pool]
        group.epoch = self.store.log.epoch
        return group  # type: ignore[no-any-return]

    def lane_of(self, role: str | None) -> str:
        """Where a role computes: what has the same name computes by turns, in order."""
        if role is None:
            return "host"
        pool = self.config.pool_of(role)
        if pool is not None:
            return f"pool {pool}"
        by_turns = any(trainer.by_turns for trainer in self.config.trainers.values())
        alone = role == "rollout" and self.config.rollout.engine != "hf" and not by_turns
        return "rollout" if alone else "driver"

    def close(self) -> None:
        """End what this process started and what would not end with the driver."""
        self.local.worker.close()
