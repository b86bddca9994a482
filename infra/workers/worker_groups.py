"""The worker groups of a driver: one in the driver's process, and one per pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from ratchet.infra.store.records import Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.calls import Pending, ShardKey
from ratchet.infra.workers.local import LocalGroup
from ratchet.infra.workers.rollouts import Generated
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.config import RunConfig

if TYPE_CHECKING:
    from ratchet.infra.workers.ray_group import RayGroup

P = ParamSpec("P")
R = TypeVar("R")


class WorkerGroup(Protocol):
    """The processes that hold the models of some roles. A call runs a method of `Worker` in each process and returns
    the first process's answer; `submit` does not wait for it."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        ...

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...

    def submit(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]: ...

    def replicas(self) -> Sequence[Replica]:
        """Returns the units that generate independently: processes, or rollout teams."""
        ...


class Replica(Protocol):
    """One process of a group, or a rollout team, whose calls go to its first process."""

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...

    def submit(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]: ...

    def generate(
        self, weights: Weights, submitted: Sequence[tuple[ShardKey, Sequence[str]]], wait_s: float
    ) -> list[Generated]:
        """See `Worker.generate`."""
        ...

    def handed(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Calls a method and leaves its result where it is, to be passed to a call of another replica."""
        ...


class WorkerGroups:
    """The worker groups of all roles; pools start on first use."""

    def __init__(
        self, config: RunConfig, store: RunStore, identity: Callable[[], str], roles: Iterable[str] | None = None
    ) -> None:
        """Makes the groups.

        Args:
            identity: identifies models, code and data: a driver reuses only matching workers of an earlier one.
            roles: those of this process; None: those without a pool.
        """
        self.config, self.store, self.identity = config, store, identity
        local_roles = [role for role in config.roles if config.pool_of(role) is None] if roles is None else roles
        self.local = LocalGroup(Worker(config, store, local_roles))
        self._pools: dict[str, RayGroup] = {}
        self._lock = threading.Lock()

    def of(self, role: str | None) -> WorkerGroup:
        """Returns the group of a role; stages without a role (None) use the driver's process."""
        pool = None if role is None else self.config.pool_of(role)
        if pool is None:
            return self.local
        with self._lock:
            if pool not in self._pools:
                import torch

                from ratchet.infra.workers.ray_group import RayGroup

                threads = torch.get_num_threads()
                self._pools[pool] = RayGroup(self.config, self.store.url, pool, threads, self.identity())
            group = self._pools[pool]
        group.term = self.store.log.term
        return group

    def executor_of(self, role: str | None) -> str:
        """Returns the name of the executor on which a role's stages run, one at a time."""
        if role is None:
            return "host"
        pool = self.config.pool_of(role)
        if pool is not None:
            return f"pool {pool}"
        offload_when_idle = any(trainer.offload_when_idle for trainer in self.config.trainers.values())
        # with `offload_when_idle` models take turns on the devices, so even a rollout in a process of its own must wait
        # for its turn
        has_own_process = role == "rollout" and self.config.rollout.engine.own_process and not offload_when_idle
        return "rollout" if has_own_process else "driver"

    def close(self) -> None:
        """Ends the processes of the local worker, which would outlive the driver."""
        self.local.worker.close()
