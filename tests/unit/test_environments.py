"""Environments: who wrote what, how a dialogue ends, what becomes of failures, and what a calculator says."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from ratchet.infra.workers.call_log import JOURNAL
from ratchet.rlhf.agents.agent_loop import TRIES, Generator, Rules
from ratchet.rlhf.config import EnvironmentConfig
from ratchet.rlhf.data.formats import Chat, Messages
from ratchet.rlhf.data.prompts import Prompt, PromptDataset
from ratchet.rlhf.environments.calculator import Environment as Calculator
from ratchet.rlhf.environments.calculator import calculate
from ratchet.rlhf.environments.dialogues import Beginning, Dialogue, content_ids
from ratchet.rlhf.environments.environment import (
    EnvironmentFailed,
    Observation,
    check_environment,
    environment_digest,
    load_environment,
)
from ratchet.rlhf.environments.guarded_calls import RESETS, EnvironmentCalls, try_environment
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Chunk, Request, RolloutEngine, Sampling, limit_of
from tests import tiny
from tests.environments import Leaves, Script

TEMPLATE = (
    "{% for m in messages %}({{ m.role }}){{ m.content }}<eos>.{% endfor %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)
PROMPT = (5, 6)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=40, seed=0)
GIVES_UP_S = 60
"""A test fails if nothing happens for so long."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny.model_folder(tmp_path_factory.mktemp("model")))


def id_of(number: int) -> str:
    return f"it000000-p00000-s{number:02d}"


class ScriptedEngine(RolloutEngine):
    """An engine that writes prepared turns, token by token, and records its requests."""

    def __init__(self, tokenizer: Any, turns: Sequence[Sequence[str]]) -> None:
        """`turns` are the texts of each trajectory."""
        self.tokenizer = tokenizer
        self.turns = {id_of(number): iter(texts) for number, texts in enumerate(turns)}
        self.requests: list[tuple[Request, Sampling]] = []

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        self.requests.append((request, sampling))
        whole = self.tokenizer(next(self.turns[request.trajectory_id]))["input_ids"]
        ids = whole[: limit_of(request, sampling)]
        reason = "stop" if ids == whole else "length"
        for position, token in enumerate(ids, start=1):
            yield Chunk((token,), (-0.1 * position,), reason if position == len(ids) else None)

    def load_weights(self, weights: Iterable[Any], adapter_config: bytes | None = None) -> int:
        return 0

    def place(self, *, model: bool, optimizer: bool) -> None: ...

    def close(self) -> None: ...


def generator_of(engine: ScriptedEngine, version: int = 0) -> Generator:
    generator = Generator(engine, engine.tokenizer, interruptible=True)
    generator.resume(version)
    return generator


def dialogues_for(*ground_truths: str) -> list[Dialogue]:
    return [
        Dialogue(Request(id_of(number), PROMPT), Beginning([], truth, False, "{}"))
        for number, truth in enumerate(ground_truths)
    ]


def wait_for(generator: Generator, dialogues: Sequence[Dialogue]) -> None:
    """Wait until all are complete, or an error is raised."""
    incomplete = set(map(id, dialogues))
    try:
        while incomplete:
            complete = generator.wait(GIVES_UP_S)
            assert complete, "the generator is stuck"
            incomplete -= set(map(id, complete))
    finally:
        generator.cancel(dialogues)


def write(engine: ScriptedEngine, calls: EnvironmentCalls, *ground_truths: str, max_turns: int = 5) -> list[Dialogue]:
    """Write trajectories whose prompts have these ground truths."""
    generator, dialogues = generator_of(engine), dialogues_for(*ground_truths)
    generator.submit([(dialogue, Rules(SAMPLING, calls, max_turns)) for dialogue in dialogues])
    wait_for(generator, dialogues)
    return dialogues


