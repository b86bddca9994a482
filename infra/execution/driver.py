"""Drives a run: the one process that advances it, with the claim, the heartbeat and the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

from ratchet.infra.execution.claims import claim, run_url
from ratchet.infra.execution.executors import Executors, StageHandle
from ratchet.infra.execution.heartbeat import beating
from ratchet.infra.execution.neighbours import Neighbours
from ratchet.infra.execution.outside import Outside, OutsideInputs
from ratchet.infra.execution.preflight.run import check_run, say_what_changed
from ratchet.infra.execution.read_write_lock import ReadWriteLock
from ratchet.infra.execution.replicas import Replicas
from ratchet.infra.execution.snapshots import Snapshots
from ratchet.infra.execution.stopping import Stopping, on_signals
from ratchet.infra.execution.weight_sync import WeightSync
from ratchet.infra.progress import note
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.object_store import StoreUnavailable
from ratchet.infra.store.records import RunState, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.calls import Experience
from ratchet.infra.workers.ray_group import GroupLost
from ratchet.infra.workers.worker_groups import WorkerGroups
from ratchet.rlhf import consent
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.expert_answers import Matched
from ratchet.rlhf.distributed.gpus import GPUs


@dataclass
class AheadRollouts:
    """The state of generation ahead of the open iteration, if `rollout.mode` allows that."""

    weights_lock: ReadWriteLock = field(default_factory=ReadWriteLock)
    """Held for reading by calls that generate, and for writing while new weights are loaded."""
    loaded: Weights | None = None
    """The weights that were loaded last; None: each iteration generates with its starting weights."""
    replicas: Replicas | None = None
    """The replicas of the rollout; None until they generate."""
    starting: threading.Lock = field(default_factory=threading.Lock)
    """Held while `replicas` changes."""
    started: dict[int, StageHandle] = field(default_factory=dict)
    """Generate stages of later iterations, by iteration."""


@dataclass(frozen=True)
class Dependencies:
    """The dependencies of a pipeline's stages, other than config and inputs."""

    stages: tuple[str, ...]
    outside: frozenset[Outside]
    versions: Mapping[str, int]
    """The version of each stage's code."""


class Driver:
    """A driver of one run; open it with `driving`. A rollout worker is one that only generates, beside another one."""

    def __init__(self, config: RunConfig, store: RunStore, roles: Iterable[str] | None = None) -> None:
        """Takes the roles whose models this process holds; None: those without a pool."""
        self.config = config
        self.store = store
        # a lambda, because `outside` needs the resources of the groups
        self.groups = WorkerGroups(config, store, lambda: self.outside.identity(), roles)
        self.outside = OutsideInputs(config, self.groups.local.worker.resources)
        self.executors = Executors()
        self.rollout = AheadRollouts()
        self.neighbours = Neighbours(store.objects)
        self.snapshots = Snapshots(config, store, self.groups)
        self.weight_sync = WeightSync(config)
        self.restoring = threading.RLock()
        """Held while weights are loaded: two executors may find at the same time that a role needs other weights."""
        self.has_said_that_replays_differ = False
        self.solve_rates: dict[int, dict[int, float]] = {}
        """Cached solve rates of prompts, by closed iteration and row of the dataset."""
        self.experience: dict[tuple[str, int], list[Experience]] = {}
        """Cached prompts that can be drawn with their answers, by run and closed iteration."""
        self.expert_answers: Matched | None = None
        """The answers of `data.replay.files` by prompt; None until they are read."""
        self.experience_runs: dict[str, RunStore] = {}
        """The other runs of `data.replay`, as of their first reading."""
        self.canary_texts: tuple[tuple[int, ...], ...] | None = None
        """Cached texts of the checks of the rollout's weights; None until the first check."""
        self.stopping = Stopping(f"`ratchet resume {config.run.name}`")

    @property
    def state(self) -> RunState:
        return self.store.state

    @property
    def term(self) -> int:
        return self.store.log.term

    def tidy(self) -> None:
        """Commits a snapshot that was written in the background. Called while stages compute."""
        try:
            self.snapshots.settle(wait=False)
        except (StoreUnavailable, GroupLost) as error:  # the stages will meet the same error; a snapshot can wait
            note(str(error))


