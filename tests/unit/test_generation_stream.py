"""Streaming generation: whatever happens to a worker, each trajectory becomes complete once and keeps its tokens.

The engine of these tests stands still until a rule lets a trajectory go on, and the event loop runs in the test's
thread until it has nothing left to do. So nothing depends on time, and a call that would wait forever fails at once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, cast
from zlib import crc32

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine as Machine
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from ratchet.infra.execution.replicas import Complete, Feed, Prompt, Replicas, Reports
from ratchet.infra.store.records import Weights
from ratchet.infra.workers.call_log import JOURNAL
from ratchet.infra.workers.calls import Call, Context, RowsCall, ShardKey, ShardStart
from ratchet.infra.workers.checkpoints import in_background
from ratchet.infra.workers.rollouts import Generated, Journaled, JournalRows, Rollouts
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf import event_loop
from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.agents.sessions import Recorder
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.environments.environment import Observation
from ratchet.rlhf.environments.guarded_calls import EnvironmentCalls
from ratchet.rlhf.errors import EngineLost, NotFinite
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling, limit_of

T = TypeVar("T")

STAGES = ("generate", "validate")
"""They use the same trajectory ids."""
LIMIT_S = 60.0
"""After which what does not happen fails a test."""
HEARD = 7
"""The token of every letter that an environment says."""
MAX_TURNS = 3
MAX_TOKENS = 12
HISTORIES = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


# What a trajectory becomes. Its tokens depend on who draws them, its shape does not.


def draw(*of: object) -> int:
    """A number that depends on nothing else."""
    return crc32(repr(of).encode())


def token_of(name: str, position: int, version: int) -> int:
    return 100 * version + draw(name, position) % 100


def reason_after(name: str, position: int, limit: int) -> str | None:
    """Why a turn ends when the response has this many tokens; None: it goes on."""
    return "stop" if draw("end", name, position) % 6 == 0 else "length" if position == limit else None


def answer(name: str, answered: int) -> Observation:
    """What an environment says after it has answered this many turns."""
    return Observation(None if draw("answer", name, answered) % 4 == 0 else "ok", reward=answered + 0.5)


def shape_of(name: str, request: Request, *, has_environment: bool) -> Dialogue:
    """What a trajectory is when it is complete, but for its tokens."""
    shape = Dialogue(request)
    limit = MAX_TOKENS if request.max_tokens is None else min(request.max_tokens, MAX_TOKENS)
    while True:
        reason = None
        shape.turn_starts.append(len(shape.mask))
        while reason is None:
            shape.mask.append(1)
            reason = reason_after(name, len(shape.mask), limit)
        says = answer(name, len(shape.turn_ends)).content
        shape.turn_ends.append(len(shape.mask))
        if not has_environment or reason == "length" or says is None:
            shape.finish_reason = reason
        elif len(shape.turn_ends) == MAX_TURNS:
            shape.finish_reason = "turns"
        elif len(shape.mask) + len(says) >= limit:
            shape.finish_reason = "length"
        if shape.finish_reason:
            return shape
        shape.mask += [0] * len(says or "")


# A world that stands still.


class Blocked(Exception):
    """A call waits for something that does not happen by itself. The argument is its task."""


class StillLoop:
    """An event loop that runs, in the caller's thread, until it has nothing left to do. It holds each trajectory until
    a test releases it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.held: dict[str, asyncio.Future[int]] = {}

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Takes the place of `event_loop.run`."""
        task = self.loop.create_task(coroutine)
        self.settle()
        if not task.done():
            raise Blocked(task)
        return task.result()

    def settle(self) -> None:
        async def rest() -> None:
            for _ in range(10_000):
                await asyncio.sleep(0)
                if not self.loop._ready:  # type: ignore[attr-defined]  # callbacks that are due
                    return
            raise AssertionError("the event loop never comes to rest")

        self.loop.run_until_complete(rest())

    def end_tasks(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.settle()

    async def hold(self, name: str) -> int:
        """Wait for `release`; returns how many tokens to draw."""
        assert name not in self.held, f"{name} is written twice at the same time"
        self.held[name] = self.loop.create_future()
        try:
            return await self.held[name]
        finally:
            del self.held[name]

    def release(self, names: Sequence[str], tokens: int) -> None:
        for name in names:
            self.held[name].set_result(tokens)
        self.settle()


class HeldEngine(RolloutEngine):
    """A deterministic engine."""

    def __init__(self, loop: StillLoop, version: int) -> None:
        self.loop, self.version = loop, version
        self.running: set[str] = set()
        self.joined = 0
        self.is_lost = False
        self.is_broken = False

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        name, position = f"{STAGES[sampling.seed]} {request.trajectory_id}", request.generated_tokens
        limit = position + limit_of(request, sampling)
        reason = None
        self.running.add(name)
        try:
            while reason is None:
                count = await self.loop.hold(name)
                if self.is_lost:
                    raise EngineLost("the engine is lost")
                tokens: list[int] = []
                while reason is None and len(tokens) < count:
                    tokens.append(token_of(name, position, self.version))
                    position += 1
                    reason = reason_after(name, position, limit)
                log_probs = [math.nan if self.is_broken else -float(token) for token in tokens]
                yield Chunk(tuple(tokens), tuple(log_probs), reason)
        finally:
            try:
                if reason is not None:
                    await self.loop.hold(name)  # a stream may take a while to close after its last token
            finally:
                self.running.discard(name)

    def join(self, count: int) -> None:
        self.joined += count

    def leave(self) -> None:
        self.joined -= 1

    def load_weights(self, weights: Any, adapter_config: bytes | None = None) -> int:
        return 0

    def place(self, **_: bool) -> None: ...

    def close(self) -> None: ...


class Tokenizer:
    chat_template = bos_token_id = eos_token_id = pad_token_id = None
    added_tokens_decoder: ClassVar[dict[int, str]] = {}
    all_special_tokens = ()
    is_fast = False

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return ""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [HEARD] * len(text)}


class Partner(EnvironmentCalls):
    """The environments of a stage. They are in the same state after the same turns if they are replayable."""

    def __init__(self, loop: StillLoop, stage: str, *, replayable: bool) -> None:
        super().__init__(SimpleNamespace(replayable=replayable), {})
        self.loop, self.stage = loop, stage

    async def of(self, dialogue: Dialogue, tokenizer: Any) -> Any:
        return self._environments.setdefault(id(dialogue), SimpleNamespace(stop=()))  # type: ignore[arg-type]

    async def step(self, dialogue: Dialogue, turn: str, run: str = "") -> Observation:
        name = f"{self.stage} {dialogue.request.trajectory_id}"
        await self.loop.hold(name)
        return answer(name, dialogue.answered)


# Any history of a worker.


@dataclass
class Shard:
    """A shard, over all crashes."""

    key: ShardKey
    requests: dict[str, Request]
    replayable: bool | None
    """Whether its environments are; None: it has none."""
    dialogues: dict[str, Dialogue] = field(default_factory=dict)
    """Its trajectories while it is open."""
    submitted: set[str] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    had: dict[str, list[int]] = field(default_factory=dict)
    """The tokens that each trajectory had when it was looked at last."""
    opened_with: dict[str, int] = field(default_factory=dict)
    """How many it had when the shard was opened."""

    @classmethod
    def of(cls, key: ShardKey, limits: Sequence[int | None], replayable: bool | None = None) -> Shard:
        """A shard whose trajectories have these limits of their own; two of them have the same prompt."""
        named = {f"p{key[2]}-s{place}": (place, limit) for place, limit in enumerate(limits)}
        requests = {name: Request(name, (place // 2, 5), max_tokens=limit) for name, (place, limit) in named.items()}
        return cls(key, requests, replayable)

    def engine_name(self, trajectory_id: str) -> str:
        """The trajectory's name at the engine, which tells stages apart."""
        return f"{self.key[0]} {trajectory_id}"

    @property
    def unsubmitted(self) -> list[str]:
        return sorted(self.requests.keys() - self.submitted)

    def opening(self, loop: StillLoop) -> RowsCall[Any, Any]:
        """The call that opens the shard."""
        self.dialogues = {name: Dialogue(request) for name, request in self.requests.items()}
        sampling = Sampling(1.0, 1.0, MAX_TOKENS, seed=STAGES.index(self.key[0]))
        partner = None if self.replayable is None else Partner(loop, self.key[0], replayable=self.replayable)
        start = ShardStart(tuple(self.dialogues.values()), Rules(sampling, partner, MAX_TURNS))
        call = Call(term=1, stage=self.key[0], iteration=0, config=None, shard=self.key[2])
        return RowsCall(call, None, (), lambda context: start)

    def close(self) -> None:
        self.dialogues, self.submitted, self.reported, self.had, self.opened_with = {}, set(), set(), {}, {}

    def check(self, trajectory_id: str, *, may_mix: bool) -> None:
        """What a trajectory has so far; `may_mix`: several versions may have written it since the shard was opened."""
        dialogue, name = self.dialogues[trajectory_id], self.engine_name(trajectory_id)
        had, self.had[trajectory_id] = self.had.get(trajectory_id, []), list(dialogue.ids)
        assert dialogue.ids[: len(had)] == had, "tokens are lost"
        tokens = zip(dialogue.ids, dialogue.log_probs, dialogue.mask, dialogue.versions, strict=True)
        for position, (token, log_prob, by_policy, version) in enumerate(tokens):
            expected = token_of(name, position, version) if by_policy else HEARD
            assert (token, log_prob) == (expected, -expected * by_policy)
        assert dialogue.versions == sorted(dialogue.versions), "the policy gets older within a trajectory"
        new = slice(self.opened_with[trajectory_id], None)
        versions = zip(dialogue.versions[new], dialogue.mask[new], strict=True)
        assert may_mix or len({version for version, by_policy in versions if by_policy}) <= 1
        shape = shape_of(name, self.requests[trajectory_id], has_environment=self.replayable is not None)
        for column in ("mask", "turn_starts", "turn_ends"):
            now, whole = getattr(dialogue, column), getattr(shape, column)
            assert now == whole[: len(now)] and (now == whole or not dialogue.finish_reason)
        assert dialogue.finish_reason in ("", shape.finish_reason)
        rewards = [turn + 0.5 for turn in range(dialogue.answered)]
        assert dialogue.turn_rewards == rewards, "an answer counts twice, or not"
        assert dialogue.answered in (len(dialogue.turn_ends), len(dialogue.turn_ends) - 1)


