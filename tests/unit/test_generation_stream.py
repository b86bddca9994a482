"""Streaming generation: whatever happens while trajectories are written, each ends up once, as if it was undisturbed.

The engine of these tests is deterministic, and stands still until a rule releases tokens: trajectories become complete
in any order, and nothing depends on time. The event loop runs in the test's thread until it has nothing left to do, so
that a call that would wait forever is known at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from infra.execution.replicas import Complete, Feed, Prompt, Reports
from infra.store.records import Weights
from infra.workers.calls import Call, Context, RowsCall, ShardKey, ShardStart
from infra.workers.rollouts import Generated, Rollouts
from infra.workers.worker import JOURNAL
from rlhf.engines import event_loop
from rlhf.engines.base import Chunk, Request, RolloutEngine, Sampling, limit_of
from rlhf.engines.generation import Generator, Rules
from rlhf.environments import Observation
from rlhf.environments.calls import EnvironmentCalls
from rlhf.environments.dialogues import Beginning, Dialogue
from rlhf.errors import EngineLost

T = TypeVar("T")

LETTERS = ".abcdefg\n?"
EOS, STOP = LETTERS.index("."), LETTERS.index("g")
SEEDS = {"generate": 0, "validate": 1}
"""Two stages with the same trajectory ids."""
MACHINE = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


# What an undisturbed run gives.


def draw(*of: object) -> int:
    """A number that depends on nothing else."""
    return int.from_bytes(sha256(repr(of).encode()).digest()[:4], "big")


def next_token(name: str, ids: Sequence[int]) -> int:
    """The token of a trajectory that follows these, of prompt and response."""
    return draw(name, len(ids), list(ids)) % LETTERS.index("\n")


def log_prob(token: int, version: int) -> float:
    """A float32."""
    return -version - (token + 1) / 16


def answer(turns: Sequence[str]) -> Observation:
    """What an environment says after these turns of the policy."""
    number = draw(list(turns))
    says = (None, "ab", "c", "", "?", [{"role": "user", "content": "d"}])
    return Observation(says[number % len(says)], number % 7 / 8)


@dataclass
class Outcome:
    """All of a complete trajectory that does not depend on the weights."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    reward: float = 0.0
    finish_reason: str = ""

    @classmethod
    def of(cls, dialogue: Dialogue) -> Outcome:
        return cls(**{name: getattr(dialogue, name) for name in cls.__dataclass_fields__})


def undisturbed(name: str, request: Request, rules: Rules) -> Outcome:
    """What a trajectory becomes; `name` is the engine's name for it."""
    outcome, turns = Outcome(), list[str]()
    own = rules.sampling.max_tokens if request.max_tokens is None else request.max_tokens
    limit = min(own, rules.sampling.max_tokens)
    while not outcome.finish_reason:
        start = len(outcome.ids)
        outcome.turn_starts.append(start)
        reason = None
        while reason is None:
            token = next_token(name, [*request.prompt_ids, *outcome.ids])
            outcome.ids.append(token)
            outcome.mask.append(1)
            ends = token == EOS or (rules.environments is not None and token == STOP)
            reason = "stop" if ends else "length" if len(outcome.ids) == limit else None
        outcome.turn_ends.append(len(outcome.ids))
        if rules.environments is None or reason == "length":
            outcome.finish_reason = reason
            break
        turns.append(text_of(outcome.ids[start:]))
        observation = answer(turns)
        outcome.reward += observation.reward
        says = observation.content
        heard = ids_of(says if isinstance(says, str) else "\nd\n")
        if says is None:
            outcome.finish_reason = "stop"
        elif len(turns) == rules.max_turns:
            outcome.finish_reason = "turns"
        elif len(outcome.ids) + len(heard) >= limit:
            outcome.finish_reason = "length"
        else:
            outcome.ids += heard
            outcome.mask += [0] * len(heard)
    return outcome


def text_of(ids: Iterable[int]) -> str:
    return "".join(LETTERS[token] for token in ids if token != EOS)


