"""A pool on Ray: processes with their own devices, which together hold the models of some roles.

The processes are Ray actors, gang-scheduled by a placement group, and communicate through torch.distributed. Only
references pass through Ray: each process reads a stage's inputs from the store, and rank 0 writes its outputs. On a Ray
cluster that outlives the driver, the actors are detached and named, so that the run's next driver finds them with their
models loaded.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from ratchet.infra.progress import note
from ratchet.infra.store.log import Fenced
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Weights, sha256_of
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.calls import ShardKey
from ratchet.infra.workers.held_weights import WrongPolicyVersion
from ratchet.infra.workers.rollouts import Generated
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf.config import PoolConfig, RunConfig
from ratchet.rlhf.distributed.device_errors import is_lost, out_of_memory
from ratchet.rlhf.errors import RatchetError, UserError, in_one_line

if TYPE_CHECKING:
    from ratchet.rlhf.distributed.rendezvous import Rendezvous

P = ParamSpec("P")
R = TypeVar("R")
NAMESPACE = "ratchet"
PATIENCE_S = 60.0
"""Seconds after which a process that does not answer `alive` counts as dead."""
GRACE_S = 10.0
"""Seconds for the other processes of a group to answer after one has failed."""
START_S = 600.0
Location = tuple[str, tuple[str, ...]]
"""A machine, by Ray's id, and GPUs on it, by number or UUID."""
TYPED = 0.001
"""The amount of a GPU type's resource that asks Ray for a machine with that type: Ray gives each machine 1 of it."""
UNANIMOUS = (Worker.has_weights, Worker.is_saved, Worker.connect, Worker.is_connected, Worker.receive_weights)
"""Methods that return a true value only if all ranks do."""
BESIDE = (Worker.take, Worker.drop)
"""Methods that a process runs in a thread beside the others, while it generates: they look up and forget shards. All
else stays in one thread, so that users' code need not expect another."""
OPERATIONAL = {"train", "checkpoint", "validation", "tracking"}
"""Sections of the config that loaded models do not depend on."""


class GroupLost(RatchetError):
    """A process of a worker group died. The next call restarts the group and loads the committed weights."""


class RayWorker:
    """One process of a pool."""

    def __init__(self, config: RunConfig, url: str, roles: Sequence[str], threads: int, identity: str) -> None:
        import torch

        # the driver's number, because results on CPUs depend on it
        torch.set_num_threads(threads)
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each process only its own devices
        self.config, self.identity = config, identity
        self.rank, self.ranks = 0, 0
        self.rendezvous: Rendezvous | None = None
        """The ranks' rendezvous, if this process opened it."""
        self.worker = Worker(config, RunStore(ObjectStore(url)), roles)
        self.busy = 0
        self.last = time.monotonic()
        self._fencing = threading.Lock()
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def alive(self) -> bool:
        """Returns True; any answer shows that the process is alive."""
        return True

    def open_rendezvous(self) -> str:
        """Opens the ranks' rendezvous on this machine, where this process becomes rank 0, and returns its URL."""
        import ray

        from ratchet.rlhf.distributed.rendezvous import Rendezvous

        self.rendezvous = Rendezvous(ray.util.get_node_ip_address(), START_S)
        return self.rendezvous.url

    def location(self) -> Location:
        """Returns this machine, and this process's GPUs on it."""
        import ray

        return ray.get_runtime_context().get_node_id(), tuple(sorted(map(str, ray.get_gpu_ids()), key=_gpu_order))

    def join(self, rank: int, count: int, team_size: int, rendezvous: str, timeout_s: float) -> None:
        """Joins the group of `count` ranks at the rendezvous as `rank`, and a rollout team; see `ranks.join`."""
        from ratchet.rlhf.distributed import ranks
        from ratchet.rlhf.rollout import rollout_team

        if count > 1:
            ranks.join(rank, count, self.rendezvous or rendezvous, timeout_s)
            self.worker.engines.team = rollout_team.formed(team_size, self.location()[1], timeout_s)
        self.rank, self.ranks = rank, ranks.count()

    def serves(self) -> tuple[str, int, int]:
        """Returns the identity of models, code and data, the number of ranks (0 before they have joined), and this
        rank."""
        return self.identity, self.ranks, self.rank

    def do(self, term: int, call: partial[Any]) -> tuple[bool, Any]:
        """Runs a call for a driver's term. Returns True and its result, or False and an error for the driver."""
        with self._fencing:
            self.busy += 1
        try:
            with self._fencing:  # another call runs beside this one, which may be a newer driver's
                self.worker.accept_term(term)
                self.worker.store.write_as(term)
            return True, call.func(self.worker, *call.args, **call.keywords)
        except (RatchetError, WrongPolicyVersion) as error:
            return False, error
        except RuntimeError as error:
            if (too_large := out_of_memory(error)) is not None:
                return False, too_large
            if is_lost(error):
                return False, GroupLost(f"rank {self.rank} failed: {in_one_line(error)}")
            raise
        finally:
            with self._fencing:
                self.busy -= 1
            self.last = time.monotonic()

    def _end_when_idle(self) -> None:
        limit = 60 * self.config.pools[self.config.pool_of(next(iter(self.worker.roles))) or ""].idle_minutes
        while self.busy or time.monotonic() - self.last < limit:
            time.sleep(min(limit / 4, 10))
        import ray

        ray.util.remove_placement_group(ray.util.get_current_placement_group())  # the other ranks end with it