class Streaming(Machine):
    """A worker with `Rollouts`, and the driver that calls it."""

    def __init__(self, loop: StillLoop) -> None:
        super().__init__()
        self.loop, self.version = loop, 0
        self.shards: dict[ShardKey, Shard] = {}
        self.numbers = {stage: itertools.count() for stage in STAGES}
        self.journals = {stage: dict[str, Any]() for stage in STAGES}
        """The rows of each stage's newest journal, by trajectory id."""

    @initialize(interruptible=st.booleans())
    def start(self, interruptible: bool) -> None:
        """A process begins."""
        self.interruptible, self.may_mix = interruptible, interruptible
        self.engine = HeldEngine(self.loop, self.version)
        self.generator: Generator | None = None
        self.rollouts = Rollouts(self._build, self._no_log, self._no_log)
        self.journals_read = deepcopy(self.journals)
        """A worker caches what it has read."""
        self.is_changing = False
        """Whether the weights are about to change."""
        self.pausing: asyncio.Task[None] | None = None
        """A `pause` that did not return at once."""

    def _no_log(self, stage: str, iteration: int, records: bool) -> Recorder:
        raise AssertionError("there are no agents")

    def _build(self, engine: RolloutEngine) -> Generator:
        self.generator = Generator(engine, Tokenizer(), interruptible=self.interruptible)
        return self.generator

    @precondition(lambda self: not self.is_changing)
    @rule(
        stage=st.sampled_from(STAGES),
        limits=st.lists(st.sampled_from([None, None, 1, 6]), min_size=1, max_size=4),
        replayable=st.sampled_from([None, True, False]),
    )
    def begin_shard(self, stage: str, limits: list[int | None], replayable: bool | None) -> None:
        key = (stage, 0, next(self.numbers[stage]))
        self.shards[key] = Shard.of(key, limits, replayable)
        self.generate(self.shards[key], self.shards[key].unsubmitted[:2])

    @precondition(lambda self: not self.is_changing and any(shard.unsubmitted for shard in self.shards.values()))
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from([shard for shard in self.shards.values() if shard.unsubmitted]))
        self.generate(shard, data.draw(st.lists(st.sampled_from(shard.unsubmitted), min_size=1, unique=True)))

    @precondition(lambda self: not self.is_changing)
    @rule()
    def wait(self) -> None:
        self.generate()

    @precondition(lambda self: self.loop.held)
    @rule(data=st.data(), tokens=st.integers(1, 3))
    def go_on(self, data: st.DataObject, tokens: int) -> None:
        """Some trajectories get tokens, or an answer of their environment."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.loop.held)), min_size=1, unique=True))
        self.loop.release(names, tokens)

    @precondition(lambda self: self.loop.held)
    @rule(stage=st.sampled_from(STAGES))
    def journal(self, stage: str) -> None:
        written = pa.Table.from_pylist(self.rollouts.journal(0, stage), JOURNAL).to_pylist()
        rows = {row["trajectory_id"]: row for row in written}
        shards = [shard for shard in self.shards.values() if shard.key[0] == stage]
        dialogues = {name: dialogue for shard in shards for name, dialogue in shard.dialogues.items()}
        assert rows == {name: dialogue.journaled() for name, dialogue in dialogues.items() if dialogue.ids}
        if rows:
            self.journals[stage], self.journals_read[stage] = rows, deepcopy(rows)

    @precondition(lambda self: any(shard.dialogues for shard in self.shards.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A stage fails, or ends early. Its shard may be opened again."""
        self.drop_shard(data.draw(st.sampled_from([shard for shard in self.shards.values() if shard.dialogues])))

    def drop_shard(self, shard: Shard) -> None:
        self.rollouts.drop([shard.key])
        names = set(map(shard.engine_name, shard.requests))
        assert not names & (self.loop.held.keys() | self.engine.running), "a dropped trajectory goes on"
        shard.close()

    @precondition(lambda self: self.loop.held)
    @rule(has_newer_weights=st.booleans())
    def crash(self, has_newer_weights: bool) -> None:
        self.loop.end_tasks()
        for shard in self.shards.values():
            shard.close()
        self.version += has_newer_weights
        self.start(self.interruptible)

    @precondition(lambda self: self.loop.held and not self.is_changing)
    @rule()
    def pause(self) -> None:
        self.is_changing = True
        self.may_mix |= self.engine.is_lost
        try:
            self.rollouts.pause()
        except Blocked as blocked:
            self.pausing = blocked.args[0]

    @precondition(lambda self: self.can_load)
    @rule()
    def load(self) -> None:
        """New weights arrive; the worker's next call uses them."""
        assert not self.engine.running, "new weights arrive while requests are running"
        self.version += 1
        if self.engine.is_lost:
            self.engine = HeldEngine(self.loop, self.version)
        self.engine.version, self.is_changing, self.pausing = self.version, False, None

    @property
    def can_load(self) -> bool:
        return self.is_changing and (self.pausing is None or self.pausing.done())

    @precondition(lambda self: self.engine.running)
    @rule()
    def lose_engine(self) -> None:
        """Each of the engine's trajectories notices when it goes on, perhaps after the engine was replaced."""
        self.engine.is_lost = True
        self.may_mix |= self.is_changing  # a trajectory that cannot go on does not keep new weights waiting

    def generate(self, shard: Shard | None = None, trajectory_ids: Sequence[str] = ()) -> None:
        """What `Worker.generate` does, and the driver around it."""
        submitted = []
        if shard is not None:
            if not shard.dialogues:
                self.open(shard)
            submitted = [(shard.key, trajectory_ids)]
            shard.submitted |= set(trajectory_ids)
        try:
            self.rollouts.submit(self.engine, Weights(version=self.version, digest=""), submitted)
            generated = self.rollouts.wait(0.0)
        except EngineLost:
            assert self.engine.is_lost, "an engine is reported that is not lost"
            self.engine = HeldEngine(self.loop, self.version)
            return
        for key, trajectory_id in generated:
            assert trajectory_id in self.shards[key].submitted - self.shards[key].reported
            assert self.shards[key].dialogues[trajectory_id].finish_reason
            self.shards[key].reported.add(trajectory_id)
        for open_shard in list(self.shards.values()):
            assert open_shard.submitted - self.being_written(open_shard) == open_shard.reported or self.engine.is_lost
            if open_shard.reported == open_shard.requests.keys():
                finished = self.rollouts.finish(open_shard.key, ()).dialogues
                assert list(map(id, finished)) == list(map(id, open_shard.dialogues.values()))
                del self.shards[open_shard.key]

    def open(self, shard: Shard) -> None:
        """Its trajectories go on from the newest journal, unless nobody can tell their environments where they were."""
        call, journal = shard.opening(self.loop), self.journals_read[shard.key[0]]
        prompts = self.rollouts.begin(call, Context(call.call, None, None, None), Journaled(journal), records=True)
        assert [trajectory_id for prompt in prompts for trajectory_id in prompt] == list(shard.requests)
        assert all(len({shard.requests[trajectory_id].prompt_ids for trajectory_id in ids}) == 1 for ids in prompts)
        journaled = {} if shard.replayable is False else self.journals[shard.key[0]]
        for trajectory_id, dialogue in shard.dialogues.items():
            assert dialogue.journaled() == journaled.get(trajectory_id, Dialogue(dialogue.request).journaled())
            shard.opened_with[trajectory_id] = len(dialogue.ids)

    def being_written(self, shard: Shard) -> set[str]:
        """The submitted trajectories that are not complete, or whose streams are open."""
        return {
            trajectory_id
            for trajectory_id in shard.submitted
            if not shard.dialogues[trajectory_id].finish_reason or shard.engine_name(trajectory_id) in self.loop.held
        }

    @invariant()
    def holds(self) -> None:
        for shard in self.shards.values():
            for trajectory_id in shard.dialogues:
                shard.check(trajectory_id, may_mix=self.may_mix)
        if self.generator is None:
            return
        shards = self.shards.values()
        written = {shard.engine_name(name) for shard in shards for name in self.being_written(shard)}
        assert self.loop.held.keys() <= written, "what was cancelled goes on"
        engine = self.generator.engine
        assert isinstance(engine, HeldEngine) and engine.joined == len(written), (
            "the engine waits for trajectories that have ended"
        )
        assert written == self.loop.held.keys() or self.generator.is_paused, "a trajectory stands still"
        if self.is_changing:
            assert self.generator.is_paused and not (self.interruptible and self.engine.running)
        if self.pausing is not None:
            assert not self.interruptible, "a pause waits though it may interrupt"
            assert self.pausing.done() == (not self.loop.held), "a pause ends when nobody is written any more"

    def teardown(self) -> None:
        try:
            if sys.exception() is None:
                self.finish_everything()
        finally:
            self.loop.end_tasks()

    def finish_everything(self) -> None:
        for _ in range(200):
            if self.can_load:
                self.load()
            if not self.is_changing:
                self.generate()
                for key in list(self.shards):
                    if key in self.shards:  # not yet complete with those before it
                        self.generate(self.shards[key], self.shards[key].unsubmitted)
            self.holds()
            if not self.shards:
                return
            self.loop.release(list(self.loop.held), 4)
        raise AssertionError("trajectories never become complete")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[StillLoop]:
    still = StillLoop()
    monkeypatch.setattr(event_loop, "run", still.run)
    yield still
    still.end_tasks()
    still.loop.close()