def ids_of(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


class Letters:
    """A tokenizer."""

    chat_template = None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        return text_of(ids)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": ids_of(text)}


# A world that stands still.


class Blocked(Exception):
    """A call waits for something that does not happen by itself."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        super().__init__(f"{task.get_coro()} would wait forever")
        self.task = task


class StillLoop:
    """An event loop that runs, in the caller's thread, until it has nothing left to do."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Takes the place of `event_loop.run`."""
        task = self.loop.create_task(coroutine)
        self.settle()
        if not task.done():
            raise Blocked(task)
        return task.result()

    def settle(self) -> None:
        self.loop.run_until_complete(self._quiet())

    async def _quiet(self) -> None:
        for _ in range(10_000):
            await asyncio.sleep(0)
            if not self.loop._ready:  # type: ignore[attr-defined]  # callbacks that are due
                return
        raise AssertionError("the event loop never comes to rest")

    def end_tasks(self) -> None:
        """As if the process died."""
        for _ in range(3):
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.settle()

    def close(self) -> None:
        self.end_tasks()
        self.loop.close()


class Pace:
    """What each trajectory may do: its credit in steps. A step is a token, an answer of its environment, or the end of
    an engine's stream after the last token."""

    def __init__(self) -> None:
        self.credit = Counter[str]()
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self.drawn = defaultdict[str, set[int]](set)
        """The positions of each trajectory at which there is no need to draw a token again."""
        self.wrong: list[str] = []
        """What an engine noticed."""

    def release(self, name: str, steps: int) -> None:
        self.credit[name] += steps
        self.wake(name)

    def wake(self, name: str) -> None:
        if (future := self.waiting.get(name)) is not None and not future.done():
            future.set_result(None)

    async def woken(self, name: str) -> None:
        assert name not in self.waiting, f"{name} is written twice at the same time"
        self.waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await self.waiting[name]
        finally:
            del self.waiting[name]

    async def step(self, name: str) -> None:
        while not self.credit[name]:
            await self.woken(name)
        self.credit[name] -= 1


class Talker:
    """An environment whose answers depend on all turns so far."""

    stop = (LETTERS[STOP],)
    replayable = True

    def __init__(self, pace: Pace) -> None:
        self.pace, self.turns = pace, list[str]()

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        self.name = ground_truth

    async def step(self, turn: str) -> Observation:
        await self.pace.step(self.name)
        self.turns.append(turn)
        return answer(self.turns)


class Forgetful(Talker):
    """It is not in the same state after the same turns, for all that anybody knows."""

    replayable = False


class Paced(RolloutEngine):
    """An engine that draws as many tokens as a rule releases."""

    def __init__(self, pace: Pace, version: int) -> None:
        self.pace, self.version = pace, version
        self.running: set[str] = set()
        self.joined = 0
        self.is_lost = False

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        name, ids = f"{sampling.seed} {request.trajectory_id}", list(request.prompt_ids)
        left, position = limit_of(request, sampling), request.generated_tokens
        if left <= 0:
            self.pace.wrong.append(f"{name}: a request for {left} tokens")
        self.running.add(name)
        try:
            reason = None
            while reason is None:
                steps = await self._released(name)
                tokens: list[int] = []
                while reason is None and len(tokens) < steps:
                    token = next_token(name, ids)
                    if position in self.pace.drawn[name]:
                        self.pace.wrong.append(f"{name}: token {position} is drawn again")
                    self.pace.drawn[name].add(position)
                    tokens.append(token)
                    ids.append(token)
                    position, left = position + 1, left - 1
                    ends = token == EOS or LETTERS[token] in sampling.stop
                    reason = "stop" if ends else "length" if left == 0 else None
                yield Chunk(tuple(tokens), tuple(log_prob(token, self.version) for token in tokens), reason)
            await self._released(name)  # the end of a stream may come later than its last token
        finally:
            self.running.discard(name)

    async def _released(self, name: str) -> int:
        while not self.is_lost:
            if steps := self.pace.credit.pop(name, 0):
                return steps
            await self.pace.woken(name)
        raise EngineLost("the engine is lost")

    def join(self, count: int) -> None:
        self.joined += count

    def leave(self) -> None:
        self.joined -= 1

    def load(self, version: int) -> None:
        assert not self.running, "new weights arrive while requests are running"
        self.version = version

    def close(self) -> None:
        """Whoever still waits for a token hears that there will be none."""
        self.is_lost = True
        for name in self.running:
            self.pace.wake(name)

    def load_weights(self, *_: Any) -> None: ...

    def place(self, **_: bool) -> None: ...


# Any history.


@dataclass
class Shard:
    """A shard of a stage, over all crashes."""

    key: ShardKey
    kind: type[Talker] | None
    requests: dict[str, Request]
    sampling: Sampling
    max_turns: int
    opened_on: dict[int, dict[str, Dialogue]] = field(default_factory=dict)
    """The trajectories, by replica; none while nobody generates the shard."""
    replica_of: dict[str, int] = field(default_factory=dict)
    """The replica of each trajectory that was submitted."""
    reported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        calls = None if self.kind is None else EnvironmentCalls(self.kind, {})
        rules = Rules(self.sampling, calls, self.max_turns)
        self.outcomes = {
            tid: undisturbed(self.name(tid), request, rules) for tid, request in self.requests.items()
        }

    def name(self, tid: str) -> str:
        """The engine's name for a trajectory."""
        return f"{self.sampling.seed} {tid}"

    def forget(self) -> None:
        """The shard was dropped, or its process died."""
        self.opened_on, self.replica_of, self.reported = {}, {}, set()

    @property
    def written(self) -> dict[str, Dialogue]:
        """The trajectories that were submitted."""
        return {tid: self.opened_on[number][tid] for tid, number in self.replica_of.items()}

    @property
    def is_complete(self) -> bool:
        return self.reported == self.requests.keys()


class Replica:
    """A worker that generates, as `Worker` does."""

    def __init__(self, pace: Pace, version: int, interruptible: bool) -> None:
        self.engine = Paced(pace, version)
        self.interruptible = interruptible
        self.generator: Generator | None = None
        self.rollouts = Rollouts(self.build)
        self.environments = {kind: EnvironmentCalls(kind, {"pace": pace}, concurrency=2) for kind in (Talker, Forgetful)}
        self.pausing: asyncio.Task[None] | None = None
        self.journal: tuple[int, dict[str, dict[str, Any]], dict[str, dict[str, Any]]] = (0, {}, {})
        """The journal that was read last: its number, its rows, and a copy of them."""

    def build(self, engine: RolloutEngine) -> Generator:
        self.generator = Generator(engine, Letters(), interruptible=self.interruptible)
        return self.generator

    @property
    def is_paused(self) -> bool:
        return self.generator is None or self.generator.is_paused


class Streaming(RuleBasedStateMachine):
    def __init__(self, loop: StillLoop) -> None:
        super().__init__()
        self.loop = loop
        self.shards: dict[ShardKey, Shard] = {}
        self.finished = 0
        self.version = 0
        self.pace = Pace()
        self.replicas: list[Replica] = []
        self.changing = False
        """Whether new weights wait until the engines are idle."""
        self.journals: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        """The newest journal of each stage, and its number."""

    @initialize(interruptible=st.booleans())
    def begin(self, interruptible: bool) -> None:
        self.interruptible = interruptible
        self.start()

    def start(self) -> None:
        self.pace = Pace()
        self.replicas = [Replica(self.pace, self.version, self.interruptible) for _ in range(2)]
        self.changing = False

    def teardown(self) -> None:
        self.loop.end_tasks()

    # What happens.

    @precondition(lambda self: len(self.shards) < 4)
    @rule(
        stage=st.sampled_from(list(SEEDS)),
        kind=st.sampled_from([None, Talker, Talker, Forgetful]),
        limits=st.lists(st.sampled_from([None, None, 1, 3, 7]), min_size=1, max_size=4),
        max_tokens=st.integers(2, 14),
        max_turns=st.integers(1, 4),
    )
    def new_shard(
        self, stage: str, kind: type[Talker] | None, limits: list[int | None], max_tokens: int, max_turns: int
    ) -> None:
        number = self.finished + len(self.shards)
        requests = {
            f"p{number}-s{place}": Request(f"p{number}-s{place}", (place // 2 + 1, 2), max_tokens=limit)
            for place, limit in enumerate(limits)
        }
        sampling = Sampling(1.0, 1.0, max_tokens, SEEDS[stage])
        key = (stage, 0, number)
        self.shards[key] = Shard(key, kind, requests, sampling, max_turns)

    @precondition(lambda self: self.shards and not self.changing)
    @rule(data=st.data(), number=st.integers(0, 1), count=st.integers(1, 4))
    def generate_more(self, data: st.DataObject, number: int, count: int) -> None:
        """A replica gets trajectories of a shard, and waits for a moment."""
        shard = self.any_shard(data)
        names = [tid for tid in shard.requests if tid not in shard.replica_of][:count]
        self.generate(number, shard, names)

    @precondition(lambda self: not self.changing)
    @rule(number=st.integers(0, 1))
    def generate_on(self, number: int) -> None:
        """A replica waits for a moment."""
        self.generate(number)

    @precondition(lambda self: self.pace.waiting)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def release(self, data: st.DataObject, steps: int) -> None:
        self.pace.release(data.draw(st.sampled_from(sorted(self.pace.waiting))), steps)
        self.loop.settle()

    @precondition(lambda self: self.pace.waiting)
    @rule(steps=st.integers(1, 3))
    def release_all(self, steps: int) -> None:
        for name in sorted(self.pace.waiting):
            self.pace.release(name, steps)
        self.loop.settle()

    @rule(stage=st.sampled_from(list(SEEDS)))
    def journal(self, stage: str) -> None:
        parts = [replica.rollouts.journal(0, stage) for replica in self.replicas]
        rows = {row["trajectory_id"]: row for part in parts for row in part}
        for shard in self.shards.values():
            if shard.key[0] == stage:
                for tid, dialogue in shard.written.items():
                    assert (tid in rows) == bool(dialogue.ids)
                    if tid in rows:
                        assert rows[tid] == dialogue.journaled(), "the journal lags behind the trajectory"
        if rows:
            table = pa.Table.from_pylist([row for part in parts for row in part], JOURNAL)
            self.journals[stage] = self.journals.get(stage, (0, []))[0] + 1, table.to_pylist()

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A stage fails, or ends early; its shard may begin again later."""
        shard = self.any_shard(data)
        for replica in self.replicas:
            replica.rollouts.drop([shard.key])
        shard.forget()
        for tid in shard.requests:
            self.pace.drawn.pop(shard.name(tid), None)
            self.pace.credit.pop(shard.name(tid), None)
        busy = self.pace.waiting.keys() | {name for replica in self.replicas for name in replica.engine.running}
        assert not busy & {shard.name(tid) for tid in shard.requests}, "a dropped trajectory goes on"

    @rule(newer=st.booleans())
    def crash(self, newer: bool) -> None:
        self.loop.end_tasks()
        for shard in self.shards.values():
            shard.forget()
        self.version += newer
        self.start()

    @precondition(lambda self: not self.changing and not self.any_lost())
    @rule()
    def new_weights(self) -> None:
        self.changing = True
        for replica in self.replicas:
            try:
                replica.rollouts.pause()
            except Blocked as blocked:
                assert not self.interruptible, "nothing keeps the engine busy"
                replica.pausing = blocked.task

    @precondition(lambda self: self.changing and all(each.pausing is None or each.pausing.done() for each in self.replicas))
    @rule()
    def load(self) -> None:
        self.version += 1
        for replica in self.replicas:
            replica.pausing = None
            replica.engine.load(self.version)
        self.changing = False

    @precondition(lambda self: not self.changing)
    @rule(data=st.data(), number=st.integers(0, 1))
    def lose_engine(self, data: st.DataObject, number: int) -> None:
        """An engine is lost. Who waits for it may notice at once, or later."""
        engine = self.replicas[number].engine
        running = sorted(engine.running)
        if running and not engine.is_lost:
            engine.is_lost = True
            for name in data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True)):
                self.pace.wake(name)
            self.loop.settle()

    @rule()
    def finish_complete(self) -> None:
        for shard in [shard for shard in self.shards.values() if shard.is_complete]:
            self.finish(shard)

    @precondition(lambda self: self.shards)
    @rule()
    def finish_everything(self) -> None:
        for _ in range(100):
            for shard in self.shards.values():
                if not self.changing:
                    self.generate(0, shard, [tid for tid in shard.requests if tid not in shard.replica_of])
            self.release_all(5)
            if self.changing and all(replica.pausing is None or replica.pausing.done() for replica in self.replicas):
                self.load()
            if not self.changing:
                for number in range(len(self.replicas)):
                    self.generate(number)
            self.holds()
            self.finish_complete()
            if not self.shards:
                return
        raise AssertionError("trajectories are never complete")

    # What a worker and its driver do.

    def any_shard(self, data: st.DataObject) -> Shard:
        return data.draw(st.sampled_from(list(self.shards.values())))

    def any_lost(self) -> bool:
        return any(replica.engine.is_lost for replica in self.replicas)

    def open(self, shard: Shard, replica: Replica, number: int) -> None:
        call = Call(term=1, stage=shard.key[0], iteration=0, config=None, shard=shard.key[2])
        dialogues = {
            tid: Dialogue(request, Beginning([], shard.name(tid), False, "{}"))
            for tid, request in shard.requests.items()
        }
        calls = None if shard.kind is None else replica.environments[shard.kind]
        start = ShardStart(tuple(dialogues.values()), Rules(shard.sampling, calls, shard.max_turns))
        journal_number, rows = self.journals.get(shard.key[0], (0, []))
        if replica.journal[0] != (shard.key[0], journal_number):
            by_id = {row["trajectory_id"]: row for row in rows}
            replica.journal = (shard.key[0], journal_number), deepcopy(by_id), by_id
        request = RowsCall(call, None, (), lambda context: start)
        prompts = replica.rollouts.begin(request, Context(call, None, None, None), replica.journal[1])
        assert [tid for prompt in prompts for tid in prompt] == list(dialogues)
        assert [tuple({dialogues[tid].request.prompt_ids for tid in prompt}) for prompt in prompts] == [
            (ids,) for ids in dict.fromkeys(request.prompt_ids for request in shard.requests.values())
        ]
        shard.opened_on[number] = dialogues
        for tid, row in replica.journal[2].items():
            if tid in dialogues and shard.kind is not Forgetful:
                assert len(dialogues[tid].ids) >= len(row["ids"]), "tokens of the journal are lost"
                if tid not in shard.replica_of:
                    self.pace.drawn[shard.name(tid)] |= set(range(len(row["ids"])))

    def generate(self, number: int, shard: Shard | None = None, tids: Sequence[str] = ()) -> None:
        """See `Worker.generate`."""
        replica = self.replicas[number]
        submitted: list[tuple[ShardKey, Sequence[str]]] = []
        if shard is not None:
            if number not in shard.opened_on:
                self.open(shard, replica, number)
            submitted = [(shard.key, tids)]
            shard.replica_of |= dict.fromkeys(tids, number)
        was_lost = replica.engine.is_lost and replica.is_paused
        try:
            replica.rollouts.submit(replica.engine, Weights(version=self.version, digest=""), submitted)
            generated = replica.rollouts.wait(0.0)
        except EngineLost:
            assert replica.engine.is_lost, "an engine that is not lost is reported"
            replica.engine.close()
            self.loop.settle()
            assert replica.is_paused and not replica.engine.running
            replica.engine = Paced(self.pace, self.version)
            return
        assert not was_lost, "nobody is told that an engine is lost"
        assert not replica.is_paused or replica.engine.is_lost
        for key, tid in generated:
            assert tid not in self.shards[key].reported, f"{tid} is reported twice"
            assert self.shards[key].replica_of[tid] == number
            self.shards[key].reported.add(tid)
        for open_shard in self.shards.values():
            complete = {tid for tid, dialogue in open_shard.written.items() if dialogue.finish_reason}
            mine = {tid for tid in complete if open_shard.replica_of[tid] == number}
            assert mine <= open_shard.reported, "a complete trajectory is not reported"

    def finish(self, shard: Shard) -> None:
        """See `Generation`: one of the replicas gets the trajectories of the others."""
        tids = {number: [tid for tid in shard.requests if shard.replica_of[tid] == number] for number in (0, 1)}
        writer = max(tids, key=lambda number: len(tids[number]))
        others = self.replicas[1 - writer].rollouts.take(shard.key, tids[1 - writer]) if tids[1 - writer] else []
        context = self.replicas[writer].rollouts.finish(shard.key, deepcopy(others))
        for replica in self.replicas:
            replica.rollouts.drop([shard.key])
        assert [dialogue.request.trajectory_id for dialogue in context.dialogues] == list(shard.requests)
        for dialogue in context.dialogues:
            assert Outcome.of(dialogue) == shard.outcomes[dialogue.request.trajectory_id]
        del self.shards[shard.key]
        self.finished += 1

    # What must be true.

    @invariant()
    def holds(self) -> None:
        assert not self.pace.wrong
        for shard in self.shards.values():
            for tid, dialogue in shard.written.items():
                self.check(shard.outcomes[tid], dialogue)
        for number, replica in enumerate(self.replicas):
            assert replica.journal[1] == replica.journal[2], "a journal is changed by who continues from it"
            written = [
                dialogue
                for shard in self.shards.values()
                for tid, dialogue in shard.written.items()
                if shard.replica_of[tid] == number
            ]
            incomplete = sum(not dialogue.finish_reason for dialogue in written)
            if replica.generator is not None:
                assert replica.generator.engine.joined == incomplete
            if replica.pausing is not None:
                assert replica.is_paused
                assert replica.pausing.done() == (incomplete == 0), "a pause ends when what is running is complete"
            elif replica.is_paused and not replica.engine.is_lost:
                assert not replica.engine.running, "something runs on a paused engine"
            if self.changing and replica.generator is not None:
                assert replica.is_paused

    def check(self, outcome: Outcome, dialogue: Dialogue) -> None:
        """What a trajectory has so far."""
        length = len(dialogue.ids)
        assert dialogue.ids == outcome.ids[:length]
        assert dialogue.mask == outcome.mask[:length]
        assert dialogue.turn_starts == outcome.turn_starts[: len(dialogue.turn_starts)]
        assert dialogue.turn_ends == outcome.turn_ends[: len(dialogue.turn_ends)]
        assert len(dialogue.versions) == length
        assert dialogue.versions == sorted(dialogue.versions), "the policy gets older within a trajectory"
        by_policy = zip(dialogue.ids, dialogue.mask, dialogue.versions, strict=True)
        assert dialogue.log_probs == [log_prob(token, version) if mask else 0.0 for token, mask, version in by_policy]
        if not self.interruptible:
            assert len(set(dialogue.versions)) <= 1, "two versions wrote a trajectory"
        if dialogue.finish_reason:
            assert Outcome.of(dialogue) == outcome


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def at_once(call: Callable[[], Any]) -> Any:
        result = call()
        return await result if isinstance(result, Coroutine) else result

    still = StillLoop()
    monkeypatch.setattr(event_loop, "run", still.run)
    monkeypatch.setattr("rlhf.environments.calls._in_thread", at_once)
    yield still
    still.close()


def test_any_history_gives_the_trajectories_of_an_undisturbed_run(loop: StillLoop) -> None:
    run_state_machine_as_test(lambda: Streaming(loop), settings=MACHINE)