@dataclass(frozen=True)
class CallHandle(Generic[R]):
    """A call in progress."""

    group: RayGroup
    method: Callable[..., R]
    actors: list[Any]
    pending: list[Any]

    def result(self) -> R:
        """Waits for rank 0's answer. Raises the worker's error, or `GroupLost`."""
        return self.group.await_answers(self.method, self.actors, self.pending)


@dataclass(frozen=True)
class Handed(Generic[R]):
    """A result in Ray's object store, for another process to read there."""

    answer: Any

    def result(self) -> R:
        """Waits for the result. Raises the worker's error."""
        import ray

        succeeded, result = ray.get(self.answer)
        if not succeeded:
            raise result
        value: R = result
        return value


@dataclass(frozen=True)
class RayReplica:
    """One process of a pool, or a rollout team, whose first process gets the calls."""

    group: RayGroup
    team: range

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method in this process. Raises the worker's error, or `GroupLost`."""
        return self.submit(method, *args, **kwargs).result()

    def submit(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> CallHandle[R]:
        """Calls a method in this process, without waiting for its result."""
        return self.group.submit_to(self.team[0], method, *args, **kwargs)

    def generate(
        self, weights: Weights, submitted: Sequence[tuple[ShardKey, Sequence[str]]], wait_s: float
    ) -> list[Generated]:
        """See `Worker.generate`. Also raises `GroupLost`."""
        return self.group.submit_generate(self.team, weights, submitted, wait_s).result()

    def handed(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> Handed[R]:
        """Calls a method, and leaves its result in Ray's object store."""
        return Handed(self.submit(method, *args, **kwargs).pending[0])


class RayGroup:
    """The processes of one pool, started or found on first use."""

    def __init__(self, config: RunConfig, url: str, pool: str, threads: int, identity: str) -> None:
        """Takes `identity`, which identifies models, code and data outside the config; processes with another identity
        are ended."""
        self.config, self.name, self.threads = config, pool, threads
        # Ray's processes may have another working folder
        self.url = f"file://{Path(url.removeprefix('file://')).resolve()}" if url.startswith("file://") else url
        self.identity = sha256_of(f"{identity}\n{_engines_of(config)}".encode())
        self.pool: PoolConfig = config.pools[pool]
        self.roles = [role for role in config.roles if config.pool_of(role) == pool]
        self.term = 0
        self.team_size = config.rollout_team_size if "rollout" in self.roles else 1
        self._actors: list[Any] = []
        self._lent: set[range] = set()
        """Rollout teams that have lent their devices to the engine since the last call of all processes."""
        self._lock = threading.RLock()

    @property
    def ranks(self) -> int:
        return self.pool.workers

    def call(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method in all processes and returns rank 0's answer. Raises the worker's error, or `GroupLost`."""
        return self.submit(method, *args, **kwargs).result()

    def submit(self, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> CallHandle[R]:
        """Calls a method in all processes, which handle calls in the order of submission."""
        call = partial(method, *args, **kwargs)  # type: ignore[arg-type]  # the remote process adds the worker
        with self._lock:  # calls that reach two ranks in different orders would deadlock
            actors = self._ready()
            self._lent.clear()  # any call may use the devices for other models
            return CallHandle(self, method, actors, [_asked(actor, self.term, call) for actor in actors])

    def submit_to(
        self, rank: int, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> CallHandle[R]:
        """Calls a method in one process."""
        call = partial(method, *args, **kwargs)  # type: ignore[arg-type]  # the remote process adds the worker
        with self._lock:
            actors = self._ready()
            return CallHandle(self, method, actors, [_asked(actors[rank], self.term, call)])

    def submit_generate(
        self, team: range, weights: Weights, submitted: Sequence[tuple[ShardKey, Sequence[str]]], wait_s: float
    ) -> CallHandle[list[Generated]]:
        """Calls `Worker.generate` in a rollout team, after all its ranks have lent their devices to the engine."""
        lend = partial(Worker.lend_devices, weights=weights)
        generate = partial(Worker.generate, weights=weights, submitted=submitted, wait_s=wait_s)
        with self._lock:  # between the two no call may use the devices for other models
            actors = self._ready()
            lenders = team if len(team) > 1 and team not in self._lent else ()
            self._lent.add(team)
            lending = [_asked(actors[rank], self.term, lend) for rank in lenders]
            return CallHandle(self, Worker.generate, actors, [_asked(actors[team[0]], self.term, generate), *lending])

    def replicas(self) -> list[RayReplica]:
        """Returns the units that generate independently: processes, or rollout teams."""
        size = self.team_size
        return [RayReplica(self, range(first, first + size)) for first in range(0, self.pool.workers, size)]

    def await_answers(self, method: Callable[..., R], actors: list[Any], pending: list[Any]) -> R:
        """Waits for the answers of a call and returns rank 0's.

        Raises:
            GroupLost: a process died; the group is ended.
            Exception: a worker's error, of any rank.
        """
        import ray

        try:
            answers = self._patiently(actors, pending)
        except ray.exceptions.RayError as error:
            # when one process dies, another that cannot reach it may be the first to fail
            is_bug = isinstance(error, ray.exceptions.RayTaskError) and self._all_alive(actors)
            self._end_those(actors)  # the other processes may be waiting for the failed one
            if is_bug:
                raise
            raise GroupLost(f"a process of pool {self.name} died during {method.__name__}: it restarts") from error
        for succeeded, answer in answers:
            if not succeeded:
                if isinstance(answer, GroupLost):
                    self._end_those(actors)
                raise answer
        results: list[R] = [answer for _, answer in answers]
        if method in UNANIMOUS:  # one rank's no counts for all
            return next((result for result in results if not result), results[0])
        return results[0]

    def _end_those(self, actors: list[Any]) -> None:
        with self._lock:  # another call may have restarted the group already
            if self._actors is actors:
                self.end()

    def end(self) -> None:
        """Ends the processes; the next call starts new ones."""
        import ray

        self._actors = []
        self._lent.clear()
        with suppress(ValueError):  # the placement group does not exist
            ray.util.remove_placement_group(ray.util.get_placement_group(self._place))
        deadline = time.monotonic() + 30
        while self._named() and time.monotonic() < deadline:  # their names are taken until they are gone
            time.sleep(0.1)

    def _patiently(self, actors: list[Any], pending: list[Any]) -> list[Any]:
        """Waits for the answers without a time limit, as long as every process answers `alive`. Returns only the failed
        answers if others are missing."""
        import ray

        unanswered = pending
        while unanswered:
            ready, unanswered = ray.wait(unanswered, timeout=PATIENCE_S / 4)
            failed = [answer for answer in ray.get(ready) if not answer[0]]
            # the others may wait for the failed process forever in a collective
            if failed and unanswered:
                _, unanswered = ray.wait(unanswered, num_returns=len(unanswered), timeout=GRACE_S)
                if unanswered:
                    if not isinstance(failed[0][1], Fenced):  # if it is, the processes serve a newer driver
                        self._end_those(actors)
                    return failed
            elif not ready:
                # raises a `RayError` if a process is dead or hangs
                ray.get([actor.alive.remote() for actor in actors], timeout=PATIENCE_S)
        return list(ray.get(pending))

    def _all_alive(self, actors: list[Any]) -> bool:
        """True if all processes answer."""
        import ray

        time.sleep(1.0)  # Ray needs a moment to notice a death
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
        """Returns the processes of an earlier driver of this run, if all are alive and hold the same engines."""
        import ray

        actors = []
        with suppress(ValueError, AssertionError):  # an actor that is ending loses its class before its name
            actors = [ray.get_actor(name, namespace=NAMESPACE) for name in sorted(self._named())]
        by_rank: dict[int, Any] = {}
        with suppress(ray.exceptions.RayError):
            answers = ray.get([actor.serves.remote() for actor in actors], timeout=PATIENCE_S)
            for actor, (identity, count, rank) in zip(actors, answers, strict=True):
                if (identity, count) == (self.identity, self.pool.workers):
                    by_rank[rank] = actor
        if by_rank.keys() == set(range(self.pool.workers)):
            return [by_rank[rank] for rank in range(self.pool.workers)]
        self.end()
        return []

    def _started(self) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # on a Ray that outlives the driver, the next driver finds the processes
        lifetime = None if _started_here else "detached"
        pool, size = self.pool, self.team_size
        need = {"CPU": pool.cpus_per_worker, "GPU": pool.gpus_per_worker}
        typed = {} if pool.accelerator_type is None else {f"accelerator_type:{pool.accelerator_type}": TYPED}
        worker = {name: amount for name, amount in need.items() if amount} | typed
        bundle = {name: round(amount * size, 4) for name, amount in worker.items()}  # Ray keeps a bundle on one machine
        amounts = _amounts(bundle, pool.accelerator_type)
        asks_for = f"{pool.workers // size} x {amounts}"
        if size > 1:
            asks_for += f", each on one machine ({size} workers share a vLLM by rollout.engine.tensor_parallel)"
        note(f"starting pool {self.name}: {asks_for} for {', '.join(self.roles)}")
        placement = ray.util.placement_group(
            [bundle] * (pool.workers // size), strategy="PACK", lifetime=lifetime, name=self._place
        )
        machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
        fits = room_for(bundle, machines) >= pool.workers // size
        if fits and not placement.wait(timeout_seconds=10):
            note(f"pool {self.name} waits for free resources in Ray (at most {START_S / 60:.0f} minutes)")
        if not fits or not placement.wait(timeout_seconds=START_S):
            ray.util.remove_placement_group(placement)
            available = {name: ray.cluster_resources().get(name, 0) for name in bundle}
            raise UserError(
                f"pools.{self.name} asks for {asks_for}, and Ray has "
                f"{_amounts(available, pool.accelerator_type)}, some of it in use: "
                "ask for less, or add resources to the cluster"
            )
        remote = ray.remote(concurrency_groups={"health": 1, "beside": 1})(_with_health(RayWorker))
        actors = [
            remote.options(
                num_cpus=pool.cpus_per_worker,
                num_gpus=pool.gpus_per_worker,
                resources=typed,
                runtime_env=pool.runtime_env or None,
                name=self._actor_name(number),
                namespace=NAMESPACE,
                lifetime=lifetime,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement, placement_group_bundle_index=number // size
                ),
            ).remote(self.config, self.url, self.roles, self.threads, self.identity)
            for number in range(pool.workers)
        ]
        try:
            locations = ray.get([actor.location.remote() for actor in actors], timeout=START_S)
            actors = [actors[number] for number in in_order(locations)]
            rendezvous = ray.get(actors[0].open_rendezvous.remote(), timeout=START_S)
            joins = [
                actor.join.remote(rank, pool.workers, size, rendezvous, pool.timeout_s)
                for rank, actor in enumerate(actors)
            ]
            ray.get(joins, timeout=START_S)
        except ray.exceptions.RuntimeEnvSetupError as error:
            self.end()
            raise UserError(f"pools.{self.name}.runtime_env does not work: {in_one_line(error)}") from None
        except ray.exceptions.RayActorError as error:
            self.end()
            raise GroupLost(f"a process of pool {self.name} died while the pool was started: it restarts") from error
        return actors

    @property
    def _place(self) -> str:
        """The placement group's name, unique to the run and the pool."""
        return f"{hashlib.sha256(self.url.encode()).hexdigest()[:16]}/{self.name}"

    def _actor_name(self, number: int) -> str:
        return f"{self._place}/{number:06}"

    def _named(self) -> set[str]:
        """Returns the names of the pool's existing processes."""
        import ray

        existing = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
        return existing & {self._actor_name(number) for number in range(self.pool.workers)}


def in_order(locations: Sequence[Location]) -> list[int]:
    """Returns the number of each rank's process, ordered by machine, and by GPU on a machine.

    Ray places bundles in any order, but adjacent ranks should share a machine: those that split matrices or sequences
    talk in every layer. The ranks of a rollout team are adjacent and always share one: where every machine has whole
    teams of processes, so do their ranks.
    """

    def place(number: int) -> tuple[str, list[tuple[int, str]]]:
        machine, gpus = locations[number]
        return machine, [_gpu_order(gpu) for gpu in gpus]

    return sorted(range(len(locations)), key=place)


def _gpu_order(gpu: str) -> tuple[int, str]:
    """Returns a key that sorts numbers as numbers, and UUIDs, all of one length, in a fixed order."""
    return len(gpu), gpu


def room_for(bundle: Mapping[str, float], machines: Iterable[Mapping[str, float]]) -> int:
    """Returns how many bundles fit on idle machines, each on one machine. Amounts are by Ray's name of the resource; a
    bundle's are positive."""
    return sum(  # 1e-6, because 0.3 / 0.1 is less than 3
        min(int(machine.get(name, 0) / amount + 1e-6) for name, amount in bundle.items()) for machine in machines
    )


def _amounts(resources: Mapping[str, float], accelerator_type: str | None) -> str:
    """Formats CPUs and GPUs among Ray's resources, and the GPU type if one is asked for."""
    amounts = [_counted(resources[name], name) for name in ("CPU", "GPU") if name in resources]
    if accelerator_type is not None:
        is_there = resources.get(f"accelerator_type:{accelerator_type}", 0) > 0
        amounts.append(f"{'' if is_there else 'no '}accelerator_type {accelerator_type}")
    return " and ".join(amounts)


def _counted(count: float, one: str) -> str:
    return f"{count:g} {one}{'' if count == 1 else 's'}" if count else f"no {one}"


def _asked(actor: Any, term: int, call: partial[Any]) -> Any:
    if call.func is Worker.is_saved:  # answered while the process computes
        return actor.is_saved.remote(*call.args)
    if call.func in BESIDE:
        return actor.beside.remote(term, call)
    return actor.do.remote(term, call)


def _with_health(cls: type[RayWorker]) -> type[RayWorker]:
    """Returns a subclass whose `alive`, `serves`, `is_saved` and `beside` answer while the process computes."""
    import ray

    class Process(cls):  # type: ignore[misc, valid-type]
        @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
        def alive(self) -> bool:
            return True

        @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
        def is_saved(self, role: str) -> tuple[bool, bool]:
            return True, self.worker.is_saved(role)

        @ray.method(concurrency_group="beside")  # type: ignore[untyped-decorator]
        def beside(self, term: int, call: partial[Any]) -> tuple[bool, Any]:
            return super().do(term, call)  # type: ignore[no-any-return]

        @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
        def serves(self) -> tuple[str, int, int]:
            return super().serves()  # type: ignore[no-any-return]

    return Process


def _engines_of(config: RunConfig) -> dict[str, Any]:
    """Returns the config that loaded engines depend on."""
    return config.model_dump(mode="json", exclude=OPERATIONAL)


def end_idle(config: RunConfig, url: str) -> bool:
    """Ends the processes that a run's drivers left on a long-lived Ray. Returns False if there is no such Ray."""
    if not config.pools or not connect_to_running():
        return False
    for pool in config.pools:
        RayGroup(config, url, pool, threads=1, identity="").end()
    return True


_started_here = False


def connect() -> None:
    """Connects to the Ray at RAY_ADDRESS or on this machine, or starts one that ends with this process."""
    global _started_here
    import ray

    if not connect_to_running():
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, lets any busy program starve the workers
        ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **QUIET)
        _started_here = True


def connect_to_running() -> bool:
    """Connects to the Ray at RAY_ADDRESS or on this machine, unless this process has one. Returns False if there is
    none.

    Raises:
        UserError: no Ray answers at RAY_ADDRESS.
    """
    import ray

    if ray.is_initialized():
        return True
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "local":  # Ray's word for a new instance
        return False
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, ValueError) as error:
        if address != "auto":
            raise UserError(f"RAY_ADDRESS is {address}, but no Ray answers at that address ({error})") from None
        return False
    return True


QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}