@pytest.mark.slow
def test_any_history_gives_whole_trajectories(loop: StillLoop) -> None:
    many = settings(HISTORIES, max_examples=200, stateful_step_count=50)
    run_state_machine_as_test(lambda: Streaming(loop), settings=many)


def test_a_lost_engine_does_not_hide_what_a_journal_has_completed(loop: StillLoop) -> None:
    """Both are reported by the call that submits it: first the loss, then the trajectory."""
    streaming = Streaming(loop)
    streaming.start(interruptible=True)
    for stage, limit in (("validate", None), ("generate", 1)):
        key = (stage, 0, 0)
        streaming.shards[key] = Shard.of(key, [limit])
    complete = Dialogue(streaming.shards["generate", 0, 0].requests["p0-s0"])
    complete.wrote(Chunk((token_of("generate p0-s0", 0, 0),), (0.0,), "length"), 0)
    complete.finish_reason = "length"
    streaming.journals_read["generate"] = streaming.journals["generate"] = {"p0-s0": complete.journaled()}
    streaming.generate(streaming.shards["validate", 0, 0], ["p0-s0"])
    streaming.lose_engine()
    loop.release(["validate p0-s0"], 1)
    streaming.generate(streaming.shards["generate", 0, 0], ["p0-s0"])
    assert not streaming.engine.is_lost, "the loss was reported, and the engine replaced"
    streaming.generate()
    assert ("generate", 0, 0) not in streaming.shards, "it is finished"


