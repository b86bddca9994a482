"""A pool on Ray: processes with devices of their own, which hold the models of some roles between them.

The processes are Ray actors, gang-scheduled by a placement group; among themselves they talk through torch.distributed.
Only references pass through Ray: each process reads from the store what a stage reads, and rank 0 writes.
On a Ray that outlives the driver they are detached and named: the next driver of the run finds them, models loaded.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from infra.progress import note
from infra.store.log import Fenced
from infra.store.object_store import ObjectStore
from infra.store.records import sha256_of
from infra.store.run_store import RunStore
from infra.workers.worker import Worker, WrongPolicyVersion
from rlhf.config import PoolConfig, RunConfig
from rlhf.errors import RatchetError, UserError

P = ParamSpec("P")
R = TypeVar("R")
NAMESPACE = "ratchet"
PATIENCE_S = 60.0
"""A process that does not say that it is alive for so long is taken for dead."""
GRACE_S = 10.0
"""Where one process of a group has failed, the others have so long to say what came of it for them."""
START_S = 600.0
OPERATIONAL = {"train", "checkpoint", "validation", "tracking"}
"""Sections of the config that loaded models do not depend on."""


class GroupLost(RatchetError):
    """A process of a worker group died. The group begins anew with the next call, which loads what is committed."""


class RayWorker:
    """One process of a pool."""

    def __init__(
        self, config: RunConfig, url: str, roles: Sequence[str], rank: int, threads: int, identity: str
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each process its own devices only
        self.config, self.rank, self.identity = config, rank, identity
        self.ranks = 0
        self.worker = Worker(config, RunStore(ObjectStore(url)), roles)
        self.busy = 0
        self.last = time.monotonic()
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def alive(self) -> bool:
        return True

    def meeting_point(self) -> str:
        """Where the ranks may meet: this machine's address, and a port that is free."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, count: int, meeting: str) -> None:
        from rlhf.engines import ranks

        if count > 1:
            ranks.join(self.rank, count, meeting)
        self.ranks = ranks.count()

    def serves(self) -> tuple[str, int]:
        """Which models, code and data, and among how many ranks; none before they have met."""
        return self.identity, self.ranks

    def do(self, term: int, call: partial[Any]) -> tuple[bool, Any]:
        """Whether it went well, and the result, or an error that the driver knows what to do with."""
        self.busy += 1
        try:
            self.worker.admit(term)
            self.worker.store.write_as(term)
            return True, call.func(self.worker, *call.args, **call.keywords)
        except (RatchetError, WrongPolicyVersion) as error:
            return False, error
        finally:
            self.busy -= 1
            self.last = time.monotonic()

    def _end_when_idle(self) -> None:
        limit = 60 * self.config.pools[self.config.pool_of(next(iter(self.worker.roles))) or ""].idle_minutes
        while self.busy or time.monotonic() - self.last < limit:
            time.sleep(min(limit / 4, 10))
        import ray

        ray.util.remove_placement_group(ray.util.get_current_placement_group())  # the other ranks end with it


@dataclass(frozen=True)
class Answer(Generic[R]):
    """What a call will have given."""

    group: RayGroup
    method: Callable[..., R]
    actors: list[Any]
    pending: list[Any]

    def result(self) -> R:
        return self.group.await_answers(self.method, self.actors, self.pending)