def talk(engine: ScriptedEngine, *scripts: Sequence[Any], max_turns: int = 5) -> tuple[list[Dialogue], list[list[str]]]:
    """The dialogues with environments that give these answers, and the turns that those heard."""
    heard: list[list[str]] = [[] for _ in scripts]
    calls = EnvironmentCalls(Script, {"scripts": scripts, "heard": heard})
    return write(engine, calls, *map(str, range(len(scripts))), max_turns=max_turns), heard


def test_what_an_environment_says_is_part_of_the_response_and_not_learned(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, [["ab", "f<eos>"], ["cde"]])
    scripts = [[Observation("XY", 0.5), Observation(None, 0.25)], [Observation(None, 1.0)]]
    (first, second), heard = talk(engine, *scripts)
    assert tokenizer.decode(first.ids) == "abXYf<eos>"
    assert first.mask == [1, 1, 0, 0, 1, 1]
    assert first.log_probs == [-0.1, -0.2, 0.0, 0.0, -0.1, -0.2]
    assert (first.turn_rewards, first.reward, first.finish_reason, first.error) == ([0.5, 0.25], 0.75, "stop", None)
    assert heard == [["ab", "f"], ["cde"]]
    assert [(turn["role"], turn["content"]) for turn in first.turns(tokenizer)] == [
        ("policy", "ab"),
        ("environment", "XY"),
        ("policy", "f"),
    ]
    assert (second.reward, second.finish_reason, len(second.ids)) == (1.0, "stop", 3)
    assert all(sampling.stop == ("!",) for _, sampling in engine.requests)
    begun, continued = (request for request, _ in engine.requests if request.trajectory_id == id_of(0))
    assert (begun.prompt_ids, begun.generated_tokens, begun.max_tokens) == (PROMPT, 0, 40)
    assert (continued.prompt_ids, continued.generated_tokens) == ((*PROMPT, *first.ids[:4]), 4)
    assert continued.max_tokens == 36


@pytest.mark.parametrize(
    ("turns", "observations", "max_turns", "reason", "text"),
    [
        (["a" * 50], [], 5, "length", "a" * 40),
        (["a" * 30], [Observation("b" * 10, 1.0)], 5, "length", "a" * 30),
        (["a" * 30, "cc"], [Observation("b" * 9, 1.0), Observation(None)], 5, "length", "a" * 30 + "b" * 9 + "c"),
        (["a"], [Observation("b", 1.0)], 1, "turns", "a"),
        (["a"], [Observation(None, 1.0)], 1, "stop", "a"),
    ],
)
def test_how_a_dialogue_ends(
    turns: list[str], observations: list[Observation], max_turns: int, reason: str, text: str, tokenizer: Any
) -> None:
    engine = ScriptedEngine(tokenizer, [turns])
    (dialogue,), _ = talk(engine, observations, max_turns=max_turns)
    assert (dialogue.finish_reason, tokenizer.decode(dialogue.ids)) == (reason, text)
    assert dialogue.reward == (1.0 if observations else 0.0), "the reward of the last turn counts"
    assert len(engine.requests) == len(turns)
    assert len(dialogue.ids) == len(dialogue.mask) == len(dialogue.log_probs) == len(dialogue.versions)
    assert dialogue.mask[-1] == 1, "a response does not end with an observation that nobody answers"


