"""What happens between processes that generate the same stage, one property at a time; see `tests/crash` for kills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.execution.neighbours import WORKERS
from ratchet.infra.runs.vacuum import vacuum
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Claim, ShardCommit, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.errors import UserError
from ratchet.tasks import rollout_worker
from ratchet.tasks.generation_runner import GenerationRunner
from ratchet.tasks.shard_runner import LOOK_S, ShardJob, run_rows
from ratchet.tasks.stages.generate import GenerateConfig, GenerateSummary, shards_of
from tests.faulty_store import Clock, Memory
from tests.virtual.cluster import GENERATES, Work
from tests.virtual.rollout_workers import Fleet, Hour, Machine, records_of
from tests.virtual.time import Group

SMALL = Work(replicas=1, prompts=32, n=2, journal_s=5.0)
"""Two shards."""


def hour(work: Work, workers: int, seconds: float, killed_every: float | None) -> Hour:
    """Lets a fleet generate, kills half of its workers every so often, and checks what it has generated."""
    fleet = Fleet(work, workers)
    with fleet.driver() as driver:
        if killed_every is not None:
            fleet.kill_half_every(killed_every, driver.config)
        done = fleet.generated_for(driver, seconds)
        iterations = range(done.iterations)
        objects = fleet.cluster.bucket.objects
        records = records_of(objects)
        shards = [commit for record in records for commit in record.commits if isinstance(commit, ShardCommit)]
        times = Counter((shard.iteration, shard.shard) for shard in shards)
        assert times == Counter((iteration, shard) for iteration in iterations for shard in range(work.shards))
        stored = {key for key in objects if key.startswith("trajectories/")}
        assert stored == {shard.data.key for shard in shards}, "no row is there twice, and none is gone"
        for shard in shards:
            rows = driver.store.read_shard(shard.data)
            assert rows["tokens"].to_pylist() == work.tokens(shard.iteration, shard.shard)
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "workers", "seconds"),
    [
        (Work(replicas=1, prompts=256, prompts_per_shard=8), 4, 600.0),
        (Work(replicas=1, prompts=1024), 8, 3600.0),
    ],
    ids=["ten minutes", "an hour"],
)
def test_killed_workers_cost_the_share_of_time_in_which_they_are_gone(work: Work, workers: int, seconds: float) -> None:
    whole, cut = hour(work, workers, seconds, None), hour(work, workers, seconds, 300.0)
    assert cut.kills >= workers // 2 * (seconds // 300 - 1)
    assert 0.7 < cut.alive < 0.95
    assert cut.tokens_per_s > 0.9 * cut.alive * whole.tokens_per_s
    assert cut.by_workers > 0.5


def test_a_shard_that_another_process_has_committed_may_be_complete_here() -> None:
    fleet = Fleet(SMALL, workers=0)
    with (
        fleet.alone() as driver,
        GenerationRunner[GenerateConfig, GenerateSummary](driver, 0, GENERATES.name) as generation,
    ):
        job = ShardJob(driver, GENERATES, 0, {}, 0, shards_of(driver), StageHandle(GENERATES.name))
        generation.open([job.request(0)])
        fleet.time.sleep(300.0)  # it is complete, and the replica has reported it
        generation.drop([job.request(0).key])
        assert generation.next_complete() == {}


def test_a_worker_goes_on_after_a_stage_that_ended_before_its_journal() -> None:
    """Its journal of the stage is late."""
    fleet = Fleet(SMALL, workers=0)
    with fleet.alone() as driver:
        machine = Machine(fleet.cluster, driver.config)
        worker = machine.join()
        with GenerationRunner[GenerateConfig, GenerateSummary](worker, 0, GENERATES.name) as generation:
            attempt = worker.store.begin_attempt(0, GENERATES.name)
            job = ShardJob(worker, GENERATES, 0, {}, attempt, shards_of(worker), StageHandle(GENERATES.name))
            generation.open([job.request(0)])
            fleet.time.sleep(6.0)
            run_rows(driver, GENERATES, 0, {}, StageHandle(GENERATES.name))
            generation.journal()
        assert not machine.store.journals(0, GENERATES.name)
        assert not [key for key in fleet.cluster.bucket.objects if key.startswith("journals/")], "its files are deleted"


def test_a_worker_waits_for_a_driver_without_asking_the_store_at_every_moment() -> None:
    fleet = Fleet(SMALL, workers=0)
    with fleet.alone() as driver:
        machine, group = Machine(fleet.cluster, driver.config), Group()
        fleet.time.start(machine.run, "driver", group)
        fleet.time.sleep(300.0)
        assert len(driver.store.log.read().shards[GENERATES.name]) == shards_of(driver)
        before = fleet.cluster.bucket.requests.total()
        fleet.time.sleep(100.0)
        asked = fleet.cluster.bucket.requests.total() - before
        fleet.time.kill(group)
        fleet.time.sleep(1.0)
    assert asked < 100 / LOOK_S + 200, "one at each look, and those of beats"


@pytest.mark.parametrize(("temperature", "kept"), [(1.0, True), (0.5, False)])
def test_a_worker_continues_from_no_journal_of_another_config(temperature: float, kept: bool) -> None:
    """A new driver discards such a journal, but perhaps later than a worker reads it."""
    work = Work(replicas=1, prompts=16, n=2, journal_s=5.0)
    fleet = Fleet(work, workers=0)
    with fleet.alone() as driver:
        with GenerationRunner[GenerateConfig, GenerateSummary](driver, 0, GENERATES.name) as generation:
            job = ShardJob(driver, GENERATES, 0, {}, 0, shards_of(driver), StageHandle(GENERATES.name))
            generation.open([job.request(0)])
            fleet.time.sleep(6.0)
            generation.journal()
            generation.drop([job.request(0).key])
        second = RunStore(ObjectStore("memory", fleet.cluster.bucket, clock=fleet.time))
        first = second.log.read().claim
        assert first is not None
        config = driver.config.with_values({"rollout.temperature": temperature})
        second.log.claim(first.model_copy(update={"config": config.model_dump(mode="json")}))
        machine, group = Machine(fleet.cluster, config), Group()
        fleet.time.start(machine.run, "driver", group)
        fleet.time.sleep(300.0)
        fleet.time.kill(group)
        fleet.time.sleep(1.0)
        assert len(second.log.read().shards[GENERATES.name]) == 1
    assert (machine.kept > 0) == kept


def test_signs_of_life_of_the_dead_are_deleted() -> None:
    fleet = Fleet(SMALL, workers=2)
    objects = fleet.cluster.bucket.objects
    with fleet.driver() as driver:
        fleet.kill_half_every(30.0, driver.config)
        run_rows(driver, GENERATES, 0, {}, StageHandle(GENERATES.name))
        assert fleet.kills >= 1
        fleet.time.sleep(40.0)
        driver.neighbours.alive()
        fleet.time.sleep(40.0)
        alive = driver.neighbours.alive()
        found = {key.removeprefix(WORKERS).removesuffix(".json") for key in objects if key.startswith(WORKERS)}
        assert found <= alive


def test_a_worker_without_a_run_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no driver has started a run at file://{tmp_path}/none"):
        rollout_worker.work(f"file://{tmp_path}/none")


class Meanwhile(Memory):
    """A store in which something happens just before the run is listed for the third time: `vacuum` has claimed it."""

    def __init__(self) -> None:
        super().__init__()
        self.listings = 0
        self.happens: Callable[[], None] = lambda: None

    def list(self, prefix: str) -> list[str]:
        self.listings += prefix == ""
        if prefix == "" and self.listings == 3:
            self.happens()
        return super().list(prefix)


def claimed(objects: ObjectStore) -> RunStore:
    store = RunStore(objects)
    first = {"actor": Weights(version=0, digest="first")}
    store.log.claim(Claim(config={}, code="", packages={}, threads=1, host="here", initial=first))
    return store


@pytest.mark.parametrize("is_committed", [False, True])
def test_vacuum_keeps_what_a_worker_writes_meanwhile(is_committed: bool) -> None:
    """A worker joins the claim of `vacuum`, as that of any newer driver."""
    memory = Meanwhile()
    objects = ObjectStore("memory", memory, clock=Clock())
    claimed(objects)
    worker = RunStore(objects)
    written: list[ShardCommit] = []

    def work() -> None:
        worker.join("worker")
        rows = pa.table({"trajectory_id": ["it000000-p00000-s00"]})
        data = worker.write_shard(0, "generate", worker.begin_attempt(0, "generate"), 0, rows)
        shard = ShardCommit(iteration=0, stage="generate", shard=0, term=worker.log.term, data=data, seconds=0.0)
        written.append(shard)
        if is_committed:
            worker.commit(shard)

    memory.happens = work
    vacuuming = RunStore(objects)
    vacuuming.log.read()
    vacuum(vacuuming)
    assert worker.log.term == 2
    if not is_committed:
        worker.commit(*written)
    assert worker.read_shard(worker.committed_shards("generate")[0].data).num_rows == 1
