"""Environments: who wrote what, when a dialogue ends, and what a calculator says."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhf.engines.base import Generation, Request, Sampling
from rlhf.environments import EnvironmentFailed, Observation, check_environment, environment_digest, load_environment
from rlhf.environments.calculator import Environment as Calculator
from rlhf.environments.calculator import calculate
from rlhf.environments.dialogues import Beginning, Dialogue, Environments, content_ids, multi_turn
from rlhf.errors import UserError
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}({{ m.role }}){{ m.content }}<eos>.{% endfor %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=40, seed=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny.model_folder(tmp_path_factory.mktemp("model")))


@dataclass
class Policy:
    """One that writes these turns, and notes what it was asked."""

    tokenizer: Any
    turns: list[list[str]]
    asked: list[tuple[list[Request], Sampling]] = field(default_factory=list)

    def __call__(self, requests: Any, sampling: Sampling) -> tuple[list[Generation], list[list[int]]]:
        written, number = [], len(self.asked)
        for request, text in zip(requests, self.turns[number], strict=True):
            ids = self.tokenizer(text)["input_ids"]
            reason = "stop" if len(ids) <= request.max_tokens else "length"
            ids = ids[: request.max_tokens]
            written.append(Generation(tuple(ids), tuple(-0.1 * len(ids) for _ in ids), reason))
        self.asked.append((list(requests), sampling))
        return written, [[number] * len(one.response_ids) for one in written]


def others(
    name: str, *ground_truths: str, timeout_s: float = 60.0, options: dict[str, Any] | None = None
) -> Environments:
    beginnings = [
        Beginning(f"it000000-p00000-s{row:02d}", [], truth, False, "{}") for row, truth in enumerate(ground_truths)
    ]
    return Environments(load_environment(name), options or {}, beginnings, timeout_s=timeout_s)


def talk(policy: Policy, *scripts: list[Any], max_turns: int) -> tuple[list[Dialogue], list[list[str]]]:
    """The dialogues of a policy with environments that say these things, and what those heard."""
    heard: list[list[str]] = [[] for _ in scripts]
    options = {"scripts": scripts, "heard": heard}
    environments = others("tests.environments:Script", *map(str, range(len(scripts))), options=options)
    dialogues = [Dialogue(Request(f"it000000-p00000-s{row:02d}", (5, 6))) for row in range(len(scripts))]
    multi_turn(policy, dialogues, environments, SAMPLING, policy.tokenizer, max_turns)
    return dialogues, heard


def test_what_is_heard_is_part_of_the_response_and_never_learned(tokenizer: Any) -> None:
    policy = Policy(tokenizer, [["ab", "cde"], ["f<eos>"]])
    scripts = [[Observation("XY", 0.5), Observation(None, 0.25)], [Observation(None, 1.0)]]
    (first, second), heard = talk(policy, *scripts, max_turns=5)
    assert tokenizer.decode(first.ids) == "abXYf<eos>"
    assert first.mask == [1, 1, 0, 0, 1, 1]
    assert first.log_probs == [-0.2, -0.2, 0.0, 0.0, -0.2, -0.2]
    assert first.versions == [0, 0, 0, 0, 1, 1]
    assert (first.reward, first.finish_reason) == (0.75, "stop")
    assert heard == [["ab", "f"], ["cde"]]
    assert [(turn["role"], turn["content"]) for turn in first.turns(tokenizer)] == [
        ("policy", "ab"),
        ("environment", "XY"),
        ("policy", "f"),
    ]
    assert (second.reward, second.finish_reason, len(second.ids)) == (1.0, "stop", 3)
    [(both, sampling), (one, _)] = policy.asked
    assert len(both) == 2
    assert sampling.stop == ("!",)
    assert one[0].prompt_ids == (5, 6, *first.ids[:4])
    assert (one[0].generated_tokens, one[0].max_tokens) == (4, 36)


@pytest.mark.parametrize(
    ("turns", "observations", "max_turns", "reason", "text"),
    [
        (["a" * 50], [], 5, "length", "a" * 40),
        (["a" * 30], [Observation("b" * 10, 1.0)], 5, "length", "a" * 30),
        (["a" * 30], [Observation("b" * 9, 1.0), Observation(None)], 5, "length", "a" * 30 + "b" * 9 + "c"),
        (["a"], [Observation("b", 1.0)], 1, "turns", "a"),
        (["a"], [Observation(None, 1.0)], 1, "stop", "a"),
    ],
)
def test_how_a_dialogue_ends(
    turns: list[str], observations: list[Observation], max_turns: int, reason: str, text: str, tokenizer: Any
) -> None:
    policy = Policy(tokenizer, [[turn] for turn in [*turns, "cc"]])
    (it,), _ = talk(policy, observations, max_turns=max_turns)
    assert (it.finish_reason, tokenizer.decode(it.ids)) == (reason, text)
    assert it.reward == (1.0 if observations else 0.0), "what the last turn earned counts"
    assert len(it.ids) == len(it.mask) == len(it.log_probs) == len(it.versions)
    assert it.mask[-1] == 1, "nothing stands at the end that nobody answers to"


def test_messages_go_through_the_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "more"}]
    between = "<unk>more<unk>"  # new lines, which this tokenizer does not know
    assert tokenizer.decode(content_ids(messages, 7, tokenizer)) == between
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path, chat_template=TEMPLATE)
    after_eos = content_ids(messages, tokenizer.eos_token_id, tokenizer)
    assert tokenizer.decode(after_eos) == ".(user)more<eos>.(assistant)"
    assert tokenizer.decode(content_ids(messages, 7, tokenizer)) == "<eos>.(user)more<eos>.(assistant)"
    whole = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "turn"}, *messages]
    prompt = tokenizer.apply_chat_template(whole[:1], add_generation_prompt=True, return_dict=False)
    turn = tokenizer("turn<eos>")["input_ids"]
    expected = tokenizer.apply_chat_template(whole, add_generation_prompt=True, return_dict=False)
    assert [*prompt, *turn, *after_eos] == expected, "as if it had been written in one go"
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(UserError, match="use another chat template"):
        content_ids(messages, 7, tokenizer)


def test_an_environment_that_fails_is_named(tokenizer: Any) -> None:
    with pytest.raises(EnvironmentFailed, match=r"IndexError: list index .* \(it000000-p00000-s00, turn 'a'\)"):
        talk(Policy(tokenizer, [["a"]]), [], max_turns=3)
    with pytest.raises(
        EnvironmentFailed, match=r"step returned None, which is not an Observation \(it000000-p00000-s00"
    ):
        talk(Policy(tokenizer, [["a"]]), [None], max_turns=3)
    with pytest.raises(EnvironmentFailed, match=r"step gave the reward nan \(it000000-p00000-s01, turn 'b'\)"):
        talk(Policy(tokenizer, [["a", "b"]]), [Observation("")], [Observation("", math.nan)], max_turns=3)
    for says in (7, {"role": "user", "content": "?"}, [{"role": "user"}], ["?"], []):
        with pytest.raises(EnvironmentFailed, match=r"it should be a text, None, or messages .* \(it000000-p00000-s00"):
            talk(Policy(tokenizer, [["a"]]), [Observation(says)], max_turns=3)  # type: ignore[arg-type]
    with pytest.raises(
        EnvironmentFailed,
        match=r"raised SystemExit: no key at environments.py:\d+ in reset \(it000000-p00000-s00, at reset\)",
    ):
        others("tests.environments:Leaves", "no key")
    with pytest.raises(EnvironmentFailed, match=r"raised TypeError: .* \(it000000-p00000-s00, at reset"):
        others("calculator", "1", options={"no": "option"})
    with pytest.raises(UserError, match=r"rollout.environment nobody: ModuleNotFoundError.*\(calculator\)"):
        load_environment("nobody")


def test_environments_are_asked_at_the_same_time() -> None:
    met = others("tests.environments:Meeting", *"abcdefgh", options={"barrier": threading.Barrier(8)})
    turns = {f"it000000-p00000-s{row:02d}": f"turn {row}" for row in reversed(range(8))}
    assert [each.content for each in met.step(turns)] == list(turns.values())


def test_an_answer_has_its_own_time() -> None:
    """However early others answer, and however late."""
    slow = others("tests.environments:Slow", "60", "0.5", "0.1", timeout_s=6.0)
    first, *rest = (f"it000000-p00000-s{row:02d}" for row in range(3))
    assert [each.content for each in slow.step(dict.fromkeys(rest, "?"))] == ["0.5", "0.1"]
    with pytest.raises(EnvironmentFailed, match=rf"took longer than rollout.environment.timeout_s 6 s \({first}"):
        slow.step({first: "?"} | dict.fromkeys(rest, "?"))


def test_nothing_more_is_asked_after_a_failure() -> None:
    counted: list[str] = []
    with pytest.raises(EnvironmentFailed, match="raised ValueError"):
        others("tests.environments:Counted", "fails", *["good"] * 1000, options={"begun": counted})
    time.sleep(0.5)
    assert len(counted) < 900


@pytest.mark.parametrize("stop", [(3,), ("",), "text", None])
def test_stops_are_texts(stop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calculator, "stop", stop)
    with pytest.raises(UserError, match="calculator has no `stop`: the texts that end a turn"):
        check_environment("calculator", {})


def test_a_template_that_knows_no_tools_is_named(tokenizer: Any) -> None:
    refuses = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path, chat_template=refuses)
    with pytest.raises(UserError, match=r"refuses the messages of rollout.environment \(roles: tool\): no tools"):
        content_ids([{"role": "tool", "content": "42"}], 7, other)


def test_an_environment_is_known_by_its_source(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    stop = ()\n")
    before = environment_digest(f"{path}:Mine")
    path.write_text("class Mine:\n    stop = ('.',)\n")
    assert environment_digest(f"{path}:Mine") != before


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