class RayGroup:
    def __init__(self, config: RunConfig, url: str, pool: str, threads: int, identity: str) -> None:
        """`identity`: what loaded models, code and data are, besides the config; who serves others is ended."""
        self.config, self.name, self.threads = config, pool, threads
        self.url = f"file://{Path(url.removeprefix('file://')).resolve()}" if url.startswith("file://") else url
        self.identity = sha256_of(f"{identity}\n{_engines_of(config)}".encode())
        self.pool: PoolConfig = config.pools[pool]
        self.roles = [role for role in config.roles if config.pool_of(role) == pool]
        self.term = 0
        self._actors: list[Any] = []
        self._lock = threading.RLock()

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What rank 0 answers. Raises what the worker raised, or `GroupLost`."""
        return self.submit(method, *args, **kwargs).result()

    def submit(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> Answer[R]:
        """Ask all processes, which answer in the order in which they are asked."""
        call = partial(method, *args, **kwargs)  # type: ignore[arg-type]  # the worker comes first, over there
        with self._lock:  # or two threads could ask two ranks in different orders, which then wait for each other
            actors = self._ready()
            return Answer(self, method, actors, [_asked(actor, self.term, call) for actor in actors])

    def await_answers(self, method: Callable[..., R], actors: list[Any], pending: list[Any]) -> R:
        import ray

        try:
            answers = self._patiently(actors, pending)
        except ray.exceptions.RayError as error:
            mistake = isinstance(error, ray.exceptions.RayTaskError) and self._all_alive(actors)
            self._end_those(actors)  # those that are left may wait for the one that failed
            if mistake:
                raise
            raise GroupLost(f"a process of pool {self.name} died during {method.__name__}: it restarts") from error
        for good, answer in answers:
            if not good:
                raise answer
        results: list[R] = [answer for _, answer in answers]
        if method in (Worker.has_weights, Worker.is_saved):  # ranks that disagree hold nothing
            return next((result for result in results if not result), results[0])
        return results[0]

    def _end_those(self, actors: list[Any]) -> None:
        with self._lock:  # unless another call has done so, and new ones have begun
            if self._actors is actors:
                self.end()

    def end(self) -> None:
        """End the processes; the next call starts new ones."""
        import ray

        self._actors = []
        with suppress(ValueError):  # there is none
            ray.util.remove_placement_group(ray.util.get_placement_group(self._place))
        deadline = time.monotonic() + 30
        while self._named() and time.monotonic() < deadline:  # until they are gone, their names are taken
            time.sleep(0.1)

    def _patiently(self, actors: list[Any], pending: list[Any]) -> list[Any]:
        """The answers, however long they take, as long as every process says that it is alive.

        Where one has failed, others may wait for it in a collective, in vain: after a moment the group is ended, and
        the error stands for all.
        """
        import ray

        left = pending
        while left:
            ready, left = ray.wait(left, timeout=PATIENCE_S / 4)
            failed = [answer for answer in ray.get(ready) if not answer[0]]
            if failed and left:
                _, left = ray.wait(left, num_returns=len(left), timeout=GRACE_S)
                if left:
                    if not isinstance(failed[0][1], Fenced):  # else the processes are another driver's by now
                        self._end_those(actors)
                    return failed
            elif not ready:
                ray.get([actor.alive.remote() for actor in actors], timeout=PATIENCE_S)
        return list(ray.get(pending))

    def _all_alive(self, actors: list[Any]) -> bool:
        """Where one process dies, another may be the first to fail, since it cannot reach it."""
        import ray

        time.sleep(1.0)  # for Ray to notice
        try:
            return all(ray.get([actor.alive.remote() for actor in actors], timeout=PATIENCE_S))
        except ray.exceptions.RayError:
            return False

    def _ready(self) -> list[Any]:
        if not self._actors:
            connect()
            self._actors = self._found() or self._started()
        return self._actors

    def _found(self) -> list[Any]:
        """The processes that an earlier driver of this run left, if they are all there and hold the same engines."""
        import ray

        found = []
        with suppress(ValueError, AssertionError):  # those that end just now: their class goes before their name
            found = [ray.get_actor(name, namespace=NAMESPACE) for name in sorted(self._named())]
        try:
            good = len(found) == self.pool.workers and all(
                tuple(serves) == (self.identity, self.pool.workers)
                for serves in ray.get([actor.serves.remote() for actor in found], timeout=PATIENCE_S)
            )
        except ray.exceptions.RayError:
            good = False
        if good:
            return found
        self.end()
        return []

    def _started(self) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        outlives = not _started_here
        pool = self.pool
        need = {"CPU": pool.cpus_per_worker, "GPU": pool.gpus_per_worker}
        bundle = {name: amount for name, amount in need.items() if amount}
        note(f"starting pool {self.name}: {pool.workers} x {bundle} for {', '.join(self.roles)}")
        placed = ray.util.placement_group(
            [bundle] * pool.workers, strategy="PACK", lifetime="detached" if outlives else None, name=self._place
        )
        fits = _fits(bundle, pool.workers)
        if fits and not placed.wait(timeout_seconds=10):
            note(f"pool {self.name} waits for Ray to have room (at most {START_S / 60:.0f} minutes)")
        if not fits or not placed.wait(timeout_seconds=START_S):
            ray.util.remove_placement_group(placed)
            there = {name: amount for name, amount in ray.cluster_resources().items() if name in bundle}
            raise UserError(
                f"pools.{self.name} asks for {pool.workers} x {bundle}, and Ray has {there}, some of it in use: "
                "ask for less, or give the cluster more"
            )
        remote = ray.remote(concurrency_groups={"health": 1})(_with_health(RayWorker))
        actors = [
            remote.options(
                num_cpus=pool.cpus_per_worker,
                num_gpus=pool.gpus_per_worker,
                name=self._actor_name(rank),
                namespace=NAMESPACE,
                lifetime="detached" if outlives else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=rank),
            ).remote(self.config, self.url, self.roles, rank, self.threads, self.identity)
            for rank in range(pool.workers)
        ]
        try:
            meeting = ray.get(actors[0].meeting_point.remote(), timeout=START_S)
            ray.get([actor.join.remote(pool.workers, meeting) for actor in actors], timeout=START_S)
        except ray.exceptions.RayActorError as error:
            self.end()
            raise GroupLost(f"a process of pool {self.name} died while the pool was started: it restarts") from error
        return actors

    @property
    def _place(self) -> str:
        """The placement group's name: that of the run, and the pool."""
        return f"{hashlib.sha256(self.url.encode()).hexdigest()[:16]}/{self.name}"

    def _actor_name(self, rank: int) -> str:
        return f"{self._place}/{rank:06}"

    def _named(self) -> set[str]:
        """The names of its processes that there are."""
        import ray

        there = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
        return there & {self._actor_name(rank) for rank in range(self.pool.workers)}