def test_what_is_submitted_to_a_paused_generator_begins_with_the_new_weights(loop: StillLoop) -> None:
    generator = Generator(HeldEngine(loop, version=3), Tokenizer(), interruptible=False)
    dialogue = Dialogue(Request("p", (5,), max_tokens=1))
    generator.submit([(dialogue, Rules(Sampling(1.0, 1.0, MAX_TOKENS, seed=0)))])
    [copy] = generator.copies([dialogue])
    assert not loop.held
    generator.pause()  # it waits only for what has begun
    generator.resume(version=3)
    with pytest.raises(Blocked) as pausing:
        generator.pause()
    for _ in range(2):
        loop.release(["generate p"], 1)
    assert pausing.value.args[0].done()
    assert generator.wait(0.0) == [dialogue] and dialogue.versions == [3]
    assert not generator.wait(0.0) and not copy.ids


def test_a_trajectory_does_not_change_the_journal_that_it_goes_on_from() -> None:
    dialogue, row = Dialogue(Request("p", (5,))), Dialogue(Request("p", (5,)), ids=[1]).journaled()
    dialogue.restore(row)
    dialogue.wrote(Chunk((2,), (-2.0,)), version=0)
    assert (dialogue.ids, row["ids"]) == ([1, 2], [1])


def test_an_error_follows_what_is_complete_and_ends_with_its_shard(loop: StillLoop) -> None:
    worker = Streaming(loop)
    worker.start(interruptible=True)
    bad, good = (Shard.of(("generate", 0, number), [1, None, None]) for number in range(2))
    worker.shards = {bad.key: bad, good.key: good}
    worker.generate(bad, list(bad.requests))
    for _ in range(2):
        loop.release(["generate p0-s0"], 1)
    worker.engine.is_broken = True
    loop.release(["generate p0-s1"], 1)
    worker.generate()
    assert bad.reported == {"p0-s0"}
    with pytest.raises(NotFinite):
        worker.generate()
    worker.drop_shard(bad)
    worker.engine.is_broken = False
    worker.finish_everything()