def test_an_environment_hears_special_tokens_that_are_text(tokenizer: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    engine = ScriptedEngine(tokenizer, [["<answer>4</answer><eos>"]])
    (dialogue,), heard = talk(engine, [Observation(None, 1.0)])
    assert len(dialogue.ids) == 4
    assert heard == [["<answer>4</answer>"]] == [[turn["content"] for turn in dialogue.turns(tokenizer)]]


def test_an_observation_without_a_text_separates_two_turns(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, [["ab", "c", "de"]])
    (dialogue,), _ = talk(engine, [Observation("", 0.5), Observation("X", 2), Observation(None, True)])  # type: ignore
    assert (dialogue.mask, dialogue.turn_ends) == ([1, 1, 1, 0, 1, 1], [2, 3, 6])
    assert dialogue.turn_rewards == [0.5, 2.0, 1.0]
    assert all(isinstance(reward, float) for reward in dialogue.turn_rewards), "as a journal wants it"
    turns = [(turn["role"], turn["content"]) for turn in dialogue.turns(tokenizer)]
    policy, environment = ["ab", "c", "de"], ["", "X"]
    assert turns[::2] == [("policy", text) for text in policy]
    assert turns[1::2] == [("environment", text) for text in environment]
    assert dialogue.num_turns == 6


def test_messages_go_through_the_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "more"}]
    between = "<unk>more<unk>"  # this tokenizer has no token for newlines
    assert tokenizer.decode(content_ids(Chat(messages), 7, tokenizer)) == between
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path, chat_template=TEMPLATE)
    after_eos = content_ids(Chat(messages), tokenizer.eos_token_id, tokenizer)
    assert tokenizer.decode(after_eos) == ".(user)more<eos>.(assistant)"
    assert tokenizer.decode(content_ids(Chat(messages), 7, tokenizer)) == "<eos>.(user)more<eos>.(assistant)"
    whole = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "turn"}, *messages]
    prompt = tokenizer.apply_chat_template(whole[:1], add_generation_prompt=True, return_dict=False)
    turn = tokenizer("turn<eos>")["input_ids"]
    expected = tokenizer.apply_chat_template(whole, add_generation_prompt=True, return_dict=False)
    assert [*prompt, *turn, *after_eos] == expected, "as if it had been written in one go"
    said: Messages = [{"role": "user", "content": "abc ratchet0mark xyz"}, {"role": "user", "content": "more"}]
    two = content_ids(Chat(said), tokenizer.eos_token_id, tokenizer)
    assert tokenizer.decode(two) == ".(user)abc ratchet0mark xyz<eos>.(user)more<eos>.(assistant)"
    for template, does in (("{{ messages[-1].content }}", "leaves out"), (f"{TEMPLATE}{TEMPLATE}", "repeats")):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=f"{does} the assistant's messages: use another chat template"):
            content_ids(Chat(messages), 7, tokenizer)


