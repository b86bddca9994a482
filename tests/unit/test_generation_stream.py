"""Streaming generation: whatever happens while trajectories are written, each ends up once, as if it was undisturbed.

The engine of these tests is deterministic, and stands still until a rule releases tokens: trajectories become complete
in any order, and nothing depends on time. The event loop runs in the test's thread until it has nothing left to do, so
that a call that would wait forever is known at once.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import sha256
from queue import Empty, SimpleQueue
from types import SimpleNamespace
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
from infra.store.records import ShardRef, Weights
from infra.workers.calls import Call, Context, RowsCall, ShardKey, ShardStart
from infra.workers.rollouts import Generated, Rollouts
from infra.workers.worker import JOURNAL, Worker
from rlhf.engines import event_loop
from rlhf.engines.base import Chunk, Request, RolloutEngine, Sampling, limit_of
from rlhf.engines.generation import Generator, Rules
from rlhf.environments import Observation
from rlhf.environments.calls import EnvironmentCalls
from rlhf.environments.dialogues import Beginning, Dialogue
from rlhf.errors import EngineLost, NotFinite

T = TypeVar("T")

LETTERS = ".abcdefg\n?"
DRAWN = "." + 2 * "abcdef" + "gg"
"""The letters that an engine draws."""
EOS = LETTERS.index(".")
STOPS = ("ab", "cd", "ef", "ba")
SEEDS = {"generate": 0, "validate": 1}
"""Two stages with the same trajectory ids."""
MACHINE = settings(
    max_examples=100,
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
    return LETTERS.index(DRAWN[draw(name, len(ids), list(ids)) % len(DRAWN)])


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
    stops = rules.sampling.stop + (() if rules.environments is None else Talker.stop)
    while not outcome.finish_reason:
        start = len(outcome.ids)
        outcome.turn_starts.append(start)
        reason = None
        while reason is None:
            token = next_token(name, [*request.prompt_ids, *outcome.ids])
            outcome.ids.append(token)
            outcome.mask.append(1)
            text = text_of(outcome.ids[start:])
            ends = token == EOS or any(stop in text for stop in stops)
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

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
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
        self.drawn = defaultdict[str, set[tuple[int, ...]]](set)
        """The parts of each trajectory after which no token has to be drawn again."""
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

    stop = ("g",)
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
        left, first = limit_of(request, sampling), len(ids) - request.generated_tokens
        if left <= 0:
            self.pace.wrong.append(f"{name}: a request for {left} tokens")
        self.running.add(name)
        has_ended = False
        try:
            reason = None
            while reason is None:
                steps = await self._released(name)
                tokens: list[int] = []
                while reason is None and len(tokens) < steps:
                    token = next_token(name, ids)
                    before = tuple(ids[first:])
                    if before in self.pace.drawn[name]:
                        self.pace.wrong.append(f"{name}: token {len(before)} is drawn again")
                    self.pace.drawn[name].add(before)
                    tokens.append(token)
                    ids.append(token)
                    left -= 1
                    text = text_of(ids[len(request.prompt_ids) :])  # it does not know where a turn begins
                    ends = token == EOS or any(stop in text for stop in sampling.stop)
                    reason = "stop" if ends else "length" if left == 0 else None
                has_ended = reason is not None
                yield Chunk(tuple(tokens), tuple(log_prob(token, self.version) for token in tokens), reason)
        finally:
            try:
                if has_ended:
                    with suppress(EngineLost):
                        await self._released(name)  # it may take a while to close a stream after its last token
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
        self.outcomes = {tid: undisturbed(self.name(tid), request, rules) for tid, request in self.requests.items()}

    def name(self, tid: str) -> str:
        """The engine's name for a trajectory."""
        return f"{self.sampling.seed} {tid}"

    def forget(self) -> None:
        """The shard was dropped, or its process died."""
        self.opened_on, self.replica_of, self.reported = {}, {}, set()

    def copies(self, tid: str) -> list[Dialogue]:
        """A trajectory where it was submitted; before that, wherever it was begun."""
        if tid in self.replica_of:
            return [self.written[tid]]
        return [dialogues[tid] for dialogues in self.opened_on.values()]

    @property
    def written(self) -> dict[str, Dialogue]:
        """The trajectories that were submitted."""
        return {tid: self.opened_on[number][tid] for tid, number in self.replica_of.items()}

    @property
    def is_complete(self) -> bool:
        return self.reported == self.requests.keys()

    def complete_on(self, number: int, busy: Container[str]) -> set[str]:
        """The complete trajectories of a replica; `busy` are those for which its engine has an open stream."""
        return {
            tid
            for tid, dialogue in self.written.items()
            if self.replica_of[tid] == number and dialogue.finish_reason and self.name(tid) not in busy
        }


