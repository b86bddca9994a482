"""Stages side by side, without models: order, overlap, and what becomes of errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ratchet.infra.execution.executors import Executors, InputLost, StageHandle
from ratchet.infra.store.manifest import Fingerprint, Manifest
from ratchet.infra.store.records import (
    Ahead,
    Claim,
    Finalize,
    ObjectRef,
    RunState,
    ShardCommit,
    ShardRef,
    StageCommit,
    Weights,
)
from ratchet.rlhf.errors import NotFinite, RatchetError

SHARD = ShardRef(key="k", sha256="s", rows=1, bytes=1)


def manifest(stage: str) -> Manifest:
    fingerprint = Fingerprint(parts={})
    return Manifest(
        iteration=0, stage=stage, term=1, attempt=0, fingerprint=fingerprint, config={}, shards=(SHARD,) * 3
    )


@pytest.fixture
def executors() -> Iterator[Executors]:
    executors = Executors()
    yield executors
    executors.close()


def fails(error: BaseException) -> Callable[[StageHandle], Manifest]:
    def run(handle: StageHandle) -> Manifest:
        raise error

    return run


def test_a_stage_goes_on_as_soon_as_a_shard_is_there(executors: Executors) -> None:
    seen: list[str] = []
    read = threading.Semaphore(0)

    def writes(handle: StageHandle) -> Manifest:
        handle.expect(3)
        for number in range(3):
            seen.append(f"wrote {number}")
            handle.show(dict.fromkeys(range(number + 1), SHARD))
            assert read.acquire(timeout=60), "nobody reads while it writes"
        return manifest("one")

    def reads(handle: StageHandle) -> Manifest:
        for number in range(first.count()):
            first.shard(number)
            seen.append(f"read {number}")
            read.release()
        first.manifest()
        return manifest("two")

    first = executors.start("a", "one", writes)
    second = executors.start("b", "two", reads)
    executors.join()
    assert seen == [f"{what} {number}" for number in range(3) for what in ("wrote", "read")]
    assert second.manifest().stage == "two"


def test_stages_of_an_executor_keep_their_order(executors: Executors) -> None:
    seen: list[int] = []

    def run(number: int) -> Callable[[StageHandle], Manifest]:
        def stage(handle: StageHandle) -> Manifest:
            time.sleep(0.01 * (3 - number))
            seen.append(number)
            return manifest(str(number))

        return stage

    for number in range(4):
        executors.start("a", str(number), run(number))
    executors.join()
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("also", [None, NotFinite("nan")])
def test_the_first_error_is_raised_and_not_what_follows_from_it(executors: Executors, also: NotFinite | None) -> None:
    """Nor one that may be passed over, since an update would then be given up for good."""
    ran: list[str] = []
    if also is not None:
        executors.start("c", "nan", fails(also))
    broken = executors.start("a", "broken", fails(RatchetError("the store is away")))
    executors.start("b", "after", lambda handle: broken.manifest())
    executors.start("b", "later", lambda handle: ran.append("later") or manifest("later"))
    with pytest.raises(RatchetError, match="the store is away"):
        executors.join()
    assert not ran, "what would be computed in vain is not begun"
    executors.start("a", "fresh", lambda handle: manifest("fresh"))
    executors.join()


def test_an_error_of_the_driver_ends_the_stages_too(executors: Executors) -> None:
    began = threading.Event()
    shards = 0

    def endless(handle: StageHandle) -> Manifest:
        nonlocal shards
        began.set()
        while True:
            handle.check()
            shards += 1
            time.sleep(0.01)

    def meanwhile() -> None:
        if began.wait(60):
            raise RatchetError("of the driver")

    executors.start("a", "endless", endless)
    with pytest.raises(RatchetError, match="of the driver"):
        executors.join(meanwhile)
    then = shards
    time.sleep(0.05)
    assert shards == then


def test_what_runs_ahead_is_waited_for_when_its_turn_comes(executors: Executors) -> None:
    go = threading.Event()
    executors.start("a", "ahead", fails(RatchetError("ahead")), ahead=True)
    good = executors.start("b", "good", lambda handle: go.wait(60) and manifest("good"), ahead=True)
    executors.join()
    assert not go.is_set()
    go.set()
    assert good.manifest().stage == "good"
    bad = executors.start("a", "again", fails(RatchetError("again")), ahead=True)
    executors.adopt(bad)
    with pytest.raises(RatchetError, match="again"):
        executors.join()
    with pytest.raises(InputLost, match="again has failed"):
        bad.manifest()


def claim(ahead: int = 2) -> Claim:
    return Claim(config={}, code="c", packages={}, threads=1, host="h", ahead=ahead, initial={})


def test_what_is_ahead_becomes_what_is_open() -> None:
    """With its prompts, and with the terms of whoever generated it: a third driver asks what config it had."""
    state = RunState(weights={"actor": Weights(version=0, digest="d")}, starting={})
    ref = ObjectRef(key="index", sha256="s")

    def shard(iteration: int, number: int, term: int) -> ShardCommit:
        return ShardCommit(iteration=iteration, stage="generate", shard=number, term=term, data=SHARD, seconds=0.0)

    def stage(iteration: int, cursor: int) -> StageCommit:
        return StageCommit(iteration=iteration, stage="generate", manifest=ref, fingerprint="f", cursor=cursor)

    def close(iteration: int) -> Finalize:
        return Finalize(iteration=iteration, index=ref, metrics=SHARD)

    for term, commits in (
        (1, [claim(), stage(0, 10), shard(1, 0, 1), shard(1, 1, 1), stage(1, 20), shard(2, 0, 1)]),
        (2, [claim(), close(0)]),
    ):
        for commit in commits:
            state.apply_commit(commit, term)
    assert (state.iteration, state.cursor, state.cursor_before(2, 10)) == (1, 20, 20)
    assert set(state.stages) == {"generate"}
    assert state.shards["generate"].keys() == {0, 1}
    assert isinstance(state.ahead[2], Ahead)
    assert state.open_terms.keys() == {1, 2}, "a shard of the first is not complete"
    state.apply_commit(close(1), 2)
    assert state.shards["generate"].keys() == {0}
    assert not state.ahead
    assert not state.stages
    assert state.cursor_before(2, 10) == 20
    assert state.cursor_before(4, 10) == 40, "iterations 2 and 3 will draw as many"
    state.apply_commit(stage(3, 40), 2)  # it was complete before iteration 2
    assert (state.cursor_before(2, 10), state.cursor_before(3, 10), state.cursor_before(4, 10)) == (20, 30, 40)