def _fits(bundle: dict[str, float], workers: int) -> bool:
    """Whether the cluster, were it empty, could give that; a node that is yet to come does not count."""
    import ray

    there = ray.cluster_resources()
    return all(there.get(name, 0) >= amount * workers for name, amount in bundle.items())


def _asked(actor: Any, term: int, call: partial[Any]) -> Any:
    if call.func is Worker.is_saved:  # whatever it computes meanwhile
        return actor.is_saved.remote(*call.args)
    return actor.do.remote(term, call)


def _with_health(cls: type[RayWorker]) -> type[RayWorker]:
    """`alive`, `serves` and `is_saved` answer while the process computes."""
    import ray

    class Process(cls):  # type: ignore[misc, valid-type]
        @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
        def alive(self) -> bool:
            return True

        @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
        def is_saved(self, role: str) -> tuple[bool, bool]:
            return True, self.worker.is_saved(role)

        @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
        def serves(self) -> tuple[str, int]:
            return super().serves()  # type: ignore[no-any-return]

    return Process


def _engines_of(config: RunConfig) -> dict[str, Any]:
    """What loaded engines depend on."""
    return config.model_dump(mode="json", exclude=OPERATIONAL)


def end_idle(config: RunConfig, url: str) -> bool:
    """End the processes that drivers of a run left on a Ray that outlives them; whether there was such a Ray."""
    if not config.pools or not _connect_to_existing():
        return False
    for pool in config.pools:
        RayGroup(config, url, pool, threads=1, identity="").end()
    return True


_started_here = False


def connect() -> None:
    """To the Ray at RAY_ADDRESS, or one that runs on this machine, or one that ends with this process."""
    global _started_here
    import ray

    if not ray.is_initialized() and not _connect_to_existing():
        ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **QUIET)
        _started_here = True


def _connect_to_existing() -> bool:
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, ValueError) as error:
        if address != "auto":
            raise UserError(f"RAY_ADDRESS is {address}, but no Ray answers there ({error})") from None
        return False
    return True


QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}