class Journals:
    """A store of journals."""

    def __init__(self) -> None:
        self.tables: dict[str, pa.Table] = {}
        self.newest: dict[str, tuple[ShardRef, ...]] = {}
        """The parts of each stage's newest journal."""

    def write(self, stage: str, parts: Iterable[list[dict[str, Any]]]) -> None:
        refs = []
        for rows in filter(None, parts):
            refs.append(ShardRef(key=f"{len(self.tables)}", sha256="", rows=len(rows), bytes=0))
            self.tables[refs[-1].key] = pa.Table.from_pylist(rows, JOURNAL)
        self.newest[stage] = tuple(refs) or self.newest.get(stage, ())

    def read_shard(self, ref: ShardRef) -> pa.Table:
        return self.tables[ref.key]

    def rows(self, stage: str) -> Mapping[str, Mapping[str, Any]]:
        """What a new worker reads."""
        return Replica(Pace(), self, 0, True).read(stage)


class Replica:
    """A worker that generates, as `Worker` does."""

    def __init__(self, pace: Pace, store: Journals, version: int, interruptible: bool) -> None:
        self.engine = Paced(pace, version)
        self.worker: Any = SimpleNamespace(store=store, _last_journal=((), {}))
        self.interruptible = interruptible
        self.generator: Generator | None = None
        self.rollouts = Rollouts(self.build)
        self.environments = {
            kind: EnvironmentCalls(kind, {"pace": pace}, concurrency=2) for kind in (Talker, Forgetful)
        }
        self.pausing: asyncio.Task[None] | None = None
        self.restored: Mapping[str, Mapping[str, Any]] = {}
        """A copy of the journal that was read last."""

    def build(self, engine: RolloutEngine) -> Generator:
        self.generator = Generator(engine, Letters(), interruptible=self.interruptible)
        return self.generator

    def read(self, stage: str) -> Mapping[str, Mapping[str, Any]]:
        """The rows of the newest journal."""
        call = Call(term=1, stage=stage, iteration=0, config=None, journal=self.worker.store.newest.get(stage, ()))
        return Worker._journaled(self.worker, call)

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
        self.store = Journals()
        self.begun_with: dict[str, int] = {}
        """How many tokens each open trajectory had when it was begun."""

    @initialize(interruptible=st.booleans())
    def begin(self, interruptible: bool) -> None:
        self.interruptible = interruptible
        self.start()

    def start(self) -> None:
        self.pace = Pace()
        self.replicas = [Replica(self.pace, self.store, self.version, self.interruptible) for _ in range(2)]
        self.changing = False

    def teardown(self) -> None:
        try:
            if sys.exception() is None:
                self.finish_everything()
        finally:
            self.kill()

    def kill(self) -> None:
        """The process dies."""
        for replica in self.replicas:
            replica.engine.close()
        self.loop.end_tasks()

    # What happens.

    @rule(steps=st.integers(3, 12), data=st.data())
    def work(self, steps: int, data: st.DataObject) -> None:
        """Trajectories begin, get tokens, and become complete."""
        for _ in range(steps):
            act = data.draw(st.sampled_from([self.submit, self.submit, self.release, self.release, self.wait]))
            act(data)

    @precondition(lambda self: self.pace.waiting)
    @rule(stage=st.sampled_from(list(SEEDS)))
    def journal(self, stage: str) -> None:
        self.store.write(stage, [replica.rollouts.journal(0, stage) for replica in self.replicas])
        rows = self.store.rows(stage)
        for shard in [shard for shard in self.shards.values() if shard.key[0] == stage]:
            for tid in shard.requests:
                for dialogue in shard.copies(tid):
                    if not dialogue.ids and shard.kind is Forgetful:
                        continue  # an older journal may have tokens that it has forgotten
                    row, now = dict(rows.get(tid, {"ids": []})), dialogue.journaled()
                    for state in (row, now):
                        state.pop("turn_starts", None)  # a turn that has no tokens may have begun
                    assert row["ids"] == dialogue.ids, "what a trajectory has is not journaled"
                    assert not row["ids"] or row == now, "the journal lags behind a trajectory"

    @precondition(lambda self: any(shard.opened_on for shard in self.shards.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A stage fails, or ends early; its shard may begin again later."""
        self.drop_shard(data.draw(st.sampled_from([shard for shard in self.shards.values() if shard.opened_on])))

    def drop_shard(self, shard: Shard) -> None:
        for replica in self.replicas:
            replica.rollouts.drop([shard.key])
        shard.forget()
        for tid in shard.requests:
            self.pace.drawn.pop(shard.name(tid), None)
            self.pace.credit.pop(shard.name(tid), None)
        busy = self.pace.waiting.keys() | {name for replica in self.replicas for name in replica.engine.running}
        assert not busy & {shard.name(tid) for tid in shard.requests}, "a dropped trajectory goes on"

    @precondition(lambda self: self.pace.waiting)
    @rule(newer=st.booleans(), journaled=st.booleans())
    def crash(self, newer: bool, journaled: bool) -> None:
        """The newest journal may be older than the crash, or not."""
        if journaled:
            for stage in SEEDS:
                self.journal(stage)
        self.kill()
        for shard in self.shards.values():
            shard.forget()
        self.version += newer
        self.start()

    @precondition(lambda self: self.pace.waiting and not self.changing and not self.any_lost())
    @rule()
    def new_weights(self) -> None:
        self.changing = True
        for replica in self.replicas:
            try:
                replica.rollouts.pause()
            except Blocked as blocked:
                assert not self.interruptible, "nothing keeps the engine busy"
                replica.pausing = blocked.task

    @precondition(lambda self: self.can_load())
    @rule()
    def load(self) -> None:
        self.version += 1
        for replica in self.replicas:
            replica.pausing = None
            replica.engine.load(self.version)
        self.changing = False

    @precondition(lambda self: self.in_use() and not self.changing)
    @rule(data=st.data())
    def lose_engine(self, data: st.DataObject) -> None:
        """An engine is lost. Who waits for it may notice at once, or later."""
        engine = data.draw(st.sampled_from(self.in_use()))
        self.lose(engine, data.draw(st.lists(st.sampled_from(sorted(engine.running)), min_size=1, unique=True)))

    def lose(self, engine: Paced, names: Iterable[str]) -> None:
        engine.is_lost = True
        for name in names:
            self.pace.wake(name)
        self.loop.settle()

    # What happens while a run works.

    def submit(self, data: st.DataObject) -> None:
        """A replica gets trajectories of a shard, and waits for a moment."""
        if not self.changing:
            shards = [shard for shard in self.shards.values() if shard.replica_of.keys() < shard.requests.keys()]
            shard = data.draw(st.sampled_from([*shards, None] if shards else [None])) or self.new_shard(data)
            names = [tid for tid in shard.requests if tid not in shard.replica_of]
            self.generate(data.draw(st.integers(0, 1)), shard, names[: data.draw(st.integers(1, 4))])

    def new_shard(self, data: st.DataObject) -> Shard:
        return self.add(
            data.draw(st.lists(st.sampled_from([None, None, 1, 7]), min_size=1, max_size=4)),
            stage=data.draw(st.sampled_from(list(SEEDS))),
            kind=data.draw(st.sampled_from([None, Talker, Talker, Forgetful])),
            max_tokens=data.draw(st.integers(3, 20)),
            max_turns=data.draw(st.integers(1, 4)),
            stop=data.draw(st.sampled_from([(), STOPS])),
        )

    def add(
        self,
        limits: Sequence[int | None],
        *,
        stage: str = "generate",
        kind: type[Talker] | None = None,
        max_tokens: int = 20,
        max_turns: int = 4,
        stop: tuple[str, ...] = (),
    ) -> Shard:
        """A new shard, with the trajectories' own limits."""
        number = self.finished + len(self.shards)
        requests = {
            f"it0-p{number}-s{place}": Request(f"it0-p{number}-s{place}", (place // 2 + 1, 2), max_tokens=limit)
            for place, limit in enumerate(limits)
        }
        sampling = Sampling(1.0, 1.0, max_tokens, SEEDS[stage], stop=stop)
        shard = Shard((stage, 0, number), kind, requests, sampling, max_turns)
        self.shards[shard.key] = shard
        return shard

    def release(self, data: st.DataObject) -> None:
        if self.pace.waiting:
            name, steps = data.draw(st.sampled_from([None, *sorted(self.pace.waiting)])), data.draw(st.integers(1, 5))
            if name is None:
                self.release_all(steps)
            else:
                self.pace.release(name, steps)
                self.loop.settle()

    def release_all(self, steps: int) -> None:
        for name in sorted(self.pace.waiting):
            self.pace.release(name, steps)
        self.loop.settle()

    def finish_everything(self) -> None:
        for _ in range(100):
            if self.can_load():
                self.load()
            if not self.changing:
                for shard in list(self.shards.values()):
                    if left := [tid for tid in shard.requests if tid not in shard.replica_of]:
                        self.generate(0, shard, left)
                for number in range(len(self.replicas)):
                    self.generate(number)
            self.holds()
            if not self.shards:
                return
            self.release_all(5)
        raise AssertionError("trajectories are never complete")

    def wait(self, data: st.DataObject) -> None:
        """A replica waits for a moment."""
        if not self.changing:
            self.generate(data.draw(st.integers(0, 1)))

    # What a worker and its driver do.

    def can_load(self) -> bool:
        """Whether new weights wait, and the engines are idle."""
        return self.changing and all(replica.pausing is None or replica.pausing.done() for replica in self.replicas)

    def any_lost(self) -> bool:
        """Whether trajectories may wait for another engine."""
        engines = [
            replica.engine if replica.generator is None else replica.generator.engine for replica in self.replicas
        ]
        return any(engine.is_lost for engine in engines)

    def in_use(self) -> list[Paced]:
        """The engines that have requests."""
        engines = [replica.engine for replica in self.replicas]
        return [engine for engine in engines if engine.running and not engine.is_lost]

    def open(self, shard: Shard, replica: Replica, number: int) -> None:
        call = Call(term=1, stage=shard.key[0], iteration=0, config=None, shard=shard.key[2])
        dialogues = {
            tid: Dialogue(request, Beginning([], shard.name(tid), False, "{}"))
            for tid, request in shard.requests.items()
        }
        calls = None if shard.kind is None else replica.environments[shard.kind]
        start = ShardStart(tuple(dialogues.values()), Rules(shard.sampling, calls, shard.max_turns))
        rows = replica.read(shard.key[0])
        request = RowsCall(call, None, (), lambda context: start)
        replica.restored = deepcopy(rows)
        prompts = replica.rollouts.begin(request, Context(call, None, None, None), rows)
        assert [tid for prompt in prompts for tid in prompt] == list(dialogues)
        assert [tuple({dialogues[tid].request.prompt_ids for tid in prompt}) for prompt in prompts] == [
            (ids,) for ids in dict.fromkeys(request.prompt_ids for request in shard.requests.values())
        ]
        shard.opened_on[number] = dialogues
        for tid in dialogues.keys() - shard.replica_of.keys():
            has = len(dialogues[tid].ids)
            assert has == 0 if shard.kind is Forgetful else has >= len(rows.get(tid, {"ids": ()})["ids"])
            self.begun_with[shard.name(tid)] = has
            self.pace.drawn[shard.name(tid)] |= {tuple(dialogues[tid].ids[:length]) for length in range(has)}

    def generate(self, number: int, shard: Shard | None = None, tids: Sequence[str] = ()) -> None:
        """See `Worker.generate`."""
        replica = self.replicas[number]
        submitted: list[tuple[ShardKey, Sequence[str]]] = []
        if shard is not None:
            if number not in shard.opened_on:
                self.open(shard, replica, number)
            submitted = [(shard.key, tids)]
            shard.replica_of |= dict.fromkeys(tids, number)
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
        assert not replica.is_paused or replica.engine.is_lost
        for key, tid in generated:
            assert tid not in self.shards[key].reported, f"{tid} is reported twice"
            assert self.shards[key].replica_of[tid] == number
            self.shards[key].reported.add(tid)
        for open_shard in self.shards.values():
            complete = open_shard.complete_on(number, replica.engine.running)
            assert complete <= open_shard.reported or replica.engine.is_lost, "a complete trajectory is not reported"
        for complete_shard in [shard for shard in self.shards.values() if shard.is_complete]:
            self.finish(complete_shard)

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
                self.check(shard.outcomes[tid], dialogue, self.begun_with[shard.name(tid)])
        for number, replica in enumerate(self.replicas):
            assert replica.worker._last_journal[1] == replica.restored, "who continues from a journal changes it"
            written = sum(list(shard.replica_of.values()).count(number) for shard in self.shards.values())
            shards = self.shards.values()
            incomplete = written - sum(len(shard.complete_on(number, replica.engine.running)) for shard in shards)
            if replica.generator is not None:
                assert replica.generator.engine.joined == incomplete
            if replica.pausing is not None:
                assert replica.is_paused
                assert replica.pausing.done() == (incomplete == 0), "a pause ends when what is running is complete"
            elif replica.is_paused and not replica.engine.is_lost:
                assert not replica.engine.running, "something runs on a paused engine"
            if self.changing and replica.generator is not None:
                assert replica.is_paused

    def check(self, outcome: Outcome, dialogue: Dialogue, begun_with: int) -> None:
        """What a trajectory has so far; it had `begun_with` tokens when it was begun."""
        length = len(dialogue.ids)
        assert dialogue.ids == outcome.ids[:length]
        assert dialogue.mask == outcome.mask[:length]
        assert dialogue.turn_starts == outcome.turn_starts[: len(dialogue.turn_starts)]
        assert dialogue.turn_ends == outcome.turn_ends[: len(dialogue.turn_ends)]
        assert len(dialogue.versions) == length
        assert dialogue.versions == sorted(dialogue.versions), "the policy gets older within a trajectory"
        tokens = list(zip(dialogue.ids, dialogue.mask, dialogue.versions, strict=True))
        assert dialogue.log_probs == [log_prob(token, version) if mask else 0.0 for token, mask, version in tokens]
        if not self.interruptible:  # a journal may be of an older version
            versions = {version for _, mask, version in tokens[begun_with:] if mask}
            assert len(versions) <= 1, "two versions wrote a trajectory"
        if dialogue.finish_reason:
            assert Outcome.of(dialogue) == outcome


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[StillLoop]:
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


# What such histories have broken.


class Machines:
    """Machines whose history a test tells."""

    def __init__(self, loop: StillLoop) -> None:
        self.loop = loop

    def __call__(self, *, interruptible: bool = True) -> Streaming:
        self.made = Streaming(self.loop)
        self.made.begin(interruptible)
        return self.made


@pytest.fixture
def begin(loop: StillLoop) -> Iterator[Machines]:
    machines = Machines(loop)
    yield machines
    machines.made.kill()


def test_a_limit_of_its_own_holds_for_observations_too(begin: Machines) -> None:
    run = begin()
    for limit in range(1, 9):
        run.add([limit] * 4, kind=Talker)
    run.finish_everything()


@pytest.mark.parametrize("interruptible", [True, False])
def test_a_shard_is_dropped_while_another_trajectory_waits_for_a_new_engine(
    begin: Machines, interruptible: bool
) -> None:
    run = begin(interruptible=interruptible)
    shard = run.add([None, None])
    run.generate(0, shard, list(shard.requests))
    run.lose(run.replicas[0].engine, ["0 it0-p0-s0"])
    run.drop_shard(shard)


def test_a_shard_is_dropped_while_a_pause_waits_for_it(begin: Machines) -> None:
    run = begin(interruptible=False)
    shard = run.add([None])
    run.generate(0, shard, list(shard.requests))
    run.new_weights()
    run.drop_shard(shard)
    run.load()


def test_a_shard_is_dropped_when_its_trajectories_are_complete(begin: Machines) -> None:
    run = begin()
    shard = run.add([1, 1])
    run.generate(0, shard, list(shard.requests))
    for _ in range(2):
        run.release_all(1)
    run.drop_shard(shard)
    run.generate(0)
    run.generate(0, shard, list(shard.requests))
    run.finish_everything()


def test_a_trajectory_is_complete_before_its_engine_is_lost(begin: Machines) -> None:
    run = begin()
    shard = run.add([1, None])
    run.generate(0, shard, list(shard.requests))
    for _ in range(2):
        run.pace.release("0 it0-p0-s0", 1)
        run.loop.settle()
    run.lose(run.replicas[0].engine, ["0 it0-p0-s1"])
    run.finish_everything()


@pytest.mark.parametrize("dropped", [False, True])
def test_a_trajectory_is_complete_before_it_is_submitted_and_the_engine_lost(begin: Machines, dropped: bool) -> None:
    run = begin()
    shard = run.add([1, None])
    complete, other = shard.requests
    run.generate(0, shard, list(shard.requests))
    for _ in range(2):
        run.pace.release(shard.name(complete), 1)
        run.loop.settle()
    run.journal("generate")
    run.crash(newer=False, journaled=False)
    run.generate(0, shard, [other])
    run.lose(run.replicas[0].engine, [shard.name(other)])
    run.generate(0, shard, [complete])
    if dropped:
        run.drop_shard(shard)
    run.finish_everything()


def test_an_engine_is_lost_while_nobody_waits(begin: Machines) -> None:
    run = begin()
    shard = run.add([None])
    run.generate(0, shard, list(shard.requests))
    run.lose(run.replicas[0].engine, ["0 it0-p0-s0"])
    run.generate(0)
    run.generate(0)
    run.finish_everything()


def test_an_engine_is_lost_while_a_pause_waits_for_it(begin: Machines) -> None:
    run = begin(interruptible=False)
    shard = run.add([None])
    run.generate(0, shard, list(shard.requests))
    run.new_weights()
    run.lose(run.replicas[0].engine, ["0 it0-p0-s0"])
    pausing = run.replicas[0].pausing
    assert pausing is not None and pausing.done(), "a pause waits for a trajectory that cannot go on"


def test_a_journal_is_read_twice(begin: Machines) -> None:
    run = begin()
    shard = run.add([None, None], kind=Talker)
    for _ in range(3):
        run.generate(0, shard, list(shard.requests))
        run.release_all(2)
        run.journal("generate")
        for _ in range(2):
            run.drop_shard(shard)
            run.generate(0, shard, list(shard.requests))
            run.release_all(2)
            run.holds()
        run.drop_shard(shard)
    run.finish_everything()


def test_a_journal_is_written_between_the_last_token_and_the_end(begin: Machines) -> None:
    run = begin()
    shard = run.add([1])
    run.generate(0, shard, list(shard.requests))
    run.release_all(1)
    run.journal("generate")
    run.crash(newer=False, journaled=False)
    run.finish_everything()


def test_replicas_share_a_shard_of_a_journal(begin: Machines) -> None:
    run = begin()
    shard = run.add([None, None])
    run.generate(0, shard, list(shard.requests))
    run.release_all(1)
    run.journal("generate")
    run.crash(newer=False, journaled=False)
    for number, tid in enumerate(shard.requests):
        run.generate(number, shard, [tid])
    run.release_all(1)
    run.journal("generate")
    run.finish_everything()


def test_a_dropped_shard_leaves_no_error_behind(begin: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin()
    bad, good = run.add([None] * 3), run.add([None])
    run.generate(0, bad, list(bad.requests))
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.log_prob", lambda *_: math.nan)
        run.release_all(1)
    with pytest.raises(NotFinite):
        run.generate(0)
    run.drop_shard(bad)
    run.generate(0, good, list(good.requests))
    run.finish_everything()


# The queue of the replicas.


class Feeding(RuleBasedStateMachine):
    """Any sequence of what stages and replicas do."""

    @initialize(replicas=st.integers(1, 3), limit=st.sampled_from([None, 1, 2, 5, 8]))
    def begin(self, replicas: int, limit: int | None) -> None:
        self.feed, self.limit = Feed(replicas, limit), limit
        self.reports: Reports = SimpleQueue()
        self.prompts: dict[ShardKey, list[tuple[str, ...]]] = {}
        """Those of the open shards."""
        self.queue: list[Prompt] = []
        self.running: list[list[Generated]] = [[] for _ in range(replicas)]
        self.generated: dict[ShardKey, dict[str, int]] = {}
        """The replica of each complete trajectory of an open shard."""
        self.opened_on: dict[ShardKey, set[int]] = {}
        self.opened: list[tuple[ShardKey, object]] = []

    @rule(number=st.integers(0, 5), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def open(self, number: int, sizes: list[int]) -> None:
        key = ("generate", 0, number)
        if key not in self.prompts:
            names = [tuple(f"s{number}-p{row}-{place}" for place in range(size)) for row, size in enumerate(sizes)]
            self.prompts[key], self.generated[key], self.opened_on[key] = names, {}, {0}
            self.queue += [(key, prompt) for prompt in names]
            self.feed.open(key, names, lambda replica: self.opened.append((key, replica)), self.reports)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, len(self.running) - 1))
        before = len(self.running[replica])
        if self.queue or before:
            assert in_time(lambda: self.feed.wait(replica))
        waiting = len(self.queue)
        taken = self.feed.take(replica)
        assert taken == self.queue[: len(taken)], "a prompt is given twice, or out of turn"
        del self.queue[: len(taken)]
        if self.limit is None:
            keys = {key for key, _ in taken}
            assert len(keys) == (waiting > 0 and before == 0), "a replica has one shard at a time"
            assert not keys & {key for key, _ in self.queue}, "a batch is a whole shard"
        else:
            fits = bool(self.queue) and before + len(self.queue[0][1]) <= self.limit
            assert taken or not waiting or before or not fits, "a replica waits while it has room"
            assert len(taken) <= -(-waiting // len(self.running)), "more than its share"
        self.running[replica] += [(key, name) for key, names in taken for name in names]
        shards = [key for key in dict.fromkeys(key for key, _ in taken) if replica not in self.opened_on[key]]
        for begin in self.feed.unopened(replica, taken):
            begin(replica)
        assert self.opened == [(key, replica) for key in shards]
        self.opened.clear()
        for key in shards:
            self.opened_on[key].add(replica)

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, len(self.running) - 1))
        if self.running[replica]:
            self.complete(replica, data.draw(st.lists(st.sampled_from(self.running[replica]), unique=True)))

    def complete(self, replica: int, generated: list[Generated]) -> None:
        self.feed.put(replica, generated)
        for key, name in generated:
            self.running[replica].remove((key, name))
            self.generated[key][name] = replica
        due = [key for key, names in self.prompts.items() if len(self.generated[key]) == sum(map(len, names))]
        reports = list(self.reports_so_far())
        assert sorted(report.key for report in reports) == sorted(due), (
            "a shard is complete when its last trajectory is"
        )
        for report in reports:
            by_replica = {
                number: {name for name, writer in self.generated[report.key].items() if writer == number}
                for number in set(self.generated[report.key].values())
            }
            assert {number: set(names) for number, names in report.names.items()} == by_replica
            assert sum(map(len, report.names.values())) == len(self.generated[report.key])
            self.forget(report.key)

    @rule(number=st.integers(0, 5), late=st.booleans())
    def drop(self, number: int, late: bool) -> None:
        key = ("generate", 0, number)
        self.feed.drop([key])
        for replica, running in enumerate(self.running):
            if late:  # a call that was in progress
                self.feed.put(replica, [generated for generated in running if generated[0] == key])
            running[:] = [generated for generated in running if generated[0] != key]
        self.queue = [prompt for prompt in self.queue if prompt[0] != key]
        self.forget(key)
        assert not list(self.reports_so_far()), "a dropped shard is reported"

    def forget(self, key: ShardKey) -> None:
        for of_shard in (self.prompts, self.generated, self.opened_on):
            of_shard.pop(key, None)

    def reports_so_far(self) -> Iterator[Complete]:
        with suppress(Empty):
            while True:
                report = self.reports.get_nowait()
                if report is not None:
                    assert isinstance(report, Complete)
                    yield report

    @invariant()
    def holds(self) -> None:
        assert self.feed.in_flight == sum(map(len, self.running))
        for running in self.running:
            if self.limit is not None:
                largest = max((len(names) for key in self.prompts for names in self.prompts[key]), default=0)
                assert len(running) <= max(self.limit, largest), "more than the limit at the same time"

    def teardown(self) -> None:
        if sys.exception() is None:
            for _ in range(100):
                for replica in range(len(self.running)):
                    taken = self.feed.take(replica)
                    del self.queue[: len(taken)]
                    self.running[replica] += [(key, name) for key, names in taken for name in names]
                    self.complete(replica, list(self.running[replica]))
            assert not self.prompts and not self.queue, "a shard is never complete"


def in_time(call: Callable[[], T]) -> T:
    """The result of a call that does not wait."""
    results: SimpleQueue[T] = SimpleQueue()
    threading.Thread(target=lambda: results.put(call()), daemon=True).start()
    return results.get(timeout=60)


def test_each_trajectory_is_given_to_one_replica() -> None:
    run_state_machine_as_test(Feeding, settings=settings(MACHINE, max_examples=200, stateful_step_count=30))


def test_replicas_that_wait_hear_of_a_shard_and_of_the_end() -> None:
    feed, reports = Feed(3, 2), Reports()
    given: SimpleQueue[Generated] = SimpleQueue()

    def serve(number: int) -> None:
        while feed.wait(number):
            taken = [(key, name) for key, names in feed.take(number) for name in names]
            for generated in taken:
                given.put(generated)
            feed.put(number, taken)

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    prompts = [(f"p{row}-s0", f"p{row}-s1") for row in range(20)]
    keys: list[ShardKey] = [("generate", 0, shard) for shard in range(5)]
    for key in keys:
        feed.open(key, prompts, lambda replica: None, reports)
    left = set(keys)
    while left:
        if (report := reports.get(timeout=60)) is not None:
            assert isinstance(report, Complete)
            left.remove(report.key)
    feed.end()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert Counter(given.get_nowait() for _ in range(given.qsize())) == Counter(
        (key, name) for key in keys for names in prompts for name in names
    )


def test_a_replica_that_fails_is_reported_to_every_stage() -> None:
    feed, error = Feed(2, None), EngineLost("gone")
    stages: list[Reports] = [SimpleQueue(), SimpleQueue()]
    for number, reports in enumerate(stages):
        feed.open(("generate", number, 0), [("a",)], lambda replica: None, reports)
    feed.fail(error)
    assert [reports.get_nowait() for reports in stages] == [error, error]
    assert not in_time(lambda: feed.wait(1))
    with pytest.raises(EngineLost):
        feed.open(("generate", 2, 0), [("a",)], lambda replica: None, stages[0])
