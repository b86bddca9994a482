"""Computes rewards in its own process. `pool` starts it and talks to it through a pipe."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ratchet.rlhf.built_in_rewards import JUDGE
from ratchet.rlhf.errors import RatchetError
from ratchet.rlhf.rewards.functions import (
    FAILURES,
    Outcome,
    Reward,
    RewardFailed,
    Score,
    Trajectory,
    is_failure,
    place_of,
    took_too_long,
)
from ratchet.rlhf.rewards.registry import load_reward

Send = Callable[[Mapping[str, Any]], None]
BEATS = 4
"""Signs of life per `reward.timeout_s`, at most one a second, while async functions run."""


def main() -> None:
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    watcher = threading.Thread(target=_end_with_parent, args=(parent,), daemon=True)
    watcher.start()
    own_pid = os.getpid()

    def send(message: Mapping[str, Any]) -> None:
        if os.getpid() != own_pid:  # the reward forked, and its child got here, too
            os._exit(0)
        pipe.send_bytes(json.dumps(message).encode())

    try:
        task = json.loads(pipe.recv_bytes())
        # imports what the parent's process can import
        sys.path[:] = task["path"]
        answers = _Answers(send)
        try:
            rewards = [_load(name, options, task, answers) for name, options in task["rewards"].items()]
        except RatchetError as error:
            return send({"error": str(error)})
        send(
            {
                "rewards": [
                    [reward.is_async, reward.takes_several, reward.takes_group, reward.takes_ids] for reward in rewards
                ]
            }
        )
        asked: deque[dict[str, Any]] = deque()

        def receive() -> None:
            message = json.loads(pipe.recv_bytes())
            if "requests" in message:
                asked.append(message)
            else:
                answers.receive(message)

        process = _Process(rewards, task["timeout_s"], task["concurrency"], send)
        runner = asyncio.Runner()  # a single one: its end would wait for calls that outlive their time limit
        while True:
            while not asked:
                receive()
            message = asked.popleft()
            if message["concurrently"]:
                runner.run(process.score_concurrently(message["requests"], pipe.fileno(), receive))
            else:
                process.score_in_order(message["requests"])
    except (EOFError, OSError):  # the parent has died: the watcher also ends what a reward has started
        watcher.join()


def _load(name: str, options: Mapping[str, Any], task: Mapping[str, Any], answers: _Answers) -> Reward:
    function = load_reward(name)
    if name != JUDGE:
        return Reward(name, function, options)
    from ratchet.rlhf.rewards.chat import ChatClient  # imported here: other rewards start faster without it

    how = {name: options[name] for name in ("mode", "rubric")}
    server = {name: value for name, value in options.items() if name not in how}
    chat = ChatClient(**server, timeout_s=task["timeout_s"], concurrency=task["concurrency"], answers=answers)
    return Reward(name, function, {**how, "chat": chat})


class _Process:
    """Scores the pool's requests.

    A request names functions and holds trajectories: a single one, or all of a prompt for a function that takes them
    together. Its outcomes are a list for each function, with an entry for each trajectory.
    """

    def __init__(self, rewards: Sequence[Reward], timeout_s: float, concurrency: int, send: Send) -> None:
        self._rewards, self._timeout_s, self._concurrency, self._send = rewards, timeout_s, concurrency, send

    def score_in_order(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Scores one request after the other. The pool watches their time."""
        for number, request in enumerate(requests):
            group = [Trajectory(**trajectory) for trajectory in request["group"]]
            self._send({"begun": number})
            outcomes: list[list[Outcome]] = []
            for index in request["rewards"]:
                outcomes.append(self._rewards[index].score(group))
                # without this function's score there is no total, so the others are not called
                if all(map(is_failure, outcomes[-1])):
                    outcomes += [outcomes[-1]] * (len(request["rewards"]) - len(outcomes))
                    break
            self._done(number, outcomes)

    async def score_concurrently(
        self, requests: Sequence[Mapping[str, Any]], pipe: int, receive: Callable[[], None]
    ) -> None:
        """Scores requests of async functions concurrently, each within its time limit. Each names one function."""
        loop, slots = asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency)

        def readable() -> None:
            try:
                receive()
            except (EOFError, OSError):  # the parent has died, and the watcher ends this process
                loop.remove_reader(pipe)

        async def score(number: int, request: Mapping[str, Any]) -> None:
            async with slots:
                self._send({"begun": number})
                [index] = request["rewards"]
                group = [Trajectory(**trajectory) for trajectory in request["group"]]
                self._done(number, [await self._one(self._rewards[index], group)])

        loop.add_reader(pipe, readable)
        beating = loop.create_task(self._beat())
        try:
            await asyncio.gather(*(score(number, request) for number, request in enumerate(requests)))
        finally:
            beating.cancel()
            loop.remove_reader(pipe)

    async def _one(self, reward: Reward, group: Sequence[Trajectory]) -> list[Outcome]:
        """Returns the outcomes of a call."""
        # the judge limits each of its requests instead: it may have to wait for its turn
        limit = None if reward.name == JUDGE else self._timeout_s * len(group)
        scoring = asyncio.create_task(reward.score_async(group))
        await asyncio.wait({scoring}, timeout=limit)
        if not scoring.done():
            scoring.cancel()  # not awaited, because it may refuse
            return [took_too_long(self._timeout_s, group)] * len(group)
        if scoring.cancelled():
            return [RewardFailed(f"the reward raised CancelledError ({place_of(group)})")] * len(group)
        return scoring.result()

    async def _beat(self) -> None:
        while True:
            self._send({"alive": True})
            await asyncio.sleep(min(self._timeout_s / BEATS, 1.0))

    def _done(self, number: int, outcomes: Sequence[Sequence[Outcome]]) -> None:
        self._send({"done": number, "outcomes": [[_as_json(outcome) for outcome in scores] for scores in outcomes]})


class _Answers:
    """Answers that the pool's process keeps; see `chat.AnswerCache`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def get(self, digest: str) -> str | None:
        answer: str | None = await self._ask({"get": digest})
        return answer

    async def keep(self, digest: str, answer: str) -> str:
        kept: str = await self._ask({"keep": digest, "answer": answer})
        return kept

    async def _ask(self, message: Mapping[str, Any]) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send({**message, "number": number})
        return await self._waiting[number]

    def receive(self, message: Mapping[str, Any]) -> None:
        """Takes the pool's reply."""
        future = self._waiting.pop(message["number"])
        if not future.done():
            future.set_result(message["answer"])


def _as_json(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Score):
        return {"score": outcome.score, "parts": outcome.parts, "left_out": dict(outcome.left_out)}
    kind = next(name for name, failure in FAILURES.items() if isinstance(outcome, failure))
    return {"error": str(outcome), "kind": kind}


def _end_with_parent(parent: int) -> None:
    """Ends this process group when the parent dies: a killed parent cannot do it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
