"""A rollout worker: a process that generates shards beside a run's driver. It may come, go or be killed at any time.

It needs the run's store and inputs, and nothing of the driver. The log tells it which iteration generates; it leases
shards in records (`tasks/leases.py`), loads the iteration's weights from the store, and commits what it has generated,
as the driver does.
"""

from __future__ import annotations

import time

from ratchet.infra.execution.claims import set_threads
from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.epochs import with_iterations
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.execution.neighbours import WorkerLife
from ratchet.infra.progress import note
from ratchet.infra.store.log import Corrupt, Fenced, Late
from ratchet.infra.store.records import Claim
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf import consent
from ratchet.rlhf.config.run import stored_config
from ratchet.rlhf.errors import UserError, counted
from ratchet.tasks.shard_runner import LOOK_S, ShardJob, shared
from ratchet.tasks.stages.generate import GENERATE, shards_of


def work(url: str) -> int:
    """Generates shards of the run at `url` until it is complete; returns how many it has committed.

    Raises:
        UserError: the run takes no rollout workers, or this process would generate with other inputs than the driver.
        Stopped: it was asked to stop. Others generate what it has not committed.
    """
    store = RunStore.at(url)
    life = WorkerLife(store.objects)
    while True:
        store.join(life.name)
        claim = store.state.claim
        assert claim is not None, "the caller has opened the run"
        worker = _opened(store, claim)
        try:
            with worker.stopping.watching(), life.beating():
                note(f"{life.name} generates for {worker.config.run.name}")
                _generate_all(worker, life)
            return life.shards
        except Fenced:
            note("a new driver has claimed the run: its config counts from now on")
        finally:
            if worker.rollout.replicas is not None:
                worker.rollout.replicas.close()
            worker.groups.close()


def _opened(store: RunStore, claim: Claim) -> Driver:
    """Returns a driver that only generates, with the config and the inputs of the newest claim."""
    folder, _, name = store.url.rpartition("/")
    stored = stored_config(claim.config, f"{store.url}, newest claim").with_values(
        {"run.store": folder, "run.name": name}
    )
    consent.require(stored)
    if not stored.rollout.workers:
        raise UserError(
            f"run {name} takes no rollout workers: resume it with rollout.workers=true, and start this one again"
        )
    # this process holds the rollout alone, which is checked by the digests of the files that it loads
    config = with_iterations(stored.with_values({"pools": {}, "placement": "colocated", "rollout.canary": "off"}))
    worker = Driver(config, store, roles=("rollout",))
    inputs = {name: worker.outside.digest(name) for name in GENERATE.outside}
    differing = [f"the {name}" for name, digest in inputs.items() if digest != claim.outside.get(name)]
    if worker.outside.initial_weights["actor"].digest != claim.initial["actor"].digest:
        differing.append(f"the model ({config.model.path})")
    if differing:
        raise UserError(
            f"here {', '.join(differing)} differ from those of the driver on {claim.host}: give this worker the same "
            "files and code"
        )
    set_threads(claim)
    return worker


def _generate_all(worker: Driver, life: WorkerLife) -> None:
    store, has_said_that_it_waits = worker.store, False
    while True:
        worker.stopping.check()
        store.log.check_claim()
        state = store.state
        if state.iteration >= worker.config.iterations:
            return
        weights = state.starting["actor"]
        is_ready = weights == state.initial["actor"] or store.actor_weights(weights) is not None
        is_over = len(state.shards.get(GENERATE.name, {})) == shards_of(worker)
        if GENERATE.name in state.stages or is_over or not is_ready:
            if not has_said_that_it_waits:
                note(f"waits for the weights of iteration {state.iteration + is_over}")
                has_said_that_it_waits = True
            time.sleep(LOOK_S)
            continue
        has_said_that_it_waits = False
        before = life.shards
        try:
            _generate(worker, life, state.iteration)
        except (Late, Corrupt) as error:
            if store.log.read().iteration == state.iteration:
                raise
            note(f"iteration {state.iteration} has ended without this worker: {error}")
        if own := life.shards - before:
            note(f"iteration {state.iteration}: {counted(own, 'shard')} generated here")


def _generate(worker: Driver, life: WorkerLife, iteration: int) -> None:
    """Generates shards of an iteration until all are committed, here or elsewhere."""
    store, name = worker.store, GENERATE.name
    attempt = store.begin_attempt(iteration, name)
    job = ShardJob(worker, GENERATE, iteration, {}, attempt, shards_of(worker), StageHandle(name))
    done = dict(store.committed_shards(name, iteration))
    for shards in shared(job, done):
        done |= {shard.shard: shard for shard in shards}
        life.shards += sum(f"/{worker.term}-{attempt}-" in shard.data.key for shard in shards)
