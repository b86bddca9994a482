"""Which group serves which role: one in the driver's process, and one for each pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from infra.store.run_store import RunStore
from infra.workers.local import LocalGroup
from infra.workers.worker import Worker
from rlhf.config import RunConfig

if TYPE_CHECKING:
    from infra.workers.ray_group import RayGroup

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Pending(Protocol[R_co]):
    """A call that others may overlap."""

    def result(self) -> R_co: ...


class WorkerGroup(Protocol):
    """The processes that hold the models of some roles: a method of `Worker` is called in each, and the first one's
    answer is given."""

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...

    def submit(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]: ...


class WorkerGroups:
    def __init__(self, config: RunConfig, store: RunStore, identity: Callable[[], str]) -> None:
        """`identity` tells models, code and data apart, for workers that outlive a driver."""
        self.config, self.store, self.identity = config, store, identity
        here = [role for role in config.roles if config.pool_of(role) is None]
        self.local = LocalGroup(Worker(config, store, here))
        self._pools: dict[str, RayGroup] = {}
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
        group.term = self.store.log.term
        return group

    def executor_of(self, role: str | None) -> str:
        """Where a role computes: what has the same name computes by turns, in order."""
        if role is None:
            return "host"
        pool = self.config.pool_of(role)
        if pool is not None:
            return f"pool {pool}"
        offload_when_idle = any(trainer.offload_when_idle for trainer in self.config.trainers.values())
        alone = role == "rollout" and self.config.rollout.engine != "hf" and not offload_when_idle
        return "rollout" if alone else "driver"

    def close(self) -> None:
        """End what this process started and what would not end with the driver."""
        self.local.worker.close()
