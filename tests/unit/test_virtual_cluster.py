"""Generating on many replicas takes no longer than it must, by the real driver in virtual time."""

from __future__ import annotations

import pytest

from ratchet.infra.store.manifest import Manifest
from tests.virtual.cluster import Cluster, Iteration, Work
from tests.virtual.time import NothingHappens, VirtualTime

FEW = Work(replicas=8, prompts=512)


def generated(work: Work, lost_at: float | None = None) -> tuple[Iteration, Manifest, Cluster]:
    cluster = Cluster(work)
    with cluster.driver() as driver:
        if lost_at is not None:
            cluster.lose_at(lost_at)
        iteration, manifest = cluster.generated(driver)
    assert sum(shard.rows for shard in manifest.shards) == work.prompts * work.n
    assert manifest.metrics["perf/generated_tokens"] == sum(work.all_tokens)
    assert iteration.left_open == 0, "every replica has closed every shard"
    return iteration, manifest, cluster


@pytest.mark.parametrize(
    "work",
    [
        Work(replicas=16, prompts=2048, max_in_flight=256),
        Work(replicas=16, prompts=2048, max_in_flight=256, prompts_per_shard=4, seed=1),
        Work(replicas=16, prompts=2048, max_in_flight=256, sigma=0.3, seed=2),
    ],
    ids=["log-normal", "small shards", "equal lengths"],
)
def test_no_replica_waits_for_another(work: Work) -> None:
    iteration, _, _ = generated(work)
    assert iteration.ratio < 1.1
    # from the start, when none has anything to do; shards of 4 prompts are opened and written four times as often
    assert iteration.least_busy > (0.8 if work.prompts_per_shard == 16 else 0.5)
    shards = -(-work.prompts // work.prompts_per_shard)
    assert iteration.requests["create"] <= shards + 10
    journals = iteration.seconds / 30
    assert iteration.requests["put"] <= shards + 1 + work.replicas * journals
    assert iteration.requests["get"] + iteration.requests["list"] + iteration.requests["delete"] <= shards + 20


@pytest.mark.slow
def test_64_replicas_generate_100_000_trajectories() -> None:
    iteration, _, _ = generated(Work(replicas=64, prompts=12_500))
    assert iteration.ratio < 1.1
    assert iteration.least_busy > 0.5, "it opens and writes shards while it does not generate"
    assert iteration.cpu_s < 100_000 * 0.001
    assert iteration.most_requests_per_s < 550


def test_a_seed_gives_one_course() -> None:
    (first, manifest, _), (second, again, _) = generated(FEW), generated(FEW)
    assert (first.seconds, first.requests) == (second.seconds, second.requests)
    assert [shard.sha256 for shard in manifest.shards] == [shard.sha256 for shard in again.shards]


def test_a_lost_replica_costs_a_restart_and_what_came_after_the_journal() -> None:
    work = Work(replicas=8, prompts=1024, journal_s=10.0)
    whole, manifest, _ = generated(work)
    cut, again, cluster = generated(work, lost_at=25.0)
    assert [shard.sha256 for shard in manifest.shards] == [shard.sha256 for shard in again.shards]
    assert cluster.kept > 0
    reading = 2 * cluster.speeds.journal * cluster.kept  # by the first replica, then by the others
    assert cut.seconds - whole.seconds < cluster.speeds.restart + 10.0 + reading + 10.0


def test_a_wait_that_nothing_can_end_is_an_error() -> None:
    time = VirtualTime()
    time.sleep(3.0)
    with pytest.raises(NothingHappens, match=r"at 3\.000 s"):
        time.wait()