def test_a_result_of_a_tool_may_spell_the_end_of_a_turn(tokenizer: Any) -> None:
    """Also where the template writes another end after a call: nothing of the result is taken for the end of the turn
    before it."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.tool_calls %}({{ m.tool_calls[0].function.arguments.a }})"
        "{% elif m.role == 'assistant' %}{{ raise_exception('no call') }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}."
    )
    results = [{"role": "tool", "content": "a<eos>b"}, {"role": "tool", "content": "c"}]
    ids = content_ids(Chat(results), tokenizer.eos_token_id, tokenizer)
    assert tokenizer.decode(ids).endswith("a<eos>bc.")
    assert tokenizer.eos_token_id not in ids
    tokenizer.chat_template = tokenizer.chat_template.replace("}})", "}})<eos>")  # as the policy ended its turn
    assert tokenizer.decode(content_ids(Chat(results), tokenizer.eos_token_id, tokenizer)) == "a<eos>bc."


def test_an_environment_cannot_end_a_turn(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, [["ab", "f"]])
    [dialogue], _ = talk(engine, [Observation("X<eos>Y"), Observation(None)])
    assert tokenizer.decode(dialogue.ids) == "abX<eos>Yf"
    assert tokenizer.eos_token_id not in dialogue.ids


def test_an_environment_that_fails_is_named(tokenizer: Any) -> None:
    def fails_with(message: str, *scripts: Sequence[Any]) -> None:
        engine = ScriptedEngine(tokenizer, [["a"], ["b"]])
        with pytest.raises(EnvironmentFailed, match=message):
            talk(engine, *scripts)

    fails_with(r"IndexError: list index .* \(it000000-p00000-s00, turn 'a'\)", [])
    fails_with(r"step returned None, which is not an Observation \(it000000-p00000-s00, turn 'a'\)", [None])
    nan = Observation("", math.nan)
    fails_with(r"step gave the reward nan \(it000000-p00000-s01, turn 'b'\)", [Observation(None)], [nan])
    fails_with(r"step gave the part found inf \(", [Observation("", parts={"found": math.inf})])
    listed = Observation("", parts=[1.0])  # type: ignore[arg-type]
    fails_with(r"step gave the parts \[1.0\]: they should be numbers by name", [listed])
    no_text = Observation("", error=7)  # type: ignore[arg-type]
    fails_with(r"step gave the error 7: it should be a text, or None \(it000000-p00000-s00, turn 'a'\)", [no_text])
    for content in (7, {"role": "user", "content": "?"}, [{"role": "user"}], ["?"], []):
        message = r"it should be a text, None, or messages .* \(it000000-p00000-s00, turn 'a'\)"
        fails_with(message, [Observation(content)])  # type: ignore[arg-type]
    calls = EnvironmentCalls(load_environment("calculator"), {"no": "option"})
    with pytest.raises(EnvironmentFailed, match=r"raised TypeError: .* \(it000000-p00000-s00, at reset\)"):
        write(ScriptedEngine(tokenizer, []), calls, "1")
    with pytest.raises(UserError, match=r"environment nobody: .*\(calculator, gymnasium, harbor, tools\)"):
        load_environment("nobody")


def test_an_environment_that_exits_is_an_error_like_others(tokenizer: Any) -> None:
    message = r"raised SystemExit: no key at environments.py:\d+ in reset \(it000000-p00000-s00, at reset\)"
    with pytest.raises(EnvironmentFailed, match=message):
        write(ScriptedEngine(tokenizer, []), EnvironmentCalls(Leaves, {}), "no key")


class Unreliable:
    """Fails in the second turn, unless the trajectory has been started often enough."""

    stop = ()

    def __init__(self, good_from: Mapping[str, int], starts: list[str]) -> None:
        self.good_from, self.starts, self.turns = good_from, starts, 0

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        self.starts.append(ground_truth)
        self.is_good = self.starts.count(ground_truth) >= self.good_from[ground_truth]

    def step(self, turn: str) -> Observation:
        self.turns += 1
        if self.turns == 2 and not self.is_good:
            raise RuntimeError("not today")
        return Observation("X" if self.turns == 1 else None, 1.0)


def test_drop_leaves_out_the_trajectory_whose_environment_fails(tokenizer: Any) -> None:
    starts: list[str] = []
    options = {"good_from": {"good": 1, "bad": 2, "fine": 1}, "starts": starts}
    engine = ScriptedEngine(tokenizer, [["a", "b"], ["c", "d"], ["e", "f"]])
    first, failed, last = write(engine, EnvironmentCalls(Unreliable, options, on_error="drop"), "good", "bad", "fine")
    for dialogue, text in ((first, "aXb"), (last, "eXf")):
        assert (tokenizer.decode(dialogue.ids), dialogue.reward) == (text, 2.0)
        assert (dialogue.finish_reason, dialogue.error) == ("stop", None)
    assert failed.finish_reason == "error"
    message = r"raised RuntimeError: not today at test_environments.py:\d+ in step \(it000000-p00000-s01, turn 'd'\)$"
    assert re.search(message, str(failed.error))
    assert sorted(starts) == ["bad", "fine", "good"]


def test_retry_starts_a_trajectory_again_until_it_is_left_out(tokenizer: Any) -> None:
    starts: list[str] = []
    options = {"good_from": {"recovers": TRIES, "never": TRIES + 1}, "starts": starts}
    engine = ScriptedEngine(tokenizer, [["a", "b", "c", "d", "e", "f"], ["u", "v", "w", "x", "y", "z"]])
    recovered, failed = write(engine, EnvironmentCalls(Unreliable, options, on_error="retry"), "recovers", "never")
    assert (tokenizer.decode(recovered.ids), recovered.mask, recovered.reward) == ("eXf", [1, 0, 1], 2.0)
    assert (recovered.finish_reason, recovered.error) == ("stop", None)
    requests = [request for request, _ in engine.requests if request.trajectory_id == id_of(0)]
    assert [request.generated_tokens for request in requests] == [0, 2] * TRIES
    assert [request.prompt_ids for request in requests[::2]] == [PROMPT] * TRIES
    assert failed.finish_reason == "error"
    assert str(failed.error).endswith("(it000000-p00000-s01, turn 'z')")
    assert sorted(starts) == ["never"] * TRIES + ["recovers"] * TRIES


class Impatient:
    """Its tool does not answer in time."""

    stop = ()

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        raise TimeoutError("no answer from the tool")


def test_an_error_of_a_tool_is_not_the_time_limit(tokenizer: Any) -> None:
    with pytest.raises(EnvironmentFailed, match="raised TimeoutError: no answer from the tool"):
        write(ScriptedEngine(tokenizer, []), EnvironmentCalls(Impatient, {}), "1")


class Held:
    """Starts once the test lets it."""

    stop = ()

    def __init__(self, released: threading.Event, started: list[str]) -> None:
        self.released, self.started = released, started

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        self.started.append(ground_truth)
        if ground_truth == "fails":
            raise ValueError(ground_truth)
        assert self.released.wait(GIVES_UP_S)

    def step(self, turn: str) -> Observation:
        return Observation(None)


def test_fail_stops_the_others_before_they_call_anything(tokenizer: Any) -> None:
    released, started = threading.Event(), list[str]()
    calls = EnvironmentCalls(Held, {"released": released, "started": started}, concurrency=2, on_error="fail")
    generator = generator_of(ScriptedEngine(tokenizer, [["a"]]))
    dialogues = dialogues_for("fails", "held", "held", *["waits"] * 20)
    generator.submit([(dialogue, Rules(SAMPLING, calls)) for dialogue in dialogues])
    with pytest.raises(EnvironmentFailed, match="raised ValueError: fails"):
        wait_for(generator, dialogues)
    released.set()
    later = dialogues_for("later")
    generator.submit([(dialogue, Rules(SAMPLING, calls)) for dialogue in later])
    wait_for(generator, later)
    assert later[0].finish_reason == "stop"
    assert "waits" not in started


def test_a_hanging_environment_costs_only_its_trajectory(tokenizer: Any) -> None:
    released, started = threading.Event(), list[str]()
    options = {"released": released, "started": started}
    # only these have the short limit: on a slow machine an answer may take that long, too
    hanging_calls = EnvironmentCalls(Held, options, timeout_s=0.2, concurrency=1, on_error="drop")
    answering_calls = EnvironmentCalls(Unreliable, {"good_from": {"good": 1}, "starts": []})
    generator = generator_of(ScriptedEngine(tokenizer, [["a", "b"]]))
    answering, *hanging = dialogues_for("good", "hangs", "hangs", "hangs")
    generator.submit([(dialogue, Rules(SAMPLING, hanging_calls)) for dialogue in hanging])
    generator.submit([(answering, Rules(SAMPLING, answering_calls, max_turns=5))])
    wait_for(generator, [answering, *hanging])
    released.set()
    assert (answering.finish_reason, answering.reward) == ("stop", 2.0)
    for number, dialogue in enumerate(hanging, start=1):
        assert (dialogue.finish_reason, dialogue.ids) == ("error", [])
        assert dialogue.error == (
            "rollout.environment took longer than rollout.environment.timeout_s 0.2 s "
            f"(it000000-p00000-s{number:02d}, at reset)"
        )


@dataclass
class Crowd:
    """Counts those who meet."""

    barrier: threading.Barrier
    lock: threading.Lock = field(default_factory=threading.Lock)
    size: int = 0
    largest: int = 0

    def meet(self) -> None:
        """Wait until as many as the barrier wants are here."""
        with self.lock:
            self.size += 1
            self.largest = max(self.largest, self.size)
        self.barrier.wait(GIVES_UP_S)
        with self.lock:
            self.size -= 1


class Meets:
    """Answers a turn together with others."""

    stop = ()

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None: ...

    def step(self, turn: str) -> Observation:
        self.crowd.meet()
        return Observation(None)


def test_environments_are_called_concurrently_up_to_a_limit(tokenizer: Any) -> None:
    crowd = Crowd(threading.Barrier(3))
    calls = EnvironmentCalls(Meets, {"crowd": crowd}, concurrency=3)
    dialogues = write(ScriptedEngine(tokenizer, [["a"]] * 12), calls, *["?"] * 12)
    assert [dialogue.finish_reason for dialogue in dialogues] == ["stop"] * 12
    assert crowd.largest == 3


class AsyncStep:
    """Answers once another trajectory is asked, too."""

    stop = ()

    def __init__(self, barrier: asyncio.Barrier) -> None:
        self.barrier = barrier

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        self.ground_truth = ground_truth

    async def step(self, turn: str) -> Observation:
        await self.barrier.wait()
        return Observation(None, float(self.ground_truth))


class AsyncResetAndStep(AsyncStep):
    async def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:  # type: ignore[override]
        await self.barrier.wait()
        self.ground_truth = ground_truth


@pytest.mark.parametrize(
    "environment_class",
    [AsyncStep, AsyncResetAndStep],
)
def test_an_environment_may_be_asynchronous(environment_class: Any, tokenizer: Any) -> None:
    calls = EnvironmentCalls(environment_class, {"barrier": asyncio.Barrier(2)})
    dialogues = write(ScriptedEngine(tokenizer, [["a"], ["b"]]), calls, "1", "2")
    assert [(dialogue.finish_reason, dialogue.reward) for dialogue in dialogues] == [("stop", 1.0), ("stop", 2.0)]


class ReplayableScript(Script):
    replayable = True


def test_a_replayed_environment_hears_the_turns_that_were_answered(tokenizer: Any) -> None:
    """The first dialogue was interrupted before its second turn was answered, the other during this turn."""
    script = [
        Observation("X", 0.5, parts={"found": 9}),
        Observation("Y", 0.25, parts={"found": 0.2}),
        Observation(None, 1.0, parts={"found": 1, "lost": 2}),
    ]
    heard: list[list[str]] = [[], []]
    calls = EnvironmentCalls(ReplayableScript, {"scripts": [script, script], "heard": heard})
    assert calls.replayable
    assert not EnvironmentCalls(Script, {}).replayable
    dialogues = dialogues_for("0", "1")
    for dialogue, text, ends in zip(dialogues, ("abXcd", "abXc"), ([2, 5], [2]), strict=True):
        ids = tokenizer(text)["input_ids"]
        log_probs, mask, versions = [-0.1] * len(ids), [1, 1, 0, 1, 1][: len(ids)], [0] * len(ids)
        committed = Dialogue(dialogue.request, None, ids, log_probs, mask, versions, [0, 3], ends, [0.5])
        committed.parts = [{"name": "found", "value": 0.1}]
        [row] = pa.Table.from_pylist([committed.journaled()], JOURNAL).to_pylist()
        dialogue.restore(row)
    engine = ScriptedEngine(tokenizer, [["e"], ["d", "e"]])
    generator = generator_of(engine, version=3)
    generator.submit([(dialogue, Rules(SAMPLING, calls, max_turns=5)) for dialogue in dialogues])
    wait_for(generator, dialogues)
    assert heard == [["ab", "cd", "e"]] * 2
    for dialogue in dialogues:
        assert tokenizer.decode(dialogue.ids) == "abXcdYe"
        assert dialogue.mask == [1, 1, 0, 1, 1, 0, 1]
        assert dialogue.turn_rewards == [0.5, 0.25, 1.0], "a replayed answer earns nothing"
        assert dialogue.sums_of_parts == {"found": 0.1 + 0.2 + 1, "lost": 2}, "nor does it count again"
        assert dialogue.finish_reason == "stop"
    assert dialogues[0].versions == [0, 0, 0, 0, 0, 0, 3], "an observation has the version of the turn before"
    assert dialogues[1].versions == [0, 0, 0, 0, 3, 3, 3]
    requests = sorted((request.trajectory_id, request.generated_tokens) for request, _ in engine.requests)
    assert requests == [(id_of(0), 6), (id_of(1), 4), (id_of(1), 6)]


@pytest.mark.parametrize("stop", [(3,), ("",), "text", None])
def test_stops_are_texts(stop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calculator, "stop", stop)
    with pytest.raises(UserError, match="calculator needs `stop`, the texts that end a turn"):
        check_environment("calculator", {})


def test_a_template_that_knows_no_tools_is_named(tokenizer: Any) -> None:
    refuses = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path, chat_template=refuses)
    with pytest.raises(UserError, match=r"refuses the messages of rollout.environment \(roles: tool\): no tools"):
        content_ids(Chat([{"role": "tool", "content": "42"}]), 7, other)


def test_an_environment_is_known_by_its_source(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    stop = ()\n")
    before = environment_digest(f"{path}:Mine", {})
    path.write_text("class Mine:\n    stop = ('.',)\n")
    assert environment_digest(f"{path}:Mine", {}) != before


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2", "3"),
        (" 12 * (3 + 4) ", "84"),
        ("-7/2", "-3.5"),
        ("1/3", "0.333333"),
        ("2/0", "error"),
        ("__import__('os').getcwd()", "error"),
        ("9**9**9", "error"),
        ("(" * 20_000, "error"),
        ("", "error"),
        ("1/10000000", "0"),
        ("(0-1)/10000000", "0"),
        ("(0-7)/2", "-3.5"),
        ("*".join(["9" * 18] * 20) + "/1", str(int("9" * 18) ** 20)),
    ],
)
def test_calculate(expression: str, value: str) -> None:
    assert calculate(expression) == value


def test_a_quotient_that_no_float_can_hold() -> None:
    exact = Fraction((10**18 - 1) ** 20, 17 * 10**15 + 3)
    assert abs(Fraction(calculate("*".join(["9" * 18] * 20) + "/17000000000000003")) - exact) <= Fraction(1, 2 * 10**6)


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ("so <tool>6*7</tool>", "<result>42</result>"),
        ("<tool>1</tool> then <tool>2</tool>", "<result>2</result>"),
        ("<tool>1</tool> is one", None),
        ("</tool>", None),
        ("it is 42", None),
    ],
)
def test_the_calculator_answers_a_call_that_ends_a_turn(turn: str, says: str | None) -> None:
    assert Calculator().step(turn) == Observation(says)


class Decodes:
    """What an error about a ground truth that is a text says to do."""

    stop = ()

    async def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        self.target = json.loads(ground_truth)["target"]


def test_an_environment_is_reset_on_a_prompt_before_the_run_starts(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "ground_truth": truth} for truth in ({"target": 3}, '{"target": 3}')]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    structure, text = PromptDataset([tmp_path / "a.jsonl"])
    expects_structure = EnvironmentConfig(name="tests.environments:Structured")
    assert try_environment(expects_structure, [structure], None) == []
    [failure] = try_environment(expects_structure, [structure, text], None)
    assert failure.startswith(f"{tmp_path}/a.jsonl, line 2: rollout.environment raised TypeError: ")
    assert "decode it in reset (json.loads(ground_truth)), or store it as a structure" in failure
    assert try_environment(EnvironmentConfig(name=f"{__name__}:Decodes"), [text], None) == [], "the fix works"


class Flaky:
    """Fails at the first two resets."""

    stop = ()
    resets = 0

    def reset(self, messages: Any, ground_truth: str, extra_info: Any) -> None:
        type(self).resets += 1
        if type(self).resets % RESETS:
            raise RuntimeError("not yet")


def test_an_environment_that_may_fail_has_several_attempts() -> None:
    prompt = Prompt("s", [{"role": "user", "content": "x"}], None, False, "{}")
    flaky = EnvironmentConfig(name=f"{__name__}:Flaky")
    assert try_environment(flaky, [prompt], None) == []
    [failure] = try_environment(flaky.model_copy(update={"on_error": "fail"}), [prompt], None)
    assert "RuntimeError: not yet" in failure