_open_drivers: ContextVar[tuple[Driver, ...]] = ContextVar("open_drivers", default=())
"""Open drivers of this context, innermost last: a flow that another flow of the same run calls shares its driver."""


@contextmanager
def driving(
    config: RunConfig,
    dependencies: Dependencies,
    *,
    take_over: bool = False,
    accept_changes: bool = False,
    check: Callable[[Driver], None] = lambda driver: None,
) -> Iterator[Driver]:
    """Claims the run and drives it. Within an open driver of the same run, reuses that driver.

    Args:
        dependencies: recorded in the claim; leftover files of its stages are deleted.
        take_over: fence another driver even if it is alive.
        accept_changes: continue a run that has iterations with other data, another reward or another algorithm.
        check: may reject the driver before the claim, so that a config that cannot continue changes nothing.

    Raises:
        UserError: the config, the store or the inputs are wrong.
        Fenced: another driver is alive, or has taken over the run.
    """
    drivers = _open_drivers.get()
    active = next((driver for driver in drivers if driver.config.run == config.run), None)
    if active is not None:
        with on_signals(active.stopping.request):
            yield active
        return
    driver = _open(config, dependencies, take_over, accept_changes, check)
    with driver.stopping.watching(), beating(driver.store.log, driver.stopping):
        token = _open_drivers.set((*drivers, driver))
        try:
            yield driver
            driver.snapshots.settle(wait=True)
        except Corrupt:
            driver.store.log.check_claim()  # after a takeover the new driver may have deleted the snapshot
            raise
        finally:
            _open_drivers.reset(token)
            # first, because their stages finish the current shard with the replicas and the groups
            driver.executors.close()
            if driver.rollout.replicas is not None:
                driver.rollout.replicas.close()
            driver.groups.close()


def check_start(
    config: RunConfig,
    *,
    take_over: bool,
    accept_changes: bool,
    check: Callable[[Driver], None] = lambda driver: None,
    gpus: GPUs | None = None,
) -> RunState:
    """Checks everything that `driving` refuses, without a claim; see `check_run`. `check` may reject the driver."""
    driver, state = _checked(config, take_over, accept_changes, check, gpus)
    if state.slot < 0:
        driver.store.objects.delete_empty_folders()  # left by the check of the store
    return state


def _checked(
    config: RunConfig,
    take_over: bool,
    accept_changes: bool,
    check: Callable[[Driver], None],
    gpus: GPUs | None = None,
) -> tuple[Driver, RunState]:
    config.require_own("cannot train it")
    store = RunStore.at(run_url(config.run.store, config.run.name))
    driver = Driver(config, store)
    check_open = partial(check, driver)
    state = check_run(
        config,
        store,
        driver.outside,
        check_open,
        take_over=take_over,
        accept_changes=accept_changes,
        gpus=gpus,
    )
    return driver, state


def _open(
    config: RunConfig,
    dependencies: Dependencies,
    take_over: bool,
    accept_changes: bool,
    check: Callable[[Driver], None],
) -> Driver:
    """Checks everything that may be wrong on the user's side, then claims the run. Loads no model."""
    driver, state = _checked(config, take_over, accept_changes, check)
    store, outside = driver.store, driver.outside
    checked = store.state.slot
    say_what_changed(state, config)
    consent.give(config)
    claim(
        store,
        config,
        initial=outside.initial_weights,
        frozen=config.frozen,
        ahead=config.rollout.ahead,
        outside={name: digest for name in dependencies.outside if (digest := outside.digest(name)) is not None},
        versions=dependencies.versions,
    )
    if store.state.slot > checked + 1:  # another driver committed more in the meantime
        check(driver)
    store.sweep(dependencies.stages)
    return driver