def test_replicas_that_share_a_shard_journal_and_finish_it_together(loop: StillLoop) -> None:
    key = ("generate", 0, 0)
    replicas, journal = [Streaming(loop), Streaming(loop)], dict[str, Any]()
    for _ in range(4):
        loop.end_tasks()
        for number, replica in enumerate(replicas):
            replica.journals = {"generate": journal}
            replica.start(interruptible=True)
            shard = replica.shards[key] = Shard.of(key, [3, 3])
            replica.generate(shard, [f"p0-s{number}"])
        loop.release(list(loop.held), 1)
        written = [replica.shards[key].dialogues[f"p0-s{number}"] for number, replica in enumerate(replicas)]
        parts = [pa.Table.from_pylist(replica.rollouts.journal(0, "generate"), JOURNAL) for replica in replicas]
        journal = dict(JournalRows(parts))
        assert list(journal.values()) == [dialogue.journaled() for dialogue in written], "a copy that stands still"
    loop.release(list(loop.held), 1)
    for replica in replicas:
        replica.generate()
    others = replicas[1].rollouts.take(key, ["p0-s1"])
    assert list(replicas[0].rollouts.finish(key, others).dialogues) == written


def test_what_is_submitted_of_a_dropped_shard_is_left_out(loop: StillLoop) -> None:
    worker, key = Streaming(loop), ("generate", 0, 0)
    worker.start(interruptible=True)
    worker.shards[key] = Shard.of(key, [3])
    worker.generate(worker.shards[key], ["p0-s0"])
    worker.rollouts.drop([key])
    weights = Weights(version=0, digest="")
    worker.rollouts.submit(worker.engine, weights, [(key, ["p0-s0"])])
    assert worker.rollouts.wait(0.0) == []
    assert worker.rollouts.journal(0, "generate") == []


