"""Async rewards: many at a time, and each has its own fate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.rlhf.rewards import reward_processes
from ratchet.rlhf.rewards.functions import RewardFailed, Score
from ratchet.rlhf.rewards.reward_processes import RewardPool
from tests.scoring import pool_of, trajectory

REWARDS = """
import asyncio, os, time

ALL, AT_ONCE = asyncio.Barrier(4), asyncio.Semaphore(4)

async def meets(solution_str, **_):
    '''Goes on once four are there, and there may be no fifth.'''
    assert not AT_ONCE.locked()
    async with AT_ONCE:
        await ALL.wait()
        return float(solution_str)

async def hostile(solution_str, **_):
    '''Does what its response says.'''
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "hang":
        await asyncio.Event().wait()
    if solution_str == "refuse":
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
    if solution_str == "cancel":
        raise asyncio.CancelledError
    if solution_str == "block":
        time.sleep(3600)
    if solution_str == "die":
        os._exit(7)
    if solution_str == "fork":
        return 1.0 if os.fork() else 0.5
    return 1.0

async def half(solution_str, **_):
    return 0.5

def plain(solution_str, **_):
    return {"raise": None}.get(solution_str, 2.0)

async def later(group):
    return [float(trajectory.solution_str) for trajectory in group]

async def hangs_for_a_group(group):
    if group[0].solution_str == "hang":
        await asyncio.Event().wait()
    return [1.0 for _ in group]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "async_rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def hostile(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardPool]:
    monkeypatch.setattr(reward_processes, "BLOCKED_S", 1.0)
    started = pool_of({f"{file}:hostile": 1.0}, workers=2, timeout_s=2.0)
    yield started
    started.close()


def test_as_many_calls_run_at_a_time_as_may(file: Path) -> None:
    started = pool_of({f"{file}:meets": 1.0}, workers=2, concurrency=4)
    found = started.score([trajectory("any", str(number)) for number in range(16)])
    started.close()
    assert found == [Score(float(number), {}) for number in range(16)]


def test_each_async_call_has_its_own_fate(hostile: RewardPool) -> None:
    asked = ["good", "raise", "hang", "refuse", "cancel", "good", "die", "fork", "good"]
    found = dict(zip(asked, hostile.score([trajectory("any", text) for text in asked]), strict=True))
    for response in ("good", "fork"):
        assert found[response] == Score(1.0, {}), response
    for response, says in (
        ("raise", "KeyError: 'no such thing'"),
        ("hang", "took longer than reward.timeout_s 2 s"),
        ("refuse", "took longer than reward.timeout_s 2 s"),
        ("cancel", "raised CancelledError"),
        ("die", "exit code 7"),
    ):
        assert isinstance(found[response], RewardFailed), response
        assert says in str(found[response])
        assert f"response '{response}'" in str(found[response])
    assert hostile.score([trajectory("any", "good")]) == [Score(1.0, {})], "what refuses to end holds nothing up"


def test_who_blocks_the_event_loop_is_found(hostile: RewardPool) -> None:
    found = hostile.score([trajectory("any", text) for text in ("good", "block", "good")])
    assert [isinstance(outcome, Score) for outcome in found] == [True, False, True]
    assert "blocked its event loop for longer than reward.timeout_s 2 s" in str(found[1])
    assert "response 'block'" in str(found[1])


def test_plain_and_async_rewards_are_weighed_together(file: Path) -> None:
    functions = {f"{file}:plain": 1.0, f"{file}:half": 2.0, f"{file}:later": 10.0}
    started = pool_of(functions, workers=2)
    texts = ["1", "raise", "3"]
    first, failed, third = started.score([trajectory("any", text, prompt_id=text) for text in texts])
    started.close()
    parts = {f"{file}:plain": 2.0, f"{file}:half": 0.5}
    assert first == Score(13.0, {**parts, f"{file}:later": 1.0})
    assert third == Score(33.0, {**parts, f"{file}:later": 3.0})
    assert "is None: return a number" in str(failed), "of the first function that failed"


def test_a_group_has_the_time_of_each_response(file: Path) -> None:
    started = pool_of({f"{file}:hangs_for_a_group": 1.0}, timeout_s=0.5)
    responses = [("good", "p0"), ("hang", "p1"), ("good", "p1"), ("hang", "p2"), ("good", "p0")]
    found = started.score([trajectory("any", text, prompt_id=prompt) for text, prompt in responses])
    started.close()
    assert [isinstance(outcome, Score) for outcome in found] == [True, False, False, False, True]
    assert "reward.timeout_s 0.5 s for each of 2 responses" in str(found[2])
    assert "the 2 responses to prompt p1" in str(found[2])
    assert "for each" not in str(found[3])
