"""Generating on many replicas takes no longer than it must, by the real driver in virtual time."""

from __future__ import annotations

import pytest

from ratchet.infra.store.manifest import Manifest
from tests.tiers import sampled
from tests.virtual.cluster import Cluster, Iteration, Speeds, Work
from tests.virtual.time import NothingHappens, VirtualTime

FEW = Work(replicas=8, prompts=512)
HOUR = 3600.0


def generated(
    work: Work, lost_at: float | None = None, speeds: Speeds | None = None
) -> tuple[Iteration, Manifest, Cluster]:
    cluster = Cluster(work, speeds or Speeds())
    with cluster.driver() as driver:
        if lost_at is not None:
            cluster.lose_at(lost_at)
        iteration, manifest = cluster.generated(driver)
    assert sum(shard.rows for shard in manifest.shards) == work.prompts * work.n
    assert manifest.metrics["perf/generated_tokens"] == sum(work.all_tokens())
    assert iteration.left_open == 0, "every replica has closed every shard"
    return iteration, manifest, cluster


def digests(manifest: Manifest) -> list[str]:
    return [shard.sha256 for shard in manifest.shards]


@sampled(4)
@pytest.mark.parametrize(
    ("work", "busy"),
    [
        (Work(replicas=16, prompts=1024, max_in_flight=256), 0.8),
        # shards of 4 prompts are opened and written four times as often
        (Work(replicas=16, prompts=1024, max_in_flight=256, prompts_per_shard=4, seed=1), 0.5),
        (Work(replicas=16, prompts=1024, max_in_flight=256, sigma=0.3, seed=2), 0.8),
        # the last trajectory begins after a few seconds, in which the shards are opened
        (Work(replicas=32, prompts=2048), 0.3),
    ],
    ids=["log-normal", "small shards", "equal lengths", "all at once"],
)
def test_no_replica_waits_for_another(work: Work, busy: float) -> None:
    iteration, _, cluster = generated(work)
    assert iteration.ratio < 0.95, "no worse than the longest trajectory after all others"
    assert iteration.least_busy > busy, "from the start, when none has anything to do"
    assert iteration.core < 0.5
    journals = iteration.seconds / 30
    assert iteration.requests["create"] <= work.shards + 10
    assert iteration.requests["put"] <= work.shards + 1 + work.replicas * journals
    assert iteration.requests["get"] + iteration.requests["list"] + iteration.requests["delete"] <= work.shards + 20
    # S3 answers 3,500 and 5,500
    assert iteration.most_per_s["all", "writes"] < 350
    assert iteration.most_per_s["all", "reads"] < 50
    assert not cluster.bucket.refused


@pytest.mark.slow
def test_64_replicas_generate_100_000_trajectories() -> None:
    iteration, _, cluster = generated(Work(replicas=64, prompts=12_500))
    assert iteration.ratio < 0.9
    assert iteration.least_busy > 0.5, "it opens and writes shards while it does not generate"
    assert iteration.core < 0.5
    assert iteration.most_per_s["all", "writes"] < 350
    assert not cluster.bucket.refused


def test_a_seed_gives_one_course() -> None:
    (first, manifest, _), (second, again, _) = generated(FEW), generated(FEW)
    assert (first.seconds, first.requests) == (second.seconds, second.requests)
    assert digests(manifest) == digests(again)


def test_a_store_that_refuses_what_is_too_much_costs_seconds() -> None:
    """One that is a hundred times slower than S3, and a process that is lost: all replicas read the journal of all."""
    work = Work(replicas=8, prompts=512, journal_s=10.0)
    whole, manifest, _ = generated(work, lost_at=25.0)
    cut, again, cluster = generated(work, lost_at=25.0, speeds=Speeds(reads_per_s=10, writes_per_s=5))
    assert cluster.bucket.refused > 20
    assert cut.most_per_s["all", "reads"] <= 10
    assert digests(manifest) == digests(again)
    assert cut.seconds - whole.seconds < 20


def test_a_lost_replica_costs_a_restart_and_what_came_after_the_journal() -> None:
    work = Work(replicas=8, prompts=1024, journal_s=10.0)
    whole, manifest, _ = generated(work)
    cut, again, cluster = generated(work, lost_at=25.0)
    assert digests(manifest) == digests(again)
    assert cluster.kept > 0
    assert 0 < cut.redrawn < 12.0 * work.replicas * cluster.speeds.tokens_per_s
    assert cut.seconds - whole.seconds < cluster.speeds.restart + 12.0 + 10.0


def lost_every(seconds: float, work: Work, iterations: int) -> tuple[float, int, list[Iteration]]:
    """Returns the seconds that losses cost, their number, and the iterations with them."""
    whole, cut = Cluster(work), Cluster(work)
    with whole.driver() as driver:
        whole.iterations(driver, iterations)
        took = whole.time.now
    with cut.driver() as driver:
        cut.lose_every(seconds)
        done = cut.iterations(driver, iterations)
        return cut.time.now - took, cut.losses, done


@pytest.mark.slow
def test_each_of_several_losses_costs_as_much_as_one() -> None:
    work = Work(replicas=8, prompts=256, journal_s=10.0)
    cost, losses, done = lost_every(300.0, work, iterations=6)
    assert losses >= 4
    assert cost < losses * (Speeds.restart + 20.0)
    # at most the tokens since the last journal of all replicas
    assert sum(iteration.redrawn for iteration in done) < losses * 12.0 * work.replicas * Speeds.tokens_per_s


@pytest.mark.slow
def test_a_node_lost_every_hour_costs_a_twentieth_of_the_time() -> None:
    work = Work(replicas=16, prompts=512)
    cost, losses, _ = lost_every(HOUR, work, iterations=35)
    assert losses >= 1
    assert cost < losses * HOUR / 20


def test_log_and_manifests_grow_with_the_shards_only() -> None:
    cluster = Cluster(FEW)
    with cluster.driver() as driver:
        first, *later = cluster.iterations(driver, 4)
    for iteration in later:
        assert iteration.written.keys() == first.written.keys()
        for folder in ("log", "index", "manifests"):
            assert 0.8 < iteration.written[folder] / first.written[folder] < 1.2
            # a record's envelope, an index's and a manifest's config and metrics
            assert iteration.written[folder] < 450 * FEW.shards + 15_000


def test_a_wait_that_nothing_can_end_is_an_error() -> None:
    time = VirtualTime()
    time.sleep(3.0)
    with pytest.raises(NothingHappens, match=r"at 3\.000 s"):
        time.wait()