def test_shards_may_be_dropped_while_a_stage_is_journaled(loop: StillLoop) -> None:
    worker = Streaming(loop)
    worker.start(interruptible=True)
    shards = [Shard.of(("generate", 0, number), [3]) for number in range(1000)]
    for shard in shards:
        worker.rollouts.begin(shard.opening(loop), None, Journaled(), records=False)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns within every loop
    try:
        dropped = in_background(lambda: [worker.rollouts.drop([shard.key]) for shard in shards])
        while not dropped.done():
            worker.rollouts.journal(0, "generate")
        dropped.result()
    finally:
        sys.setswitchinterval(before)
    assert worker.rollouts.is_empty


# The queue of the replicas.


class Feeding(Machine):
    """Any sequence of what stages and replicas do."""

    @initialize(replica_count=st.integers(1, 3), limit=st.sampled_from([None, 1, 2, 5, 8]))
    def start(self, replica_count: int, limit: int | None) -> None:
        self.feed, self.limit = Feed(replica_count, limit), limit
        self.reports: Reports = SimpleQueue()
        self.queue: list[Prompt] = []
        self.running: list[list[Generated]] = [[] for _ in range(replica_count)]
        self.writers: dict[ShardKey, dict[str, int | None]] = {}
        """The replica that completed each trajectory of an open shard."""
        self.opened: list[tuple[ShardKey, Any]] = []
        """The shards that replicas opened."""

    @rule(
        number=st.integers(0, 5), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), replica=st.integers(0, 2)
    )
    def open(self, number: int, sizes: list[int], replica: int) -> None:
        key = ("generate", 0, number)
        if key not in self.writers:
            prompts = [tuple(f"p{row}-s{place}" for place in range(size)) for row, size in enumerate(sizes)]
            self.writers[key] = {name: None for names in prompts for name in names}
            self.queue += [(key, names) for names in prompts]
            replica %= len(self.running)
            self.opened.append((key, replica))
            self.feed.open(
                key, prompts, lambda number: cast("Any", self.opened.append((key, number))), self.reports, replica
            )

    @rule(number=st.integers(0, 2))
    def take(self, number: int) -> None:
        number %= len(self.running)
        had, waiting = list(self.running[number]), len(self.queue)
        if not had and not waiting:
            return
        assert self.feed.wait(number), "it returns at once"
        taken, begins = self.feed.take(number)
        assert taken == self.queue[: len(taken)], "prompts are given once, and in order"
        del self.queue[: len(taken)]
        self.running[number] += [(key, name) for key, names in taken for name in names]
        left = self.queue[0] if self.queue else None
        if self.limit is None:
            assert len({key for key, _ in taken}) == (waiting > 0 and not had), "a replica has one shard at a time"
            assert left is None or left[0] not in {key for key, _ in taken}, "the shard is not whole"
        else:
            share = math.ceil(waiting / len(self.running))
            busy = len(self.running[number])
            fits = left is not None and (not busy or busy + len(left[1]) <= self.limit)
            assert not taken or busy <= self.limit or (not had and len(taken) == 1), "too many"
            assert len(taken) <= share, "it takes what others have room for"
            assert len(taken) == share or not fits, "it waits though it has room"
        for begin in begins:
            begin(cast("Any", number))
        assert len(self.opened) == len(set(self.opened)), "a shard is opened twice on a replica"
        assert {(key, number) for key, _ in taken} <= set(self.opened)

    @rule(number=st.integers(0, 2), data=st.data())
    def put(self, number: int, data: st.DataObject) -> None:
        number %= len(self.running)
        if self.running[number]:
            self.complete(number, data.draw(st.lists(st.sampled_from(self.running[number]), unique=True)))

    def complete(self, number: int, generated: list[Generated]) -> None:
        self.feed.put(number, generated)
        for key, name in generated:
            self.running[number].remove((key, name))
            self.writers[key][name] = number
        expected = {key: writers for key, writers in self.writers.items() if None not in writers.values()}
        reports = self.complete_shards()
        assert sorted(report.key for report in reports) == sorted(expected)
        for report in reports:
            writers = [(name, number) for number, names in report.names.items() for name in names]
            assert sorted(writers) == sorted(expected[report.key].items()), "each trajectory has one writer"
            opened = {replica for key, replica in self.opened if key == report.key}
            assert report.names.keys() == opened, "a replica keeps it open"
            self.forget(report.key)

    @rule(number=st.integers(0, 5), is_generating=st.booleans())
    def drop(self, number: int, is_generating: bool) -> None:
        """`is_generating`: replicas report trajectories of the shard after it was dropped."""
        key = ("generate", 0, number)
        self.feed.drop([key])
        for replica, running in enumerate(self.running):
            if is_generating:
                self.feed.put(replica, [generated for generated in running if generated[0] == key])
            running[:] = [generated for generated in running if generated[0] != key]
        self.queue = [prompt for prompt in self.queue if prompt[0] != key]
        self.forget(key)
        assert not self.complete_shards(), "a dropped shard is reported"

    def forget(self, key: ShardKey) -> None:
        self.writers.pop(key, None)
        self.opened = [opened for opened in self.opened if opened[0] != key]

    def complete_shards(self) -> list[Complete]:
        reports = [self.reports.get_nowait() for _ in range(self.reports.qsize())]
        return [report for report in reports if isinstance(report, Complete)]

    @invariant()
    def holds(self) -> None:
        running, waiting = sum(map(len, self.running)), sum(len(names) for _, names in self.queue)
        assert self.feed.in_flight == running
        room = self.feed.room
        assert room or self.writers, "nothing is ever opened"
        assert room <= len(self.running)
        if self.limit is None:
            assert room == max(len(self.running) - len(self.writers), 0), "a shard for each replica"
        elif waiting == 0 or waiting >= self.limit * len(self.running):
            assert bool(room) == (waiting == 0), "enough waits, and no more"

    def teardown(self) -> None:
        if sys.exception() is None:
            for number in list(range(len(self.running))) * 100:
                self.take(number)
                self.complete(number, list(self.running[number]))
            assert not self.writers, "a shard is never complete"


def test_each_trajectory_is_given_to_one_replica() -> None:
    run_state_machine_as_test(Feeding, settings=settings(HISTORIES, max_examples=150, stateful_step_count=30))


def in_no_time(replica: Any, prompts: Sequence[tuple[str, ...]] = ()) -> Future[Sequence[tuple[str, ...]]]:
    """Opens a shard on a replica."""
    opened = Future[Sequence[tuple[str, ...]]]()
    opened.set_result(prompts)
    return opened


def test_a_replica_that_fails_is_reported_to_every_stage() -> None:
    feed, error = Feed(2, None), EngineLost("gone")
    stages: list[Reports] = [SimpleQueue(), SimpleQueue()]
    for number, reports in enumerate(stages):
        feed.open(("generate", number, 0), [("a",)], in_no_time, reports, 0)
    feed.fail(error)
    assert [reports.get_nowait() for reports in stages] == [error, error]
    assert not feed.wait(1)
    with pytest.raises(EngineLost):
        feed.open(("generate", 2, 0), [("a",)], in_no_time, stages[0], 1)


class Busy:
    """A replica that generates until it has dropped a shard, and drops nothing before all replicas are asked to."""

    def __init__(self, all_asked: threading.Barrier) -> None:
        self.all_asked = all_asked
        self.generates, self.has_dropped = threading.Event(), threading.Event()
        self.calls: list[tuple[str, ShardKey]] = []

    def begin(self, key: ShardKey) -> None:
        self.calls.append(("begin", key))

    def call(self, method: Any, *arguments: Any) -> Any:
        return self.submit(method, *arguments).result(LIMIT_S)

    def submit(self, method: Any, keys: tuple[ShardKey, ...]) -> Future[None]:
        assert method is Worker.drop

        def drop() -> None:
            self.all_asked.wait(LIMIT_S)
            self.calls += [("drop", key) for key in keys]
            self.has_dropped.set()

        return in_background(drop)

    def generate(self, prompts: Sequence[Prompt]) -> list[Generated]:
        self.generates.set()
        assert self.has_dropped.wait(LIMIT_S), "it waits for a trajectory, and the drop for it"
        return [(key, name) for key, names in prompts for name in names]


def test_shards_are_opened_on_different_replicas_at_the_same_time() -> None:
    """Each may have to wait until its replica has generated something."""
    asked: dict[str, Future[Sequence[tuple[str, ...]]]] = {}

    def begin(replica: Any) -> Future[Sequence[tuple[str, ...]]]:
        asked[replica] = Future()
        if len(asked) == 3:
            for opened in asked.values():
                opened.set_result([])
        return asked[replica]

    replicas = Replicas(cast("Any", ["first", "second", "third"]), 2, lambda *_: [])
    keys = [("generate", 0, shard) for shard in range(3)]
    replicas.open(dict.fromkeys(keys, begin), Weights(version=0, digest=""), SimpleQueue())
    replicas.close()
    assert asked.keys() == {"first", "second", "third"}


def test_a_replica_opens_what_it_has_taken_before_it_drops_it() -> None:
    """Otherwise the shard would be opened after it was dropped, for good."""
    opens, may_open, drops = threading.Event(), threading.Event(), threading.Event()
    calls: list[str] = []

    class Opening:
        def generate(self, prompts: Sequence[Prompt]) -> list[Generated]:
            return []

        def submit(self, method: Any, keys: tuple[ShardKey, ...]) -> Future[None]:
            drops.set()
            return in_background(lambda: calls.append("drop"))

    def begin(replica: Any) -> Any:
        if replica is second:
            opens.set()
            assert may_open.wait(LIMIT_S)
            calls.append("begin")
        return in_no_time(replica, [("a",), ("b",)])

    first, second = Busy(threading.Barrier(1)), Opening()
    replicas = Replicas(
        cast("Any", [first, second]),
        1,
        lambda replica, weights, prompts: cast("Any", replica).generate(prompts),
    )
    key = ("generate", 0, 0)
    replicas.open({key: begin}, Weights(version=0, digest=""), SimpleQueue())
    assert opens.wait(LIMIT_S)
    dropping = in_background(lambda: replicas.drop([key]))
    assert not drops.wait(0.2), "it is asked to drop what it is about to open"
    may_open.set()
    dropping.result(LIMIT_S)
    replicas.close()
    assert calls == ["begin", "drop"]


def test_replicas_drop_a_shard_all_at_once_and_while_they_generate() -> None:
    all_asked = threading.Barrier(4)
    busy = [Busy(all_asked) for _ in range(4)]
    reports: Reports = SimpleQueue()
    dropped, kept = ("generate", 0, 0), ("generate", 0, 1)

    def generate(replica: Any, weights: Weights, prompts: Sequence[Prompt]) -> Sequence[Generated]:
        return replica.generate(prompts)  # type: ignore[no-any-return]

    replicas = Replicas(cast("Any", busy), 2, generate)
    for key in (dropped, kept):
        prompts = [(f"p{prompt}",) for prompt in range(8)]

        def begin(replica: Any, key: ShardKey = key, prompts: Any = prompts) -> Any:
            replica.begin(key)
            return in_no_time(replica, prompts)

        replicas.open({key: begin}, Weights(version=0, digest=""), reports)
    assert all(replica.generates.wait(LIMIT_S) for replica in busy)
    replicas.drop([dropped])
    while (report := reports.get(timeout=LIMIT_S)) is None:
        pass
    assert isinstance(report, Complete)
    assert report.key == kept
    replicas.close()
    for replica in busy:
        assert replica.calls.count(("drop", dropped)) == 1
        assert ("begin", dropped) not in replica.calls[replica.calls.index(("drop", dropped)) :]
